"""The precision of a run, and its attention kernels."""

import platform
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from composer.devices import Device
from torch.nn.attention import SDPBackend, sdpa_kernel

from pospre.collectives import on_every_rank, print_once
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.vit import Encoder
from pospre.recipe.recipe import Recipe


def computes_bf16(device: Device) -> bool:
    """Return whether a device has bf16 instructions; otherwise torch emulates them.

    oneDNN's own emulation takes 2.4 times as long as float32 with AVX-512, 200 times with AVX2.
    """
    if device.name != "cpu":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    mkldnn = torch.backends.mkldnn.is_available()
    if not mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    # oneDNN says yes to AVX-512 without them; torch's own kernels can be told to keep to AVX2
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and torch.cpu._is_avx512_bf16_supported()


def with_precision(recipe: Recipe, precision: str) -> Recipe:
    """Return the recipe in another precision, without reducing that of tokens between blocks."""
    half = precision == "amp_bf16"
    residual = recipe.trainer.residual if half else "auto"
    trainer = recipe.trainer.model_copy(update={"precision": precision, "residual": residual})
    return recipe.model_copy(update={"trainer": trainer})


def decide_precision(recipe: Recipe, device: Device) -> Recipe:
    """Return the recipe with ``precision: auto`` replaced by one that is fast on every rank."""
    if recipe.trainer.precision != "auto":
        return recipe
    fast = all(on_every_rank(lambda: computes_bf16(device)))
    return with_precision(recipe, "amp_bf16" if fast else "fp32")


def set_residual(model: PretrainModel, recipe: Recipe) -> None:
    """Set the precision of tokens between blocks, from the recipe or the method."""
    asked = recipe.trainer.residual
    published = asked == "auto" and any(each.half_residual for each in model.layout.uses.values())
    half = recipe.trainer.precision == "amp_bf16"
    encoders = [module for module in model.modules() if isinstance(module, Encoder)]
    if asked == "bf16" and not encoders:
        raise UserError(
            f"trainer.residual = bf16 is for ViTs, and encoder.name = {recipe.encoder.name}; "
            "leave it out"
        )
    for encoder in encoders:
        encoder.half_residual = half and (asked == "bf16" or published)


def describe_precision(asked: str, precision: str, device: Device) -> str:
    """Describe the precision of a run, and why ``auto`` chose it."""
    if asked != "auto":
        return precision
    kind = device.name.upper()
    computes = "computes in" if precision == "amp_bf16" else "would only emulate"
    return f"{precision} (trainer.precision=auto: the {kind} {computes} bf16)"


def slow_precision(recipe: Recipe, device: Device) -> str | None:
    """Return a warning if the recipe uses a precision that its device only emulates."""
    if recipe.trainer.precision != "amp_bf16" or computes_bf16(device):
        return None
    return (
        f"warning: trainer.precision = amp_bf16, but this {device.name.upper()} only emulates it: "
        "2 to 200 times slower than fp32, which trainer.precision=auto chooses here"
    )


def composer_precision(recipe: Recipe, device: Device) -> tuple[str, AbstractContextManager[Any]]:
    """Return the precision for Composer, and a context for the model's forward pass.

    Composer only supports mixed precision on GPUs; on the CPU the context casts.
    """
    precision = recipe.trainer.precision
    if precision != "amp_bf16" or device.name != "cpu":
        return precision, nullcontext()
    return "fp32", torch.autocast("cpu", torch.bfloat16)


def uses_cudnn(recipe: Recipe, device: Device) -> bool:
    """Return whether ``trainer.attention`` asks for cuDNN; say so where there is none."""
    if recipe.trainer.attention != "cudnn":
        return False
    if device.name != "cpu" and torch.backends.cudnn.is_available():
        return True
    print_once("trainer.attention = cudnn has no effect: there is no GPU with cuDNN")
    return False


@contextmanager
def cudnn_first() -> Iterator[None]:
    """Compute attention with cuDNN if it supports it, otherwise with torch's own kernels."""
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
    with sdpa_kernel([getattr(SDPBackend, name) for name in names], set_priority=True):
        yield
