"""What a step moves and computes, operator by operator, and how fast a GPU could do that.

Counted over fake tensors, of which each operator reads what it is given and writes what it makes:
what an eager GPU does with one kernel an operator. ``torch.compile`` fuses them and moves less.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pospre.batch import Batch
from pospre.planning.fake import FakeTraining
from pospre.planning.flops import operator_flops
from pospre.planning.gpus import Gpu
from pospre.recipe.recipe import Recipe

_ATEN = torch.ops.aten
_NOTHING = (  # memory is asked for, and not touched
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
)
_CAST, _ITEM = _ATEN._to_copy, _ATEN._local_scalar_dense


class Kernel(NamedTuple):
    """One operator: bytes that it reads and writes, FLOPs of a product, whether in fp32."""

    bytes: int
    flops: int
    is_fp32: bool

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time on a GPU: of its memory or of its arithmetic, whichever is more."""
        peak = gpu.fp32 if self.is_fp32 else gpu.bf16
        return max(self.bytes / gpu.memory_bandwidth, self.flops / peak)


def floor_seconds(kernels: Iterable[Kernel], gpu: Gpu) -> float:
    """Return the least time of kernels that run one after the other, as they do on one stream."""
    return sum(kernel.seconds(gpu) for kernel in kernels)


@dataclass(frozen=True)
class KernelLines:
    """Kernels of a step over any number of samples, from those over two numbers of samples.

    Bytes and FLOPs of every kernel grow linearly with the samples.

    Attributes:
        small: a number of samples, and the kernels over them.
        large: a larger number, and the same kernels over them.
    """

    small: tuple[int, list[Kernel]]
    large: tuple[int, list[Kernel]]

    def at(self, samples: int) -> list[Kernel]:
        """Return the kernels over so many samples."""
        (small, low), (large, high) = self.small, self.large
        share = (samples - small) / (large - small)
        return [
            Kernel(
                round(one.bytes + share * (other.bytes - one.bytes)),
                round(one.flops + share * (other.flops - one.flops)),
                one.is_fp32,
            )
            for one, other in zip(low, high, strict=True)
        ]


class Traffic(TorchDispatchMode):
    """Counts what the operators inside move and compute; views move nothing.

    Attributes:
        kernels: the operators that move something, in their order.
        casts: copies into another dtype.
        items: values that the host waits for. Over fake tensors most of them are errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self.casts = self.items = 0

    @property
    def bytes(self) -> int:
        """Return the bytes of all kernels."""
        return sum(kernel.bytes for kernel in self.kernels)

    @property
    def flops(self) -> int:
        """Return the FLOPs of all kernels."""
        return sum(kernel.flops for kernel in self.kernels)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        self.items += packet is _ITEM
        made = func(*args, **kwargs)
        read = _tensors((args, kwargs))
        outputs = _tensors(made)
        self.casts += packet is _CAST and any(one.dtype != read[0].dtype for one in outputs)
        # prim: what Python asks of a tensor, such as its device
        if func.namespace != "prim" and packet not in _NOTHING and not func.is_view:
            moved = _written(func, args, kwargs, outputs) + sum(map(_size, read))
            flops = operator_flops(packet, args, kwargs, made)
            is_fp32 = any(one.dtype == torch.float32 for one in outputs[:1])
            if moved or flops:
                self.kernels.append(Kernel(moved, flops, is_fp32))
        return made


def count_step(recipe: Recipe, samples: int) -> Traffic:
    """Return what an eager training step of a recipe moves and computes, the update included."""
    training = FakeTraining(recipe)
    training.step(training.batch(2))  # makes the optimiser's state
    with training.mode:
        training.optimizer.zero_grad()
    batch = training.batch(samples)
    with Traffic() as traffic:
        training.step(batch)
    return traffic


def trace_step(training: FakeTraining, batch: Batch) -> tuple[Traffic, Traffic]:
    """Return what a training step moves and computes: (forward and backward, the update).

    The optimiser has its state; there are no gradients yet.
    """
    with Traffic() as work:
        training.forward_backward(batch)
    with Traffic() as update:
        training.update()
    return work, update


def _written(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> int:
    """Return the bytes written: of what is new, and of arguments that are changed."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        each
        for one in func._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
        for each in _tensors(given.get(one.name))
    ]
    known = {id(each) for each in changed}
    return sum(_size(each) for each in [*changed, *(o for o in outputs if id(o) not in known)])


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; what is expanded is there once."""
    if tensor.device.type == "meta":
        return tensor.nbytes
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
