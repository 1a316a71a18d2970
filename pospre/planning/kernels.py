"""Bytes and FLOPs of a step, operator by operator, and the least time that a GPU needs for them.

Counted over fake tensors: each operator reads its inputs and writes its results, as an eager GPU
does with one kernel per operator. The compiled step has fewer kernels: ``fusion.py``.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)
from torch.utils.weak import WeakIdKeyDictionary

from pospre.planning.gpus import Gpu

_ATEN = torch.ops.aten
# torch counts attention on GPUs only; without these two a CPU's would count as nothing
_ATTENTION: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention_for_cpu: lambda *shapes, **_: sdpa_flop_count(
        *shapes[:3]
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}
# functions of tensors; torch has wrapped those of its own so
_COUNTED: dict[Any, Any] = {
    **flop_registry,
    **{operator: shape_wrapper(count) for operator, count in _ATTENTION.items()},
}
_NOTHING = (  # memory is asked for, and not touched
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.new_empty_strided,
)
_CAST, _ITEM = _ATEN._to_copy, _ATEN._local_scalar_dense
_NORM_BACKWARD = _ATEN.native_layer_norm_backward
_REDUCTIONS = {  # and where the schema has their dimensions
    **dict.fromkeys(("sum", "mean", "amax", "amin", "argmax", "argmin", "any", "all", "var"), 1),
    **dict.fromkeys(("max", "min", "std", "var_mean", "logsumexp"), 1),
    **dict.fromkeys(("norm", "linalg_vector_norm"), 2),
}
_LOOKUPS = ("index", "gather", "embedding", "scatter", "scatter_add", "index_put", "sort", "topk")

Role = Literal["product", "row reduction", "lookup", "norm backward", "pointwise"]


class Kernel(NamedTuple):
    """A kernel of a GPU: bytes read and written, FLOPs, and whether these are in fp32."""

    bytes: int
    flops: int
    is_fp32: bool

    def seconds(self, gpu: Gpu) -> float:
        """Return the least time on a GPU: the longer of memory and arithmetic."""
        peak = gpu.fp32 if self.is_fp32 else gpu.bf16
        return max(self.bytes / gpu.memory_bandwidth, self.flops / peak)


def floor_seconds(kernels: Iterable[Kernel], gpu: Gpu) -> float:
    """Return the least time of kernels that run one after the other, as on one stream."""
    return sum(kernel.seconds(gpu) for kernel in kernels)


class Operator(NamedTuple):
    """One call of an operator.

    Attributes:
        role: how ``fusion.fused`` puts it into a kernel.
        reads: bytes by the number of a value; what is written again has another number.
        writes: bytes by the number of a value, for the values that it writes.
        flops: of a product.
        is_fp32: whether it computes in fp32.
    """

    role: Role
    reads: dict[int, int]
    writes: dict[int, int]
    flops: int
    is_fp32: bool

    @property
    def is_alone(self) -> bool:
        """Whether it is a kernel of its own in the compiled step."""
        return self.role in ("product", "row reduction")

    @property
    def kernel(self) -> Kernel:
        """Return what an eager GPU starts."""
        moved = sum(self.reads.values()) + sum(self.writes.values())
        return Kernel(moved, self.flops, self.is_fp32)


class StepTrace(TorchDispatchMode):
    """Counts the bytes and FLOPs of the operators inside; views move nothing.

    Attributes:
        operators: that move something, in their order.
        casts: copies into another dtype.
        items: values that the host waits for. Over fake tensors most of them are errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Operator] = []
        self.casts = self.items = 0
        self._numbers = WeakIdKeyDictionary()  # of storages
        self._count = itertools.count()

    @property
    def kernels(self) -> list[Kernel]:
        """Return what an eager GPU starts."""
        return [one.kernel for one in self.operators]

    @property
    def flops(self) -> int:
        """Return the FLOPs of all operators."""
        return sum(one.flops for one in self.operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        self.items += packet is _ITEM
        made = func(*args, **kwargs)
        read = tensors((args, kwargs))
        outputs = tensors(made)
        self.casts += packet is _CAST and any(one.dtype != read[0].dtype for one in outputs)
        # prim: what Python asks of a tensor, such as its device
        if func.namespace != "prim" and packet not in _NOTHING and not func.is_view:
            reads = self._sizes(read, new=False)
            writes = self._sizes(_written(func, args, kwargs, outputs), new=True)
            flops = operator_flops(packet, args, kwargs, made)
            is_fp32 = any(one.dtype == torch.float32 for one in outputs[:1])
            if reads or writes:
                role = "product" if flops else _role(packet, args, kwargs, read)
                self.operators.append(Operator(role, reads, writes, flops, is_fp32))
        return made

    def _sizes(self, values: list[Tensor], *, new: bool) -> dict[int, int]:
        """Return the bytes of tensors by their number, ``new`` where they are written."""
        found: dict[int, int] = defaultdict(int)
        for each in values:
            storage = each.untyped_storage()
            if new or storage not in self._numbers:
                self._numbers[storage] = next(self._count)
            found[self._numbers[storage]] += _size(each)
        return dict(found)


def count_flops(work: Callable[[], object]) -> int:
    """Return the FLOPs of matrix products, convolutions and attention in ``work``.

    A product and its sum are two. Work on fake tensors counts as well.
    """
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        work()
    return int(counter.get_total_flops())


def operator_flops(operator: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the FLOPs of one call, as ``count_flops`` counts them; 0 for other operators."""
    known: Any = _COUNTED.get(operator)
    return 0 if known is None else int(known(*args, **kwargs, out_val=made))


def _role(packet: Any, args: Any, kwargs: Any, read: list[Tensor]) -> Role:
    name = packet.__name__
    if packet is _NORM_BACKWARD:
        return "norm backward"
    if name.removesuffix("_") in _LOOKUPS:
        return "lookup"
    if name not in _REDUCTIONS or (len(read) > 1):
        return "pointwise"
    place = _REDUCTIONS[name]
    asked = kwargs.get("dim", args[place] if len(args) > place else None)
    dims = [asked] if isinstance(asked, int) else asked
    inner = read[0].dim() - 1
    is_inner = dims and all(dim in (-1, inner) for dim in dims)
    return "pointwise" if is_inner else "row reduction"


def _written(func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that are written: new ones, and changed arguments."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    changed = [
        each
        for one in func._schema.arguments
        if one.alias_info is not None and one.alias_info.is_write
        for each in tensors(given.get(one.name))
    ]
    known = {id(each) for each in changed}
    return [*changed, *(one for one in outputs if id(one) not in known)]


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested values."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _size(tensor: Tensor) -> int:
    """Return the bytes of a tensor; expanded dimensions count once."""
    if tensor.device.type == "meta":
        return tensor.nbytes
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
