"""The device of a run."""

import torch
from composer.devices import Device
from composer.utils import get_device

from pospre.command_line import spelled
from pospre.errors import UserError
from pospre.recipe.recipe import Recipe


def build_device(recipe: Recipe) -> Device:
    """Return the device to train on; ``UserError`` if it is missing, or not for this precision."""
    wanted, precision = recipe.trainer.device, recipe.trainer.precision
    if wanted == "gpu" and not torch.cuda.is_available():
        raise UserError("trainer.device = gpu, but torch sees no GPU; use trainer.device=cpu")
    device = get_device(None if wanted == "auto" else wanted)
    if device.name == "cpu" and precision == "amp_fp16":
        raise UserError("trainer.precision = amp_fp16 needs a GPU; on the CPU use auto")
    for key, value in (("residual", "bf16"), ("float8", True)):
        if getattr(recipe.trainer, key) == value and precision not in ("auto", "amp_bf16"):
            raise UserError(
                f"trainer.{key} = {spelled(value)} needs trainer.precision = amp_bf16, not "
                f"{precision}; leave out trainer.{key}, or use trainer.precision=auto"
            )
    for name, view in recipe.data.views.items():
        if device.name == "cpu" and recipe.trainer.compile is True and view.augment.erase_rate:
            # torch 2.7's inductor frees memory twice in the C++ that it writes for this
            raise UserError(
                f"trainer.compile on the CPU crashes with data.views.{name}.augment.erase_rate > 0 "
                "(torch 2.7); leave one of them out, or use a GPU"
            )
    return device
