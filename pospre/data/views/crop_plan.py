"""Plans of views: boxes and flips as pure functions of the sample and its size.

The plan of a view depends only on the run's seed, the epoch, the sample's index in the data set and
the view's number. The number counts through all groups of a loader in their order. With the draws
u0, u1… in [0, 1) of ``pospre.draws.uniform`` and arithmetic in float64:

- Flip, purpose ``"flip"``: mirrored where u0 < flip_rate, compared in float32; center crops never.
- Crop ``"random"``, purpose ``"crop"``, image of W × H pixels: for each try t = 0…9 take a, r, x, y
  = u4t…u4t+3. With A = (W · H) · (scale0 + (scale1 − scale0) · a) and
  q = e^(log ratio0 + (log ratio1 − log ratio0) · r), w = √(A · q) and h = √(A / q), rounded (halves
  to even). The first try with 0 < w ≤ W and 0 < h ≤ H gives left = ⌊x · (W − w + 1)⌋ and
  top = ⌊y · (H − h + 1)⌋. If none does: w = min(W, max(1, round(H · ratio1))),
  h = min(H, max(1, round(W / ratio0))), left = ⌊(W − w) / 2⌋, top = ⌊(H − h) / 2⌋.
- Crops ``"simple"`` and ``"pad"``, purpose ``"crop"``: the image is resized to S × T and the window
  of s × t begins at ⌊u0 · (S + 2p − s + 1)⌋ − p and ⌊u1 · (T + 2p − t + 1)⌋ − p, p the padding.
- Crops ``"center"`` and ``"full"`` draw nothing.
- ``inside`` another group: W, H, left and top are of and in that view's box, not the image.
- ``of`` another group: nothing is drawn, and no view number is used; boxes and flips are those.

``boxes`` has the formulas (and how e^ is computed). Colours are drawn on the device by the same
rules: ``pospre.augment.device``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pospre import draws
from pospre.data.views.boxes import (
    NUM_BOX_DRAWS,
    NUM_WINDOW_DRAWS,
    Crops,
    PixelBox,
    box_crops,
    boxes_within,
    center_window,
    padded_frame,
    random_boxes,
    random_windows,
    simple_box,
    simple_frame,
)
from pospre.data.views.options import ViewGroup
from pospre.portable_math import view_draws


@dataclass(frozen=True)
class GroupPlan:
    """The plan of one view group of a batch, before any image is read.

    Attributes:
        start: ``draws.start_word`` of the seed and the purpose ``"crop"``.
        epoch: int64 (B,).
        index: int64 (B,).
        first_view: number of the group's first view.
        flips: bool (B, V).
        outer: the group whose views these are cropped from, or are ``of``; None: the image.
    """

    group: ViewGroup
    start: int
    epoch: np.ndarray
    index: np.ndarray
    first_view: int
    flips: np.ndarray
    outer: "GroupPlan | None" = None

    def crops(self, sample: int, width: int, height: int) -> Crops:
        """Return the positions of all views of the group in an upright image of this size."""
        group, image = self.group, (width, height)
        if group.of is not None:
            assert self.outer is not None
            same = self.outer.crops(sample, *image)
            return same._replace(scaled=group.shape[::-1])
        if group.crop == "random":
            draw = self._draws(sample, NUM_BOX_DRAWS)
            if self.outer is None:
                boxes = random_boxes(draw, image, group.scale, group.ratio)
                return box_crops(boxes, image, group.shape)
            within = np.broadcast_to(self.outer.crops(sample, *image).boxes, (len(draw), 4))
            boxes = boxes_within(draw, within, group.scale, group.ratio)
            return box_crops(boxes, image, group.shape)._replace(within=within)
        if group.crop == "center":
            part = simple_box(*image)
            scaled, window = center_window(part.width, part.height, group.shape)
            return Crops(_each(group, part), scaled, _each(group, window), image)
        whole = _each(group, PixelBox(0, 0, *image))
        if group.crop == "full":
            return box_crops(whole, image, group.shape)
        frame = padded_frame(group.shape)
        if group.crop == "simple":
            part = simple_box(*image)
            whole, frame = _each(group, part), simple_frame(part.width, part.height, group.shape[0])
        windows = random_windows(self._draws(sample, NUM_WINDOW_DRAWS), frame)
        return Crops(whole, frame.scaled, windows, image, frame.edge)

    def _draws(self, sample: int, count: int) -> np.ndarray:
        views = self.first_view, self.group.count
        draw: np.ndarray = view_draws(
            self.start, self.epoch[sample], self.index[sample], views, count
        )
        return draw


def _each(group: ViewGroup, box: PixelBox) -> np.ndarray:
    return np.full((group.count, 4), box, np.int64)


def first_view(views: Iterable[ViewGroup], name: str) -> int:
    """Return the number of a group's first view; numbers count through all groups."""
    first = 0
    for group in views:
        if group.name == name:
            break
        first += group.count if group.of is None else 0
    return first


def plan_views(
    views: Sequence[ViewGroup], *, seed: int, epoch: int | np.ndarray, index: np.ndarray
) -> list[GroupPlan]:
    """Draw boxes and flips for samples ``index`` (int64, (B,)), one plan per view group."""
    index = np.asarray(index, np.int64)
    epochs = np.broadcast_to(np.asarray(epoch, np.int64), index.shape)
    start = draws.start_word(seed, "crop")
    plans = {}
    for group in views:
        first = first_view(views, group.name)
        flips = plan_flips(seed, epochs, index, np.arange(group.count) + first, group)
        plans[group.name] = GroupPlan(group, start, epochs, index, first, flips)
    return [_with_outer(plan, plans) for plan in plans.values()]


def _with_outer(plan: GroupPlan, plans: Mapping[str, GroupPlan]) -> GroupPlan:
    """Return a plan that knows the group that its views lie in, or whose views they are."""
    group = plan.group
    if group.of is not None:
        source = _with_outer(plans[group.of], plans)
        return replace(plan, outer=source, flips=source.flips)
    return plan if group.inside is None else replace(plan, outer=plans[group.inside])


def plan_flips(
    seed: int, epoch: draws.Keys, index: draws.Keys, views: draws.Keys, group: ViewGroup
) -> draws.Keys:
    """Return which views are mirrored, bool (B, V), for (B,) samples, in numpy or torch."""
    keys = draws.sample_keys(seed, epoch[:, None], index[:, None], views, "flip")
    return draws.uniform(keys, 1)[..., 0] < (0.0 if group.crop == "center" else group.flip_rate)
