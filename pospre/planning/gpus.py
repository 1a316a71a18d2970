"""GPUs as their vendors specify them, and assumptions about training.

The one model of speed: the least time of the step's kernels (``kernels.floor_seconds``) over the
share of that speed that training reaches (``Assumptions.efficiency``).
"""

from dataclasses import dataclass
from typing import Annotated, Any, get_type_hints

from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from pospre.errors import UserError, suggestion
from pospre.option_texts import options_of
from pospre.planning.figures import efficiency
from pospre.ranges import PositiveShare, Share

TERA, GIGA, GIB = 1e12, 1e9, 2**30
IMAGENET = 1_281_167
_EFFICIENCY = efficiency()
_DECODE_S = 0.82e-3  # of an image, and of each pixel of its views: README, Loader
_PIXEL_S = 4.4e-9


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; its peaks are dense, without sparsity."""

    name: str
    bf16: float  # FLOP/s of matrix products in bf16 and fp16, summed in fp32
    fp32: float  # FLOP/s without TF32, as torch computes by default
    memory: float  # bytes
    memory_bandwidth: float  # bytes/s
    link: float  # bytes/s to the other GPUs of a node, one way (NVLink, else PCIe 4.0 × 16)


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
    """Return the GPU that the command line calls ``name``."""
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


_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Least0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Assumptions:
    """Assumptions, which are not counted; every field is an option of the command.

    Each says its unit first. None stands for a value that follows from the recipe or the GPU.
    """

    efficiency: PositiveShare = _EFFICIENCY
    """of the floor's speed: images/s over those of the least time that a GPU needs for every
    kernel's bytes and FLOPs; measured on an H100 (tests/benchmarks/README.md, On GPUs)
    """
    images: PositiveInt | None = None
    """images: of the data set; without it those of data.path, else ImageNet-1k's"""
    decode_rate: _Positive | None = None
    """images/s a core: without it 0.82 ms an image (ImageNet JPEGs) and 4.4 ns a pixel of its
    views, as measured on a core of an EPYC (tests/benchmarks/README.md, Loader)
    """
    image_kb: _Positive = 110.0
    """kB an image: as ImageNet's JPEGs have on average"""
    network: _Positive = 50.0
    """GB/s a GPU: between nodes: one 400 Gb/s port for each GPU, one way"""
    bandwidth: _Positive | None = None
    """GB/s: bus bandwidth of a collective (nccl-tests' busbw); without it 0.75 of the slower of the
    GPU's link and a node's network
    """
    overlap: Share = 0.8
    """of the communication: done while the GPU computes"""
    fragmentation: Share = 0.1
    """of activations and buffers: lost in the allocator, in addition to what is allocated"""
    reserve_gib: _Least0 = 2.5
    """GiB: taken on each GPU by CUDA, cuBLAS and NCCL besides torch's tensors"""
    price_per_gpu_hour: _Positive | None = None
    """a GPU hour: without it no cost is given"""

    def __post_init__(self) -> None:
        """Raise ``UserError`` for an impossible number."""
        for name, hint in get_type_hints(Assumptions, include_extras=True).items():
            value = getattr(self, name)
            try:
                TypeAdapter[Any](hint).validate_python(value)
            except ValidationError:
                takes = options_of(Assumptions)[name].takes.removesuffix(" or null")
                raise UserError(f"{option(name)} is {value}; give a {takes}.") from None

    def decodes(self, pixels: int) -> float:
        """Return the images/s that a core loads if the views have this many pixels together."""
        return self.decode_rate or 1 / (_DECODE_S + _PIXEL_S * pixels)


def option(name: str) -> str:
    """Return the command-line option of a field."""
    return f"--{name.replace('_', '-')}"
