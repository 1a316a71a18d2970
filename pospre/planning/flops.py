"""Floating-point operations, counted operator by operator by torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    flop_registry,
    sdpa_backward_flop_count,
    sdpa_flop_count,
    shape_wrapper,
)

from pospre.batch import Batch
from pospre.model.model import PretrainModel

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


def count_flops(work: Callable[[], object]) -> int:
    """Return the FLOPs of matrix products, convolutions and attention in ``work``.

    A product and its sum are two. Work on fake tensors counts as well.
    """
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        work()
    return int(counter.get_total_flops())


def operator_flops(operator: Any, args: Any, kwargs: Any, made: Any) -> int:
    """Return the FLOPs of one call, as ``count_flops`` counts them; 0 of what it does not."""
    known: Any = _COUNTED.get(operator)
    return 0 if known is None else int(known(*args, **kwargs, out_val=made))


def pass_flops(model: PretrainModel, batch: Batch) -> dict[str, int]:
    """Return the forward FLOPs of each encoder pass over a prepared batch, by name."""
    counts = {}
    for name, declared in model.registry.passes.items():
        views = model.images(batch, declared.group)
        seen = {**batch, f"{declared.group}/pixels": views}
        counts[name] = count_flops(partial(model.encode, name, views, seen))
    return counts
