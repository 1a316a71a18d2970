"""The inputs of a plan: GPUs as their vendors specify them, and assumptions about training."""

from dataclasses import dataclass, field, fields
from typing import Any

from pospre.errors import UserError, suggestion

TERA, GIGA, GIB = 1e12, 1e9, 2**30
IMAGENET = 1_281_167
EFFICIENCY = 0.54
"""Measured images/s over the floor's, ViT-B/16 on an H100: .54 is the median of ten eager steps.

MAE compiled reached .59 in a plain loop; the trainer had .91 of a plain loop's images/s: .54, too.
"""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; its peaks are dense, without sparsity.

    Attributes:
        name: in full.
        bf16: peak dense matrix FLOP/s in bf16 and fp16, summed in fp32.
        fp32: peak FLOP/s in fp32, without TF32, as torch computes by default.
        memory: bytes.
        memory_bandwidth: bytes/s.
        link: bytes/s to the other GPUs of a node, one way (NVLink, else PCIe 4.0 × 16).
    """

    name: str
    bf16: float
    fp32: float
    memory: float
    memory_bandwidth: float
    link: float

    def peak(self, precision: str) -> float:
        """Return the peak FLOP/s of a recipe's ``trainer.precision``."""
        return self.fp32 if precision == "fp32" else self.bf16


def _gpu(name: str, bf16: float, fp32: float, gib: float, gb_per_s: float, link: float) -> Gpu:
    return Gpu(name, bf16 * TERA, fp32 * TERA, gib * GIB, gb_per_s * GIGA, link * GIGA)


GPUS = {
    "a100-40": _gpu("NVIDIA A100 SXM 40 GB", 312, 19.5, 39.5, 1555, 300),
    "a100-80": _gpu("NVIDIA A100 SXM 80 GB", 312, 19.5, 79.2, 2039, 300),
    "h100": _gpu("NVIDIA H100 SXM 80 GB", 989, 67, 79.1, 3350, 450),
    "h200": _gpu("NVIDIA H200 SXM 141 GB", 989, 67, 139.8, 4800, 450),
    "b200": _gpu("NVIDIA B200 HGX 180 GB", 2250, 80, 178.4, 8000, 900),
    "l40s": _gpu("NVIDIA L40S 48 GB", 362, 91.6, 44.4, 864, 32),
    "a10g": _gpu("NVIDIA A10G 24 GB", 70, 35, 22.1, 600, 32),
    "4090": _gpu("NVIDIA RTX 4090 24 GB", 165, 82.6, 23.6, 1008, 32),
}


def gpu_named(name: str) -> Gpu:
    """Return the GPU that the command line calls ``name``.

    Raises:
        UserError: it is not in the table.
    """
    if name not in GPUS:
        raise UserError(f"--gpu {name} is not known.{suggestion(name, GPUS)}")
    return GPUS[name]


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, evenly on nodes."""

    gpu: Gpu
    gpus: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Return the GPUs of a node."""
        return self.gpus // self.nodes


def _assumed(default: Any, unit: str, reason: str, limit: float | None = None) -> Any:
    return field(default=default, metadata={"unit": unit, "reason": reason, "limit": limit})


@dataclass(frozen=True)
class Assumptions:
    """What is assumed, not counted; every field is an option of the command.

    None stands for a value that follows from the recipe or the GPU.
    """

    efficiency: float = _assumed(
        EFFICIENCY,
        "of the floor's pace",
        "images/s over those of the least time that a GPU needs for every kernel's bytes and "
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
    price_per_gpu_hour: float | None = _assumed(None, "a GPU hour", "without it no cost is given")

    def __post_init__(self) -> None:
        """Raise ``UserError`` for an impossible number."""
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
