"""What a segmentation is made of: two splits, how images are shown, and which layers are read."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from pospre.errors import UserError
from pospre.evaluation.dense.segmentation.mask_data import MaskSet, count_classes, open_masks
from pospre.evaluation.dense.segmentation.windows import Showing
from pospre.nn.vit import Encoder


class Setup(NamedTuple):
    """The data, and the settings that follow from others."""

    train: MaskSet
    val: MaskSet
    num_classes: int
    showing: Showing
    crop: tuple[int, int]
    layers: tuple[int, ...]


def open_setup(data: str, settings: Mapping[str, Any], encoder: Encoder) -> Setup:
    """Open the data, and decide what the settings leave open."""
    ignore, side = settings["ignore"], settings["crop"]
    train = open_masks(settings["bank"] or data, settings["train_split"], ignore)
    val = open_masks(data, settings["split"], ignore)
    crop = encoder.image_size if side is None else (side, side)
    window = crop if settings["inference"] == "slide" else None
    depth = encoder.depth
    usual = {
        "linear": (depth,),
        "upernet": tuple(round(depth * share / 12) for share in (4, 6, 8, 12)),
    }
    return Setup(
        train,
        val,
        count_classes(train, settings["num_classes"]),
        Showing(settings["size"], window, encoder.patch_size[0]),
        crop,
        settings["layers"] or usual[settings["decoder"]],
    )


def check_upernet(setup: Setup, batch_size: int, encoder: Encoder) -> None:
    """Raise a ``UserError`` for layers, crops or batches that UperNet does not take."""
    if len(setup.layers) != 4:
        raise UserError(f"upernet takes four layers, not {list(setup.layers)}.")
    if min(setup.crop) < 2 * encoder.patch_size[0] or batch_size < 2:
        raise UserError(
            f"upernet needs crops of two patches and more ({setup.crop}, patches of "
            f"{encoder.patch_size[0]}) and batch_size=2 or more ({batch_size}) for its batch norms."
        )
