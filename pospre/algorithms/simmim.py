"""SimMIM: a simple framework for masked image modeling (Xie et al. 2022, arXiv 2111.09886).

Masks large random cells of the image, encodes all patches with a learned token in place of those
that are masked, and regresses their raw pixels with one linear layer.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, require_one_view
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import EncoderPass, MaskedTokens
from pospre.model.pixel_task import PixelObjective
from pospre.model.question import Question
from pospre.nn.initialisation import token_parameter
from pospre.nn.masking import cell_patches, gather_tokens, slot_mask, visible_patches
from pospre.nn.vit import Encoder


def visible_cells(encoder: Encoder, options: "SimMIM") -> tuple[int, int]:
    """Return how many cells an image has, and how many of them stay visible."""
    cells = math.prod(side // options.mask_cell for side in encoder.image_size)
    return cells, cells - math.ceil(cells * options.mask_ratio)


class RawPixelRegression(PixelObjective):
    """One linear layer, and the mean absolute error over the masked patches' pixels."""

    def __init__(self, encoder: Encoder, weight: float) -> None:
        super().__init__(encoder)
        self.weight = weight
        self.predict = nn.Linear(
            encoder.embed_dim, math.prod(encoder.patch_size) * encoder.channels
        )

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predicted and true pixels of the masked patches, each (B, N−K, h·w·C)."""
        # only masked patches enter the loss, so only they are predicted
        tokens = gather_tokens(passes["student"][:, self.num_prefix :], batch["view/removed"])
        return {"predicted": self.predict(tokens), "target": self.target(batch)}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean absolute error in normalised pixels (Sec. 3.4)."""
        return (outputs["predicted"].float() - outputs["target"]).abs().mean()


@dataclass(kw_only=True, eq=False)
class SimMIM(PretrainAlgorithm):
    """The host that encodes all patches, some of them masked, and predicts raw pixels.

    Writes ``view/visible`` (B, K) and ``view/removed`` (B, N−K), cell after cell, and
    ``view/masked``, bool (B, N).

    Args:
        mask_ratio: share of cells masked, in (0, 1); their number is rounded up.
        mask_cell: side of a cell in pixels, a multiple of the patch size.
        weight: factor of this loss in the total.
    """

    question: ClassVar[Question | None] = Question(
        "Large cells of a picture are masked. What does the model paint in their place?",
        evaluation="reconstructions",
    )

    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.6
    mask_cell: PositiveInt = 32
    weight: NonNegativeFloat = 1.0

    objective = RawPixelRegression
    is_host: ClassVar[bool] = True

    def attach(self, model: PretrainModel) -> None:
        """Add the mask token, the pass and the pixel objective; a no-op if they are there."""
        if "simmim" in model.objectives:
            return
        require_one_view(model, "simmim", "view")
        _check(self, model.encoder)
        cells, visible = visible_cells(model.encoder, self)
        shown = visible * (model.encoder.num_patches // cells)
        model.registry.claim("view/visible", "simmim", count=shown)
        model.registry.claim("view/removed", "simmim", shuffled=True)
        model.registry.claim("view/masked", "simmim")
        model.contents.named["simmim"] = MaskedTokens(
            token_parameter(model.encoder.embed_dim, cut=True), "masked"
        )
        model.registry.add_pass("student", "simmim", EncoderPass(content=("simmim",)))
        model.add_objective("simmim", RawPixelRegression(model.encoder, self.weight))

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw which cells stay visible."""
        encoder = model.encoder
        cells, visible = visible_cells(encoder, self)
        height, width = encoder.patch_size
        split = visible_patches(batch, cells, visible, model.seed)
        batch["view/visible"], batch["view/removed"] = (
            cell_patches(part, encoder.grid, (self.mask_cell // height, self.mask_cell // width))
            for part in split
        )
        batch["view/masked"] = slot_mask(batch["view/removed"], encoder.num_patches)


def _check(options: SimMIM, encoder: Encoder) -> None:
    """Raise ``UserError`` for cells that do not fit the image, or all of them masked."""
    if any(options.mask_cell % side for side in encoder.patch_size):
        raise UserError(
            f"simmim.mask_cell is {options.mask_cell}, but must be a multiple of the patch size "
            f"{max(encoder.patch_size)}. Try {2 * max(encoder.patch_size)}."
        )
    if any(side % options.mask_cell for side in encoder.image_size):
        raise UserError(
            f"simmim.mask_cell = {options.mask_cell} does not divide encoder.image_size = "
            f"{max(encoder.image_size)}. Use a divisor of it that is a multiple of the patch size "
            f"{max(encoder.patch_size)}."
        )
    cells, visible = visible_cells(encoder, options)
    if visible < 1:
        raise UserError(
            f"simmim.mask_ratio = {options.mask_ratio} leaves none of the {cells} cells visible. "
            "Use a smaller ratio, or a smaller simmim.mask_cell."
        )
