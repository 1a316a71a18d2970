"""The report page of a running training: updated every minute, with views of the first step."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from PIL import Image
from torch import Tensor

from pospre.batch import Batch, numbered, per_row
from pospre.errors import UserError
from pospre.evaluation.position.mosaic import enlarge, frame_cells
from pospre.model.algorithm import pretrain_model
from pospre.model.model import PretrainModel
from pospre.nn.masking import slot_mask
from pospre.reporting.page import VIEWS, VIEWS_INDEX, write_report

EVERY = 60.0  # seconds between updates
SHARE = 0.01  # maximal share of training time for updates
NUM_SAMPLES = 3
SIDES = 96, 192  # minimal pixels of a drawn view, one of many or one of two; integer factors
GAP = 6
GREY = 128


class LivePage(Callback):
    """Draws the views of the first step, and updates the page during training.

    Only rank 0 does this. Errors are printed once, and training continues. Updates are ``every``
    seconds apart, or more if the page takes long.
    """

    def __init__(self, folder: Path, every: float = EVERY) -> None:
        self.folder, self.every = folder, every
        self._next = time.monotonic() + every
        self._failed = False
        self._drawn = (folder / VIEWS / VIEWS_INDEX).exists()

    def batch_end(self, state: State, logger: Logger) -> None:
        """Draw and write if due."""
        if dist.get_global_rank() != 0 or self._failed:
            return
        try:
            if not self._drawn:
                self._draw(state)
                self._drawn = True
            is_due = (start := time.monotonic()) >= self._next
            if is_due and (self.folder / "metrics.jsonl").exists():  # not before the first lines
                write_report(self.folder, refresh=max(1, round(self.every)))
                spent = time.monotonic() - start
                self._next = start + max(self.every, spent / SHARE)
        except (UserError, OSError) as error:
            self._failed = True
            print(f"the report is not updated during training: {error}", file=sys.stderr)

    def _draw(self, state: State) -> None:
        model = pretrain_model(state)
        patch = model.encoder.patch_size
        if model.encoder.channels != 3 or patch[0] != patch[1]:  # no picture, or no grid of squares
            return
        assert state.previous_timestamp is not None
        few = {key: value[:NUM_SAMPLES] for key, value in state.batch.items()}
        few = numbered(few, epoch=state.previous_timestamp.epoch.value)
        few = state.device.batch_to_device(few)
        step = state.timestamp.batch.value
        draw_views(model, few, self.folder / VIEWS, step=step)


@torch.no_grad()
def draw_views(model: PretrainModel, batch: Batch, folder: Path, *, step: int) -> None:
    """Write a strip of views for each of a few samples, and ``views.json`` with their names.

    The model is not changed: views and masks are functions of seed, epoch and index. In training
    mode its views are augmented. ``batch`` has the first samples of a step, with indices.
    """
    few = {key: value[:NUM_SAMPLES] for key, value in batch.items()}
    model.draw(few)
    folder.mkdir(parents=True, exist_ok=True)
    groups = []
    for group in model.views:
        strips, legend = _draw_group(model, few, group)
        names = [f"{group}_{row}.png" for row in range(len(strips))]
        for name, strip in zip(names, strips, strict=True):
            Image.fromarray(strip).save(folder / name, optimize=True)
        groups.append({"name": group, "legend": legend, "files": names})
    content = json.dumps({"step": step, "groups": groups})
    (folder / VIEWS_INDEX).write_text(content, encoding="utf-8")


def _draw_group(model: PretrainModel, batch: Batch, group: str) -> tuple[list[np.ndarray], str]:
    """Return a strip of views for each sample, and the meaning of grey and green in them."""
    pixels = model.images(batch, group) * model.augment.std + model.augment.mean
    levels = (255 * pixels).round().clamp(0, 255).to(torch.uint8).permute(0, 1, 3, 4, 2)
    grid, patch = model.grid(group), model.encoder.patch_size[0]
    hidden, framed, legend = _marks(model, batch, group, grid[0] * grid[1])
    strips = []
    for row, views in enumerate(levels.cpu().numpy()):
        drawn = []
        for number, view in enumerate(views):
            picture = view.copy()
            for cell in hidden[row, number].nonzero().flatten().tolist():
                top, left = cell // grid[1] * patch, cell % grid[1] * patch
                picture[top : top + patch, left : left + patch] = GREY
            factor = -(-SIDES[len(views) < 3] // min(view.shape[:2]))
            picture = enlarge(picture, factor)
            cells = framed[row, number].nonzero().flatten().tolist()
            frame_cells(picture, cells, grid[1], patch * factor)
            drawn += [picture, np.full((len(picture), GAP, 3), 255, np.uint8)]
        strips.append(np.concatenate(drawn[:-1], axis=1))
    return strips, "; ".join(legend)


def _marks(
    model: PretrainModel, batch: Batch, group: str, patches: int
) -> tuple[Tensor, Tensor, list[str]]:
    """Return bool (B, V, N) of hidden and of framed patches, and the meaning of both."""
    views = model.views[group].count
    rows = len(batch["index"]) * views
    hidden, framed = (torch.zeros(rows, patches, dtype=torch.bool) for _ in range(2))
    legend = [] if model.layout.mixer(group) is None else ["before they are mixed"]
    captions = sorted(model.layout.captions.items(), key=lambda item: not _is_hidden(item[0]))
    for key, caption in captions:
        own = key.partition("/")[0]
        if key in batch and group == (own if own in model.views else "view"):
            marked = hidden if _is_hidden(key) else framed
            marked |= _marked_patches(batch, key, rows, patches).cpu()
            legend.append(f"{'grey' if _is_hidden(key) else 'framed in green'}: {caption}")
    return hidden.unflatten(0, (-1, views)), framed.unflatten(0, (-1, views)), legend


def _is_hidden(key: str) -> bool:
    """Return whether a batch key marks patches that the encoder does not see."""
    return key.endswith(("/hidden", "/masked"))


def _marked_patches(batch: Batch, key: str, rows: int, patches: int) -> Tensor:
    """Return bool (rows, N) of the patches that a batch key marks."""
    marked = batch[key].reshape(rows, -1)
    if marked.dtype != torch.bool:
        return slot_mask(marked, patches)
    if marked.shape[1] == patches:
        return marked
    visible = per_row(batch["view/visible"], rows)
    return slot_mask(torch.where(marked, visible, patches), patches + 1)[:, :patches]
