"""What a plan takes for granted: each with a default, a reason, and an option that changes it."""

from dataclasses import dataclass, field, fields
from typing import Any

from pospre.errors import UserError

IMAGENET = 1_281_167
EFFICIENCY = 0.5
"""Measured images/s over the floor's: ViT-B/16 on an H100, MAE .48, DropPos .46, I-JEPA .54."""


def _assumed(default: Any, unit: str, reason: str, limit: float | None = None) -> Any:
    return field(default=default, metadata={"unit": unit, "reason": reason, "limit": limit})


@dataclass(frozen=True)
class Assumptions:
    """What is assumed and not counted; every field is an option of the command.

    None stands for a value that follows from the recipe or the GPU.
    """

    efficiency: float = _assumed(
        EFFICIENCY,
        "of the floor's pace",
        "images/s over those of the least time that a GPU needs for every operator's bytes and "
        "FLOPs; measured on an H100 (tests/benchmarks/README.md, On GPUs)",
        1.0,
    )
    images: int | None = _assumed(
        None, "images", "of the data set; without it those of data.path, else ImageNet-1k's"
    )
    decode_rate: float | None = _assumed(
        None,
        "images/s a core",
        "without it 0.82 ms an image (ImageNet JPEGs) and 4.4 ns a pixel of its views, as "
        "measured on a core of an EPYC (tests/benchmarks/README.md, Loader)",
    )
    image_kb: float = _assumed(110.0, "kB an image", "as ImageNet's JPEGs have on average")
    network: float = _assumed(
        50.0, "GB/s a GPU", "between nodes: one 400 Gb/s port for each GPU, one way"
    )
    bandwidth: float | None = _assumed(
        None,
        "GB/s",
        "bus bandwidth of a collective (nccl-tests' busbw); without it 0.75 of the slower of the "
        "GPU's link and a node's network",
    )
    overlap: float = _assumed(0.8, "of the communication", "done while the GPU computes", 1.0)
    fragmentation: float = _assumed(
        0.1, "of activations and buffers", "lost in the allocator, beside what is allocated", 1.0
    )
    reserve_gib: float = _assumed(
        2.5, "GiB", "taken on each GPU by CUDA, cuBLAS and NCCL beside torch's tensors"
    )
    price_per_gpu_hour: float | None = _assumed(None, "a GPU hour", "without it no cost is said")

    def __post_init__(self) -> None:
        """Raise ``UserError`` for a number that cannot be."""
        for one in fields(self):
            value, limit = getattr(self, one.name), one.metadata["limit"] or float("inf")
            if value is None:
                continue
            may_be_zero = one.name in ("overlap", "fragmentation", "reserve_gib")
            low_enough = value <= limit and value < float("inf")
            if not low_enough or not (value > 0 or (may_be_zero and value == 0)):
                bound = "above 0" if limit == float("inf") else f"above 0, at most {limit:g}"
                bound = bound.replace("above 0", "0 or more") if may_be_zero else bound
                raise UserError(f"{option(one.name)} is {value}; give a number {bound}.")


def option(name: str) -> str:
    """Return the command-line option of a field."""
    return f"--{name.replace('_', '-')}"
