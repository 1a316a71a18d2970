"""The device step of every view: flip, change the pixels in training, normalise.

Changes follow the group's ``Augment``. Their parameters are draws of (seed, epoch, index, view
number over all groups). A view therefore looks the same in any batch, on any rank and after a
resume.

The plan: purposes begin with ``"augment/"``; u0, u1… are a view's ``draws.uniform`` of a purpose,
n0… its ``draws.normal``; parameters are float32. An operation is applied if its draw is below its
rate.

- ``jitter``: the factors of brightness, contrast and saturation are 1 + (2·u − 1) · strength for
  u0, u1 and u2; the hue turns by (2·u3 − 1) · its strength; happens by u4. ``jitter_order``:
  ``draws.permutation`` of these four.
- ``colour``: grey happens by u0, blur by u1, solarising by u2; the blur's width is
  low + (high − low) · u3. With ``three_augment``, ⌊3 · u0⌋ says which: 0 grey, 1 blur, 2 solarise.
- ``rand``: operation o happens where u3o < 0.5, is number ⌊15 · u3o+1⌋ of ``OPERATIONS`` and turned
  round where u3o+2 < 0.5. ``rand_magnitude``: its level is the mean magnitude plus
  no · magnitude_std, kept in 0 to 10, over 10.
- ``erase``: happens by u0; u4t+1…u4t+4 are area, aspect ratio, top and left of try t (see
  ``erased_area``). ``noise``: the pixels of a whole view; the erased area takes its part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pospre import draws
from pospre.augment import colour
from pospre.augment.colour import Rows, change_some
from pospre.augment.rand_augment import NUM_DRAWS, rand_augment
from pospre.batch import EPOCH, INDEX, view_keys
from pospre.data.views.augment_options import Augment, RandAugment, Rate, per_view
from pospre.errors import UserError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
_TRIES = 10  # of an area to erase
ERASE_DRAWS = 4 * _TRIES  # area, aspect ratio, top, left
_AREA = (0.02, 1 / 3)
_LOG_ASPECT = (math.log(0.3), -math.log(0.3))


@dataclass(frozen=True)
class ViewDraws:
    """The source of draws for the views of one group.

    Attributes:
        epoch: (B,).
        index: (B,).
        first_view: number of the group's first view through all groups.
    """

    seed: int
    epoch: Tensor
    index: Tensor
    first_view: int
    count: int

    def keys(self, purpose: str) -> Tensor:
        """Return one key for each view, (B, V)."""
        sample = {EPOCH: self.epoch, INDEX: self.index}
        purpose = f"augment/{purpose}"
        return view_keys(sample, self.count, self.seed, purpose, first=self.first_view)

    def uniform(self, purpose: str, count: int) -> Tensor:
        """Return ``count`` draws from [0, 1) for each view, (B·V, count)."""
        return draws.uniform(self.keys(purpose), count).flatten(0, 1)

    def happens(self, draw_N: Tensor, rate: Rate) -> Tensor:
        """Return which of the views (B·V,) draw below the rate of their place in the group."""
        draws_V = draw_N.view(-1, self.count).unbind(dim=1)
        rates = per_view(rate, self.count)
        happens = [draw < chance for draw, chance in zip(draws_V, rates, strict=True)]
        return torch.stack(happens, dim=1).flatten()


_GIVEN = "given"


class DeviceAugment(nn.Module):
    """Flip, colour and normalise uint8 views on their device, all at once.

    Views of features (float32) are only normalised.

    Shapes are fixed, so it can be part of the compiled step. It computes in float32, without
    rounding to whole levels in between.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        channels: int = 3,
    ) -> None:
        """Create the step. Default: ImageNet's mean and std, or 0 and 1 for other channels."""
        super().__init__()
        self.channels = channels
        self.origins: dict[str, str] = {}  # of mean and std, in words
        usual = (IMAGENET_MEAN, IMAGENET_STD) if channels == 3 else ((0.0,), (1.0,))
        assumed = "ImageNet's, assumed" if channels == 3 else "assumed"
        for name, numbers, other in zip(("mean", "std"), (mean, std), usual, strict=True):
            self._set(name, numbers or other, _GIVEN if numbers else assumed)

    def _set(self, name: str, numbers: Sequence[float], origin: str) -> None:
        if self.channels == 3:
            _check_shares(name, numbers)
        # one for each channel, or for each column of features
        shape = (-1, 1, 1) if len(numbers) == self.channels else (1, 1, -1)
        device = getattr(self, name).device if name in self.origins else None
        # saved with the weights, which expect it
        self.register_buffer(name, torch.tensor(numbers, device=device).view(shape))
        self.origins[name] = origin

    def expect(self, pixels: Mapping[str, Sequence[float]], origin: str) -> None:
        """Normalise as weights expect: with their ``mean`` and ``std``, unless others are given."""
        for name, numbers in pixels.items():
            own = getattr(self, name).flatten().tolist()
            if not self.origins[name].startswith(_GIVEN):
                self._set(name, numbers, origin)
            elif _as_text(own) != _as_text(numbers):
                self.origins[name] = f"{_GIVEN}; the weights expect {_as_text(numbers)}"

    def described(self) -> str:
        """Return mean and std in words, and where they come from."""
        mean, std = (
            f"{name} {_as_text(getattr(self, name).flatten().tolist())}" for name in self.origins
        )
        first, second = self.origins.values()
        between = "" if first == second else f" ({first})"
        return f"{mean}{between}, {std} ({second})"

    def forward(
        self,
        image_BV3HW: Tensor,
        flip_BV: Tensor,
        augment: Augment | None = None,
        source: ViewDraws | None = None,
    ) -> Tensor:
        """Return normalised float32 views (B, V, 3, H, W).

        Args:
            image_BV3HW: uint8 pixels, or float32 features (B, V, 1, H, W).
            flip_BV: the views to mirror.
            augment: how to change the pixels; None leaves them.
            source: source of the draws; needed with ``augment``.

        Raises:
            UserError: the views are floats with several channels, which may or may not be
                normalised.
        """
        if image_BV3HW.is_floating_point():
            if image_BV3HW.shape[-3] != 1:
                raise UserError(
                    f"images of {image_BV3HW.dtype} and shape {tuple(image_BV3HW.shape)}: give "
                    "uint8 from 0 to 255, as torchvision.transforms.PILToTensor makes them. They "
                    "are mirrored and normalised here. Floats must have one channel, because they "
                    "count as features."
                )
            return (image_BV3HW - self.mean) / self.std
        views = torch.where(flip_BV[..., None, None, None], image_BV3HW.flip(-1), image_BV3HW)
        if augment is None or source is None:
            return self.normalise(views.float())
        levels = views.flatten(0, 1).contiguous().float()  # colours are faster channel by channel
        if augment.rand_augment is not None:
            fill = (255 * self.mean.flatten()).round()
            levels = rand_augmented(levels, augment.rand_augment, source, fill)
        if augment.colours:
            levels = change_colours(levels, augment, source)
        pixels = self.normalise(levels)
        if augment.erases:
            pixels = erase_parts(pixels, augment, source)
        return pixels.view(views.shape)

    def normalise(self, levels: Tensor) -> Tensor:
        """Return levels (…, 3, H, W) from 0 to 255 in units of the standard deviation."""
        return (levels / 255 - self.mean) / self.std


def _as_text(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.4g}" for number in numbers)


def _check_shares(name: str, numbers: Sequence[float]) -> None:
    """Raise ``UserError`` unless these are a colour image's mean or deviation, of levels / 255."""
    low, high = min(numbers), max(numbers)
    if len(numbers) not in (1, 3) or not 0 <= low <= high <= 1 or (name == "std" and low == 0):
        raise UserError(
            f"{name} is {[*numbers]}; give one number for each of 3 channels, or one for all, in "
            "[0, 1] (a std above 0): of pixels divided by 255."
        )


def rand_augmented(
    levels_N3HW: Tensor, options: RandAugment, source: ViewDraws, fill_3: Tensor
) -> Tensor:
    """Return whole levels (B·V, 3, H, W) after RandAugment."""
    draw = source.uniform("rand", NUM_DRAWS * options.num_ops)
    normal = draws.normal(source.keys("rand_magnitude").flatten(), options.num_ops)
    return rand_augment(levels_N3HW, options, draw, normal, fill_3)


def change_colours(levels_N3HW: Tensor, augment: Augment, source: ViewDraws) -> Tensor:
    """Return float levels (B·V, 3, H, W) jittered, then made grey, blurred and solarised."""
    if augment.jitter is not None:
        levels_N3HW = _jittered(levels_N3HW, augment, augment.jitter, source)
    draw = source.uniform("colour", 4)
    if augment.three_augment:
        choice = (draw[:, 0] * 3).to(torch.int64)
        to_grey, to_blur, to_solarise = choice == 0, choice == 1, choice == 2
    else:
        to_grey = source.happens(draw[:, 0], augment.grayscale_rate)
        to_blur = source.happens(draw[:, 1], augment.blur_rate)
        to_solarise = source.happens(draw[:, 2], augment.solarize_rate)
    levels = levels_N3HW
    if augment.greys:  # images of other channels than three have no grey
        levels = change_some(levels, to_grey, lambda some, _: colour.grey(some))
    if augment.blurs:
        low, high = augment.blur_sigma
        sigma_N, kernel = low + (high - low) * draw[:, 3], augment.blur_kernel
        levels = change_some(
            levels, to_blur, lambda some, rows: colour.blur(some, sigma_N[rows], kernel)
        )
    threshold = augment.solarize_threshold
    return change_some(levels, to_solarise, lambda some, _: colour.solarise(some, threshold))


def erase_parts(pixels_N3HW: Tensor, augment: Augment, source: ViewDraws) -> Tensor:
    """Return normalised views with a rectangle of noise at the group's rate."""
    draw, keys = source.uniform("erase", 1 + ERASE_DRAWS), source.keys("noise").flatten()

    def erased(some: Tensor, rows: Rows) -> Tensor:
        area = erased_area(draw[rows, 1:], *some.shape[2:])
        noise = draws.normal(keys[rows], some[0].numel())
        return torch.where(area, noise.view(some.shape), some)

    return change_some(pixels_N3HW, source.happens(draw[:, 0], augment.erase_rate), erased)


def _jittered(
    levels_N3HW: Tensor,
    augment: Augment,
    strengths: tuple[float, float, float, float],
    source: ViewDraws,
) -> Tensor:
    """Apply torchvision's ``ColorJitter`` at the group's rate."""
    draw = source.uniform("jitter", 5)
    columns = [(2 * draw[:, column] - 1) * strength for column, strength in enumerate(strengths)]
    centred = torch.stack(columns, dim=1)
    order = draws.permutation(source.keys("jitter_order"), 4).flatten(0, 1)

    def jittered(some: Tensor, rows: Rows) -> Tensor:
        turns = centred[rows, 3] if strengths[3] else None
        return colour.jitter(some, 1 + centred[rows, :3], turns, order[rows])

    return change_some(levels_N3HW, source.happens(draw[:, 4], augment.jitter_rate), jittered)


def erased_area(draw_NK: Tensor, height: int, width: int) -> Tensor:
    """Return a rectangle to erase in each image: bool (N, 1, H, W).

    Random erasing (Zhong et al. 2020) as timm's mode ``pixel``: the area is the first of ten draws
    that is smaller than the image. If there is none, nothing is erased.
    """
    area, log_aspect, top, left = draw_NK.unflatten(1, (_TRIES, 4)).unbind(2)
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * area) * (height * width)
    aspect = torch.exp(_LOG_ASPECT[0] + (_LOG_ASPECT[1] - _LOG_ASPECT[0]) * log_aspect)
    tall, wide = torch.sqrt(area * aspect).round(), torch.sqrt(area / aspect).round()
    fits = (tall < height) & (wide < width)
    top = (top * (height - tall + 1)).floor()
    left = (left * (width - wide + 1)).floor()
    first = fits.to(torch.int64).argmax(dim=1, keepdim=True)
    top, left, tall, wide = (
        value.gather(1, first).view(-1, 1, 1, 1) for value in (top, left, tall, wide)
    )
    rows = torch.arange(height, device=draw_NK.device).view(1, 1, -1, 1)
    columns = torch.arange(width, device=draw_NK.device)
    in_rows = (rows >= top) & (rows < top + tall)
    return in_rows & (columns >= left) & (columns < left + wide) & fits.any(1).view(-1, 1, 1, 1)
