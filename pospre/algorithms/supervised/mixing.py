"""Mixup and CutMix with separate draws per sample, at fixed shapes.

Sample i of a batch of B is mixed with sample B−1−i, as in timm. The key of sample i determines the
amount and the position. Only the partner depends on the rest of the (micro)batch.
"""

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import NonNegativeFloat
from torch import Tensor

from pospre import draws
from pospre.batch import EPOCH, INDEX, Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import PatchEncoder
from pospre.ranges import Share

_STEPS = 4096


class Mix(NamedTuple):
    """How each sample is mixed with its partner.

    Attributes:
        blend: float32 (B,), share of the sample's own pixels outside of the box.
        box: int64 (B, 4), top, bottom, left and right of the part that the partner covers.
        share: float32 (B,), share of the sample's own class in its target.
    """

    blend: Tensor
    box: Tensor
    share: Tensor


@dataclass(kw_only=True, eq=False)
class MixingAlgorithm(PretrainAlgorithm):
    """A method that can mix ``view``; it writes how, as ``NAME/blend``, ``/box`` and ``/share``."""

    mixing: ClassVar[str]
    """The NAME."""

    mixup: NonNegativeFloat = 0.0
    """α of Mixup's Beta(α, α); 0 is off."""
    cutmix: NonNegativeFloat = 0.0
    """α of CutMix's; 0 is off."""
    mix_rate: Share = 1.0
    """Share of samples that are mixed."""
    switch_rate: Share = 0.5
    """Share of mixed samples that get CutMix, where both are on."""

    @property
    def mixes(self) -> bool:
        """Whether views are mixed."""
        return bool(self.mix_rate and (self.mixup or self.cutmix))

    def mixing_keys(self) -> dict[str, None]:
        """Return the batch keys that it writes and changes, if it mixes."""
        keys = ("view/pixels", *(f"{self.mixing}/{part}" for part in Mix._fields))
        return dict.fromkeys(keys) if self.mixes else {}

    def mix(self, pixels_BVCHW: Tensor, batch: Batch, encoder: PatchEncoder) -> Tensor:
        """Return the views mixed as drawn."""
        drawn = Mix(*(batch[f"{self.mixing}/{part}"] for part in Mix._fields))
        return mix_pixels(pixels_BVCHW, drawn)

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw how views are mixed."""
        if not self.mixes:
            return
        keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, f"{self.mixing}/mix")
        drawn = draw_mix(
            draws.uniform(keys, 5),
            model.views["view"].shape,
            mixup=self.mixup,
            cutmix=self.cutmix,
            rate=self.mix_rate,
            switch_rate=self.switch_rate,
        )
        batch.update({f"{self.mixing}/{part}": each for part, each in drawn._asdict().items()})


def mixed_targets(own_BC: Tensor, share_B: Tensor) -> Tensor:
    """Return the share of each class in mixed samples, of the one-hot classes of each."""
    share = share_B.unsqueeze(1)
    return share * own_BC + (1 - share) * own_BC.flip(0)


def smooth_entropy(logits_RC: Tensor, targets_RC: Tensor, smoothing: float) -> Tensor:
    """Return the cross-entropy (R,) with targets of which a share is spread over all classes."""
    smooth = (1 - smoothing) * targets_RC + smoothing / logits_RC.shape[-1]
    return -(smooth * F.log_softmax(logits_RC, dim=-1)).sum(-1)


@cache
def beta_quantiles(alpha: float) -> np.ndarray:
    """Return the quantiles of Beta(alpha, alpha) at 0, 1/4096 … 1, by numerical integration."""
    # with x = sin²(t) the density in t is smooth for alpha ≥ 1/2, and for less it can be summed
    edges = np.linspace(0, np.pi / 2, 2**16 + 1)
    middle = (edges[1:] + edges[:-1]) / 2
    mass = (np.sin(middle) * np.cos(middle)) ** (2 * alpha - 1)
    reached = np.concatenate([[0.0], np.cumsum(mass)])
    angles = np.interp(np.linspace(0, 1, _STEPS + 1), reached / reached[-1], edges)
    return (np.sin(angles) ** 2).astype(np.float32)


def from_quantiles(quantiles: np.ndarray, uniform_B: Tensor) -> Tensor:
    """Return draws whose law has the given quantiles, from uniform ones."""
    table = torch.from_numpy(quantiles).to(uniform_B.device, non_blocking=True)
    position = uniform_B * _STEPS
    low = position.to(torch.int64)  # below 4096, as the draws are below 1
    return torch.lerp(table[low], table[low + 1], position - low)


def draw_mix(
    uniform_B5: Tensor,
    size: tuple[int, int],
    *,
    mixup: float,
    cutmix: float,
    rate: float,
    switch_rate: float,
) -> Mix:
    """Return which samples are mixed, how much and where, like timm's ``Mixup`` per element.

    Args:
        uniform_B5: draws from [0, 1).
        size: (height, width) of the views.
        mixup: α of Mixup; 0 turns it off.
        cutmix: α of CutMix; 0 turns it off.
        rate: share of samples that are mixed at all.
        switch_rate: share of those that get CutMix, where both are on.
    """
    on, which, draw, middle_y, middle_x = uniform_B5.unbind(1)
    switch = switch_rate if mixup and cutmix else float(bool(cutmix))
    cut = (which < switch) & (on < rate)
    share = torch.ones_like(draw)
    if mixup:
        mixed = ~cut & (on < rate)
        share = torch.where(mixed, from_quantiles(beta_quantiles(mixup), draw), share)
    blend = share
    height, width = size
    ratio = torch.zeros_like(draw)
    if cutmix:
        kept = from_quantiles(beta_quantiles(cutmix), draw)
        ratio = torch.where(cut, (1 - kept).clamp_min(0).sqrt(), ratio)
    top, bottom = _span(ratio, middle_y, height)
    left, right = _span(ratio, middle_x, width)
    covered = (bottom - top) * (right - left) / (height * width)
    return Mix(
        blend, torch.stack([top, bottom, left, right], dim=1), torch.where(cut, 1 - covered, share)
    )


def _span(ratio_B: Tensor, middle_B: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the ends of a box along one axis; what lies outside of the picture is cut off."""
    half = (side * ratio_B).to(torch.int64) // 2
    middle = (middle_B * side).to(torch.int64)
    return (middle - half).clamp(0, side), (middle + half).clamp(0, side)


def mix_pixels(pixels_BVCHW: Tensor, mix: Mix) -> Tensor:
    """Return the views blended with their partner's and covered by them inside the box."""
    partner = pixels_BVCHW.flip(0)
    blend = mix.blend.to(pixels_BVCHW.dtype).view(-1, 1, 1, 1, 1)
    mixed = blend * pixels_BVCHW + (1 - blend) * partner
    height, width = pixels_BVCHW.shape[-2:]
    top, bottom, left, right = mix.box.unbind(1)
    rows = torch.arange(height, device=mix.box.device)
    cols = torch.arange(width, device=mix.box.device)
    inside_y = (rows >= top[:, None]) & (rows < bottom[:, None])
    inside_x = (cols >= left[:, None]) & (cols < right[:, None])
    inside = (inside_y[:, :, None] & inside_x[:, None, :])[:, None, None]
    return torch.where(inside, partner, mixed)
