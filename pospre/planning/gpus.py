"""GPUs as their vendor states them: dense peaks without sparsity, memory, links."""

from dataclasses import dataclass

from pospre.errors import UserError, suggestion

TERA, GIGA, GIB = 1e12, 1e9, 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

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
