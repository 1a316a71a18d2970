"""SimMIM: a simple framework for masked image modeling (Xie et al. 2022, arXiv 2111.09886).

Masks large random cells of the image and encodes all patches, with a learned token in place of
masked ones. One linear layer regresses the raw pixels of the masked patches.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from pospre.batch import HIDDEN, MASKED, Batch
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs, PixelObjective
from pospre.model.passes import MaskedTokens
from pospre.model.task_description import TaskDescription
from pospre.model.uses import SEEN, Hides, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import token_parameter
from pospre.nn.masking import PatchMasking, gather_tokens, slot_mask


class RawPixelRegression(PixelObjective):
    """One linear layer, and the mean absolute error over the masked patches' pixels."""

    def __init__(self, encoder: PatchEncoder, options: "SimMIM") -> None:
        super().__init__(encoder)
        self.weight = options.weight
        self.predict = nn.Linear(
            encoder.embed_dim, math.prod(encoder.patch_size) * encoder.channels
        )

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return predicted and true pixels of the masked patches, each (B, N−K, h·w·C)."""
        # only masked patches enter the loss, so only they are predicted
        tokens = gather_tokens(passes["student"][:, self.num_prefix :], batch[HIDDEN])
        return {"predicted": self.predict(tokens), "target": self.target(batch)}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean absolute error in normalised pixels (Sec. 3.4)."""
        return (outputs["predicted"].float() - outputs["target"]).abs().mean()


@dataclass(kw_only=True, eq=False)
class SimMIM(PretrainAlgorithm):
    """The host that encodes all patches, some of them masked, and predicts raw pixels.

    Writes ``view/visible`` (B, K) and ``view/hidden`` (B, N−K), cell after cell, and
    ``view/masked``, bool (B, N).
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Large cells of a picture are masked. What does the model paint in their place?",
        evaluation="reconstructions",
    )

    mask_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of cells masked, in (0, 1); their number is rounded up (30 of 49)."""
    mask_cell: PositiveInt = 32
    """Side of a cell in pixels, a multiple of the patch's side and a divisor of the image's."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    objective = RawPixelRegression
    is_host: ClassVar[bool] = True

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over all patches, some of them masked."""
        return Uses(
            hides=Hides.by(self._masking(encoder), left_out=False),
            passes={"student": Pass(over=SEEN, edits_content=True)},
        )

    def content_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the mask token."""
        return MaskedTokens(token_parameter(encoder.patch_dim, cut=True), "masked")

    def _masking(self, encoder: PatchEncoder) -> PatchMasking:
        """Return which cells are shown.

        Raises:
            UserError: cells that do not fit the image, or all of them masked.
        """
        (height, width), side = encoder.patch_size, self.mask_cell
        if side % height or side % width:
            raise UserError(
                f"simmim.mask_cell is {side}, but must be a multiple of the patch size "
                f"{max(height, width)}. Try {2 * max(height, width)}."
            )
        if any(length % side for length in encoder.image_size):
            raise UserError(
                f"simmim.mask_cell = {side} does not divide encoder.image_size = "
                f"{max(encoder.image_size)}. Use a divisor of it that is a multiple of the patch "
                f"size {max(height, width)}."
            )
        cells = math.prod(length // side for length in encoder.image_size)
        visible = cells - math.ceil(cells * self.mask_ratio)
        if visible < 1:
            raise UserError(
                f"simmim.mask_ratio = {self.mask_ratio} leaves none of the {cells} cells visible. "
                "Use a smaller ratio, or a smaller simmim.mask_cell."
            )
        cell = (side // height, side // width)
        return PatchMasking(encoder.grid, visible * math.prod(cell), cell=cell)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Mark the masked patches."""
        batch[MASKED] = slot_mask(batch[HIDDEN], model.encoder.num_patches)
