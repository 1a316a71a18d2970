"""PART: relative translation of off-grid patches (Ayoughi et al. 2025, arXiv 2506.03682).

Patches are cut anywhere in the image and in any size, resized to the encoder's patch, and encoded
without any place. For random pairs (i, j) a head regresses how j lies to i: with centres c and
sides s,

    ((c_j − c_i) / s_i, s_j / s_i)      in x and in y,

four numbers, or the first two if all sizes are equal. Without places the encoder does not see the
order of its patches, so they are laid out as an ordinary image, a mosaic, and take the usual pass.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.batch import Batch, view_keys
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Outputs
from pospre.model.passes import ForgottenPlaces
from pospre.model.position_task import PlaceObjective, Relations, warn_of_unused_positions
from pospre.model.task_description import TaskDescription
from pospre.model.uses import ALL, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_trunc_normal
from pospre.nn.masking import gather_tokens
from pospre.ranges import PositiveRange, PositiveShare

GROUP = "part"


def draw_boxes(
    keys_B: Tensor,
    count: int,
    *,
    side: tuple[int, int],
    patch: tuple[int, int],
    sizes: tuple[float, float],
) -> Tensor:
    """Return ``count`` boxes x0, y0, x1, y1 in pixels of a view: float32 (B, count, 4).

    Width and height are uniform between ``sizes`` times the patch's, corners where the box fits.

    Args:
        keys_B: draw keys.
        count: boxes per image.
        side: (height, width) of the view.
        patch: (height, width) of a patch.
        sizes: smallest and largest factor.
    """
    drawn = draws.uniform(keys_B, 4 * count).unflatten(1, (count, 4)).unbind(-1)
    lows, highs = [], []
    for axis in (1, 0):
        length = (sizes[0] + (sizes[1] - sizes[0]) * drawn[axis]) * patch[axis]
        lows.append(drawn[axis + 2] * (side[axis] - length))
        highs.append(lows[-1] + length)
    return torch.stack([*lows, *highs], dim=-1)


def draw_pairs(keys_B: Tensor, patches: int, count: int) -> Tensor:
    """Return different ordered pairs of different patches, all equally likely: (B, count, 2).

    Pair k of a random order π is (π_a, π_b) with a = k mod N and b = a + 1 + ⌊k / N⌋ mod N.
    """
    order_BN = draws.permutation(keys_B, patches)
    pair = torch.arange(count, device=keys_B.device)
    first = pair % patches
    second = (first + 1 + pair // patches) % patches
    return torch.stack([order_BN[:, first], order_BN[:, second]], dim=-1)


def read_patches(image_BCHW: Tensor, box_BN4: Tensor, patch: tuple[int, int]) -> Tensor:
    """Return the boxes of images, resized to patches: (B, N, C, h, w).

    Bilinear at the centres of the new pixels; beyond the border its pixels are repeated.
    """
    (rows, columns), (high, wide) = image_BCHW.shape[2:], patch
    low, size = box_BN4[..., :2], box_BN4[..., 2:] - box_BN4[..., :2]
    at_x = (torch.arange(wide, device=low.device) + 0.5) / wide
    at_y = (torch.arange(high, device=low.device) + 0.5) / high
    x = (low[..., :1] + size[..., :1] * at_x) * (2 / columns) - 1
    y = (low[..., 1:] + size[..., 1:] * at_y) * (2 / rows) - 1
    grid = torch.stack(torch.broadcast_tensors(x[:, :, None], y[..., None]), dim=-1)
    read = F.grid_sample(image_BCHW, grid.flatten(1, 2), padding_mode="border", align_corners=False)
    return read.unflatten(2, (-1, high)).transpose(1, 2)


def mosaic(patches_BKChw: Tensor, grid: tuple[int, int]) -> Tensor:
    """Return an image (B, C, H, W) of patches in row-major order; free cells are 0."""
    (rows, columns), (high, wide) = grid, patches_BKChw.shape[-2:]
    cells = F.pad(patches_BKChw.flatten(2), (0, 0, 0, rows * columns - patches_BKChw.shape[1]))
    return F.fold(cells.mT, (rows * high, columns * wide), (high, wide), stride=(high, wide))


def relations(box_BN4: Tensor, pair_BP2: Tensor) -> Tensor:
    """Return how the second box of each pair lies to the first: (B, P, 4), see the module."""
    ends = (gather_tokens(box_BN4, index) for index in pair_BP2.unbind(-1))
    (low1, high1), (low2, high2) = (box.split(2, dim=-1) for box in ends)
    side, offset = high1 - low1, (low2 + high2) / 2 - (low1 + high1) / 2
    return torch.cat([offset / side, (high2 - low2) / side], dim=-1)


class PatchRelations(PlaceObjective):
    """The head over pairs of patch tokens, and its regression loss."""

    def __init__(self, encoder: PatchEncoder, options: "PART") -> None:
        super().__init__()
        self.weight, self.num_prefix = options.weight, encoder.num_prefix_tokens
        self.numbers, self.log_ratios = 4 if options.varies else 2, options.log_ratios
        dim = encoder.embed_dim
        self.query = nn.Linear(2 * dim, dim) if options.predictor == "attention" else None
        if self.query is not None:
            self.attend = nn.MultiheadAttention(dim, 1, batch_first=True)
        self.predict = nn.Linear(dim if self.query is not None else 2 * dim, self.numbers)
        init_trunc_normal(self)

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``predicted`` (B, P, 2 or 4)."""
        tokens = passes[GROUP][:, self.num_prefix :]
        ends = [gather_tokens(tokens, index) for index in batch["part/pair"].unbind(-1)]
        pairs = torch.cat(ends, dim=-1)
        if self.query is not None:
            pairs = self.attend(self.query(pairs), tokens, tokens, need_weights=False)[0]
        return {"predicted": self.predict(pairs)}

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the mean squared error, or with ``log_ratios`` the mean smooth L1 loss."""
        compare = F.smooth_l1_loss if self.log_ratios else F.mse_loss
        predicted, true = self.answers(outputs, batch)
        return compare(predicted, true)

    def answers(self, outputs: Outputs, batch: Batch) -> Relations:
        """Return the predicted and the true relations of the pairs."""
        true = relations(batch["part/patch_box"], batch["part/pair"])[..., : self.numbers]
        if self.log_ratios:
            true = torch.cat([true[..., :2], true[..., 2:].log()], dim=-1)
        return Relations(outputs["predicted"].float(), true)


@dataclass(kw_only=True, eq=False)
class PART(PretrainAlgorithm):
    """Predict how patches that were cut anywhere lie to each other, alone or beside others.

    Reads its own view group ``part``. Writes ``part/patch_box`` (B, K, 4), where in the view its
    patches are cut, and ``part/pair`` (B, P, 2). Its pass knows no place, under every scheme.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "Patches are cut anywhere, in any size. Does the model know how they lie to each other?",
        "r2",
        "explained share of the variance of offsets and sizes",
    )
    objective = PatchRelations

    sizes: PositiveRange = (0.5, 2.0)
    """Smallest and largest side of a cut patch, in sides of the encoder's patch; width and height
    are drawn apart. Equal numbers, as [1, 1]: only the offsets are predicted.
    """
    share: PositiveShare = 1.0
    """Number of patches, as a share of the patches of the grid. Fewer overlap less: patches that
    share pixels are an easy cue.
    """
    num_pairs: PositiveInt = 64
    """Number of pairs per image."""
    predictor: Literal["linear", "attention"] = "linear"
    """``linear``, over both tokens; ``attention``: a query of both reads all tokens, one head."""
    log_ratios: bool = False
    """Predict logarithms of the ratios of sizes, with a smooth L1 loss: ratios are heavy-tailed.
    Ours.
    """
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    @property
    def varies(self) -> bool:
        """Whether sizes are predicted."""
        return self.sizes[0] < self.sizes[1]

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the pass over the mosaic, without places."""
        forgets, all_cells = encoder.positions.can_forget, self.share == 1
        over = ALL if all_cells else "part/cell"
        keys = ["part/pixels", "part/patch_box", "part/pair"]
        keys += ["part/known"] * forgets + ["part/cell"] * (not all_cells)
        return Uses(
            views={GROUP: 1},
            passes={GROUP: Pass(GROUP, over, edits_places=forgets)},
            keys=dict.fromkeys(keys),
            mixes_always=True,
            predicts="places",
        )

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` for an option without effect."""
        super().check_encoder(encoder)
        self.check_used("log_ratios", self.varies, "sizes")

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if patches do not fit or pairs do not exist; warn of idle places."""
        patch, (rows, columns) = layout.encoder.patch_size, layout.grid(GROUP)
        largest = min(rows, columns)
        if self.sizes[1] > largest or self.sizes[0] == largest:
            raise UserError(
                f"part.sizes = {[*self.sizes]}, but a view of {rows * patch[0]} × "
                f"{columns * patch[1]} pixels holds no patch of more than {largest} sides, and one "
                "of as many in a single place. Use smaller ones, or larger views: "
                "data.views.part.size."
            )
        count = self.num_patches(rows * columns)
        exist = count * (count - 1)
        if self.num_pairs > exist:
            raise UserError(
                f"part.num_pairs = {self.num_pairs}, but {count} patches (part.share = "
                f"{self.share:g} of {rows} × {columns}) make {exist} pairs. Use at most that many, "
                "a larger share, or larger views: data.views.part.size."
            )
        warn_of_unused_positions(self.module_name(), layout)

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that forgets all places."""
        return ForgottenPlaces("part/known", None)

    def mix(self, pixels_BVCHW: Tensor, batch: Batch, encoder: PatchEncoder) -> Tensor:
        """Return the mosaics of the cut patches in place of the views."""
        grid = encoder.grid_of(*pixels_BVCHW.shape[-2:])
        read = read_patches(pixels_BVCHW[:, 0], batch["part/patch_box"], encoder.patch_size)
        return mosaic(read, grid).unsqueeze(1)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw where patches are cut, and the pairs."""
        rows, columns = model.grid(GROUP)
        count, patch = self.num_patches(rows * columns), model.encoder.patch_size
        boxes, pairs = (
            view_keys(batch, 1, model.seed, f"part/{purpose}")[:, 0]
            for purpose in ("boxes", "pairs")
        )
        side = rows * patch[0], columns * patch[1]
        batch["part/patch_box"] = draw_boxes(boxes, count, side=side, patch=patch, sizes=self.sizes)
        batch["part/pair"] = draw_pairs(pairs, count, self.num_pairs)
        nothing = torch.zeros(len(boxes), count, dtype=torch.bool, device=boxes.device)
        if model.encoder.positions.can_forget:
            batch["part/known"] = nothing
        if self.share < 1:
            batch["part/cell"] = torch.arange(count, device=boxes.device).expand(nothing.shape)

    def num_patches(self, cells: int) -> int:
        """Return how many patches are cut: the share of the cells, rounded."""
        return round(self.share * cells)
