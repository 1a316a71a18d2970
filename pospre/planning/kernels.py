"""Bytes and FLOPs of a step's operators, the kernels they become, and the least time of these.

Counted over fake tensors: each operator reads its inputs and writes its results, as an eager GPU
does with one kernel per operator. ``fused`` models how Inductor fuses the operators of a compiled
step. A product (of matrices, a convolution, attention) is one kernel. So is a reduction over rows,
that is, over more than the last dimension; it recomputes inputs that are not in memory. All other
operators that exchange values, with none of these between them, form one kernel. It reads each
value once, and writes results and what other kernels read. Indexed values are in memory.

Inductor also recomputes values in the backward that this model stores. Against Inductor's own count
(``make gpu-count``) the bytes of nine methods are 5 % too low to 8 % too high. Those of
Intertwined, with the losses of two heads over 65,536 prototypes, are 14 % too high.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import (
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)
from torch.utils.weak import WeakIdKeyDictionary

from pospre.planning.gpus import Gpu

_ATEN = torch.ops.aten
_FLOPS: dict[Any, Any] = {
    **flop_registry,
    # torch counts attention on GPUs only; without these two a CPU's would count as nothing
    _ATEN._scaled_dot_product_flash_attention_for_cpu: shape_wrapper(
        lambda *shapes, **_: sdpa_flop_count(*shapes[:3])
    ),
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: shape_wrapper(
        lambda *shapes, **_: sdpa_backward_flop_count(*shapes[:4])
    ),
}
# memory is asked for, and not touched
_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_LOOKUPS = {"index", "gather", "embedding", "scatter", "scatter_add", "index_put", "sort", "topk"}
_REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "any", "all"),
    *("var", "std", "var_mean", "logsumexp", "norm", "linalg_vector_norm"),
}


class Kernel(NamedTuple):
    """A kernel of a GPU: bytes read and written, FLOPs, and whether these are in fp32."""

    bytes: int
    flops: int
    is_fp32: bool


def floor_seconds(kernels: Iterable[Kernel], gpu: Gpu) -> float:
    """Return the least time of kernels that run one after the other, as on one stream.

    Each takes the longer of memory and arithmetic.
    """
    return sum(
        max(one.bytes / gpu.memory_bandwidth, one.flops / (gpu.fp32 if one.is_fp32 else gpu.bf16))
        for one in kernels
    )


class Operator(NamedTuple):
    """One call of an operator."""

    role: str  # product, row reduction, lookup, norm backward or pointwise
    reads: dict[int, int]  # bytes by the number of a value; written again it has another number
    writes: dict[int, int]  # bytes by the number of a value
    flops: int  # of a product
    is_fp32: bool  # whether it computes in fp32

    @property
    def is_alone(self) -> bool:
        """Whether it is a separate kernel in the compiled step."""
        return self.role in ("product", "row reduction")


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
        """Return the kernels that an eager step launches."""
        return [
            Kernel(sum((*one.reads.values(), *one.writes.values())), one.flops, one.is_fp32)
            for one in self.operators
        ]

    @property
    def flops(self) -> int:
        """Return the FLOPs of all operators."""
        return sum(one.flops for one in self.operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and note it."""
        kwargs = kwargs or {}
        packet = func.overloadpacket
        name = packet.__name__
        made = func(*args, **kwargs)
        read, outputs = tensors((args, kwargs)), tensors(made)
        self.items += name == "_local_scalar_dense"
        self.casts += name == "_to_copy" and any(one.dtype != read[0].dtype for one in outputs)
        # prim: what Python asks of a tensor, such as its device
        if func.namespace != "prim" and name not in _NOTHING and not func.is_view:
            arguments = func._schema.arguments
            given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
            changed = [
                each
                for one in arguments
                if one.alias_info is not None and one.alias_info.is_write
                for each in tensors(given.get(one.name))
            ]
            made_new = [one for one in outputs if all(one is not each for each in changed)]
            reads = self._sizes(read, new=False)
            writes = self._sizes([*changed, *made_new], new=True)
            flops = operator_flops(packet, args, kwargs, made)
            is_fp32 = any(one.dtype == torch.float32 for one in outputs[:1])
            if reads or writes:
                role = "product" if flops else _role(name, given.get("dim"), read)
                self.operators.append(Operator(role, reads, writes, flops, is_fp32))
        return made

    def _sizes(self, values: list[Tensor], *, new: bool) -> dict[int, int]:
        """Return the bytes of tensors by their number, ``new`` where they are written."""
        sizes: dict[int, int] = defaultdict(int)
        for each in values:
            storage = each.untyped_storage()
            if new or storage not in self._numbers:
                self._numbers[storage] = next(self._count)
            # expanded dimensions count once
            is_meta = each.device.type == "meta"
            size = each.nbytes if is_meta else min(each.nbytes, storage.nbytes())
            sizes[self._numbers[storage]] += size
        return dict(sizes)


def count_flops(work: Callable[[], object]) -> int:
    """Return the FLOPs of matrix products, convolutions and attention in ``work``.

    A product and its sum are two. Work on fake tensors counts as well.
    """
    with StepTrace() as trace:
        work()
    return trace.flops


def operator_flops(operator: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the FLOPs of one call, as torch's ``FlopCounterMode``; 0 for other operators."""
    known: Any = _FLOPS.get(operator)
    return 0 if known is None else int(known(*args, **kwargs, out_val=made))


def _role(name: str, dim: Any, read: list[Tensor]) -> str:
    if name == "native_layer_norm_backward":
        return "norm backward"
    if name.removesuffix("_") in _LOOKUPS:
        return "lookup"
    if name not in _REDUCTIONS or len(read) > 1:
        return "pointwise"
    dims = [dim] if isinstance(dim, int) else dim
    is_inner = dims and all(one in (-1, read[0].dim() - 1) for one in dims)
    return "pointwise" if is_inner else "row reduction"


def tensors(values: Any) -> list[Tensor]:
    """Return the tensors in nested values."""
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def fused(operators: Sequence[Operator]) -> list[Kernel]:
    """Return the kernels of a compiled step."""
    parts = [part for one in operators for part in _parts(one)]
    makers, stages = _order(parts)
    groups = _groups(parts, makers, stages)
    stored = {
        value
        for number, part in enumerate(parts)
        for value, maker in makers[number].items()
        if groups[maker] != groups[number]
        and not (part.role == "row reduction" and stages[maker] == stages[number])
    }
    read = {value for part in parts for value in part.reads}
    members: dict[int, list[int]] = defaultdict(list)
    for number, group in enumerate(groups):
        members[group].append(number)
    kernels = []
    for group, numbers in members.items():
        reads = _reads(numbers, parts, makers, stored)
        writes = sum(
            size
            for number in numbers
            for value, size in parts[number].writes.items()
            if value in stored or value not in read  # by none: it is a result
        )
        if moved := reads + writes:
            kernels.append(Kernel(moved, parts[group].flops, parts[group].is_fp32))
    return kernels


def _parts(operator: Operator) -> list[Operator]:
    """Return an operator as Inductor splits it: gradients of a norm's weights are reductions."""
    if operator.role != "norm backward":
        return [operator]
    (entered, *weights), seen = operator.writes.items(), list(operator.reads.items())[:2]
    return [
        operator._replace(role="pointwise", writes=dict([entered])),
        operator._replace(role="row reduction", writes=dict(weights), reads=dict(seen)),
    ]


def _order(parts: Sequence[Operator]) -> tuple[list[dict[int, int]], list[int]]:
    """Return for each part (who made the values that it reads, its stage).

    The stage is the least number of kernels that must end before it.
    """
    made: dict[int, int] = {}
    makers, stages = list[dict[int, int]](), list[int]()
    for number, part in enumerate(parts):
        makers.append({value: made[value] for value in part.reads if value in made})
        looked_up = next(iter(part.reads), None) if part.role == "lookup" else None
        before = (
            stages[maker] + (parts[maker].is_alone or value == looked_up)
            for value, maker in makers[-1].items()
        )
        stages.append(max(before, default=0))
        made |= dict.fromkeys(part.writes, number)
    return makers, stages


def _groups(
    parts: Sequence[Operator], makers: Sequence[dict[int, int]], stages: Sequence[int]
) -> list[int]:
    """Return for each part the first part of its kernel."""
    first = list(range(len(parts)))

    def find(number: int) -> int:
        while first[number] != number:
            number = first[number]
        return number

    for number, made in enumerate(makers):
        for maker in made.values():
            is_alone = parts[number].is_alone or parts[maker].is_alone
            if not is_alone and stages[maker] == stages[number]:
                one, other = sorted((find(maker), find(number)))
                first[other] = one
    return [find(number) for number in range(len(parts))]


def _reads(
    numbers: Sequence[int],
    parts: Sequence[Operator],
    makers: Sequence[dict[int, int]],
    stored: set[int],
) -> int:
    """Return the bytes that a kernel reads from memory, each value once."""
    sizes: dict[int, int] = {}
    own, todo = set(numbers), list(numbers)
    while todo:
        number = todo.pop()
        for value, size in parts[number].reads.items():
            maker = makers[number].get(value)
            if maker in own:
                continue
            if maker is None or value in stored:
                whole = size if maker is None else parts[maker].writes[value]
                sizes[value] = min(sizes.get(value, 0) + size, max(whole, sizes.get(value, 0)))
            else:  # a reduction computes it again
                own.add(maker)
                todo.append(maker)
    return sum(sizes.values())
