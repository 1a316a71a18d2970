"""Checks of DINOv2's options, alone and together."""

from typing import TYPE_CHECKING

from pospre.algorithms.dinov2.masks import NUM_CROPS, check_ratio
from pospre.errors import UserError
from pospre.model.model import PretrainModel

if TYPE_CHECKING:  # it calls this
    from pospre.algorithms.dinov2.dinov2 import DINOv2


def check_options(options: "DINOv2", model: PretrainModel) -> None:
    """Raise ``UserError`` for options that cannot work together."""
    if not options.official and options.mask_crop_rate not in (0.0, 0.5, 1.0):
        raise UserError(
            f"dinov2.mask_crop_rate = {options.mask_crop_rate} masks no whole number of an image's "
            f"{NUM_CROPS} crops. Use 0.5, 1.0 or 0.0 (or dinov2.official: true for others)."
        )
    check_ratio("dinov2", options.mask_ratio, model.grid("global"))
    options.check_used("patch_head_bottleneck", options.separate_heads, "separate_heads")
    dino, ibot, spread = options.dino_weight, options.ibot_weight, options.koleo_weight
    # without masked crops there are no patches to match
    if not (dino or spread or ibot * options.mask_crop_rate):
        raise UserError(
            f"dinov2.dino_weight = {dino}, dinov2.ibot_weight = {ibot} and dinov2.koleo_weight = "
            f"{spread} with dinov2.mask_crop_rate = {options.mask_crop_rate} leave no loss. 1, 1 "
            "and 0.1 with 0.5 are published; to serve masked_position only, set dinov2.weight to 0."
        )
