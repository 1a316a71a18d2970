"""LUT's second view: checks of its crops, and the masks of the published code."""

from typing import TYPE_CHECKING

from pospre.batch import HIDDEN, VISIBLE, Batch
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.registry import Registry
from pospre.nn.masking import slot_mask

if TYPE_CHECKING:  # it calls what is here
    from pospre.algorithms.lut.lut import LUT


def add_masked_twin(registry: Registry, left_out: bool) -> None:
    """Show the student some patches of the second view (``symmetric``), as of the first."""
    for key in ("visible",) if left_out else ("visible", "masked"):
        registry.claim(f"second/{key}", "lut")
    seen = "second/visible" if left_out else None
    registry.add_twin("student/second", "lut", "student", "second", seen)


def write_masks(batch: Batch, model: PretrainModel) -> None:
    """Show the same number of patches in the second view as in the first, at other places."""
    chosen = batch[HIDDEN][:, : batch[VISIBLE].shape[1]]
    batch["second/visible"] = chosen
    if "second/masked" in model.registry.writers:
        batch["second/masked"] = ~slot_mask(chosen, model.encoder.num_patches)


def check_views(options: "LUT", model: PretrainModel) -> None:
    """Raise ``UserError`` for options that do not fit the two views."""
    if model.registry.mixes:
        raise UserError(
            f"algorithms.lut compares two views of one image, but "
            f"{model.registry.writers['view/pixels']} mixes images in 'view'. Turn its mixing off, "
            "or leave lut out."
        )
    same_crop = options.supervision != "context"
    if same_crop and model.registry.place_source:
        raise UserError(
            f"lut.supervision = {options.supervision} cuts the second view where the first one "
            f"is, before '{model.registry.place_source}' reads its box. List lut before it."
        )
    if (options.symmetric or same_crop) and model.grid("second") != model.grid("view"):
        raise UserError(
            f"lut.symmetric = {options.symmetric} with lut.supervision = {options.supervision} "
            "needs views of one size. Give data.views.second the size of data.views.view."
        )
    if options.symmetric:
        _check_masks(options, model)


def _check_masks(options: "LUT", model: PretrainModel) -> None:
    """Raise ``UserError`` unless the second view can show what the host hides of the first."""
    hidden, patches = model.registry.hidden, model.encoder.num_patches
    assert hidden is not None
    if not hidden.shuffled or hidden.visible is None:
        raise UserError(
            "lut.symmetric = true shows the patches of the second view that the host hides in the "
            f"first. That needs a random mask, which '{hidden.owner}' does not draw. Use "
            "lut.symmetric = false."
        )
    whole = options.steer == "both" and hidden.left_out
    if patches < 2 * hidden.visible and not whole:
        raise UserError(
            f"lut.symmetric = true shows {hidden.visible} patches of each view at different "
            f"places, but of {patches} only {patches - hidden.visible} are left. Set "
            f"{hidden.owner}.mask_ratio to 0.5 or more, or lut.symmetric to false."
        )
