"""RandAugment (Cubuk et al. 2020) as timm's ``rand-m9-mstd0.5-inc1``, for whole batches at once.

Every image draws its own operations and magnitudes. The 15 operations are cases of three: a look-up
table per channel, a blend with another image, an affine map. All images are thus processed at once
in three steps. The results equal those of Pillow, which timm uses: whole levels from 0 to 255.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pospre.augment.colour import Rows, change_some, spread
from pospre.data.views.augment_options import RandAugment

_LOOK_UPS = ("auto_contrast", "equalise", "invert", "posterise", "solarise", "solarise_add")
_ENHANCEMENTS = ("colour", "contrast", "brightness", "sharpness")
_MAPS = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
OPERATIONS = (*_LOOK_UPS, *_ENHANCEMENTS, *_MAPS)
NUM_DRAWS = 3  # whether, which operation, sign
_RATE = 0.5  # timm's probability of each of the operations drawn


@dataclass(frozen=True)
class Choice:
    """One operation for each image.

    Attributes:
        which_N: index in ``OPERATIONS``, or -1 for none.
        level_N: magnitude from 0 to 1.
        sign_N: -1 or 1.
        increasing: whether operations get stronger with the level, like timm's ``inc1``.
    """

    which_N: Tensor
    level_N: Tensor
    sign_N: Tensor
    increasing: bool

    def of(self, rows: Rows) -> "Choice":
        """Return the choice for some of the images."""
        which, level, sign = self.which_N[rows], self.level_N[rows], self.sign_N[rows]
        return Choice(which, level, sign, self.increasing)

    def is_one_of(self, *names: str) -> Tensor:
        """Return which images have one of these operations, (N,)."""
        chosen = self.which_N == OPERATIONS.index(names[0])
        for name in names[1:]:
            chosen = chosen | (self.which_N == OPERATIONS.index(name))
        return chosen

    def signed(self, name: str, limit: float) -> Tensor:
        """Return ± level × limit for the images with this operation, 0 for the others."""
        return torch.where(self.is_one_of(name), self.sign_N * self.level_N * limit, 0.0)


def rand_augment(
    levels_N3HW: Tensor, options: RandAugment, draw_NK: Tensor, normal_NO: Tensor, fill_3: Tensor
) -> Tensor:
    """Return images, whole levels as float, after the operations drawn, with replacement.

    For each operation ``draw_NK`` has ``NUM_DRAWS`` draws in [0, 1), and ``normal_NO`` a normal
    one. ``fill_3`` are the levels of pixels that an affine map brings in from outside.
    """
    for index, draw_N3 in enumerate(draw_NK.split(NUM_DRAWS, dim=1)):
        choice = choose(options, draw_N3, normal_NO[:, index])
        levels_N3HW = apply(levels_N3HW, choice, fill_3)
    return levels_N3HW


def choose(options: RandAugment, draw_N3: Tensor, normal_N: Tensor) -> Choice:
    """Return an operation, its magnitude (normal, kept in 0 to 10) and sign for each image."""
    whether, operation, sign = draw_N3.unbind(dim=1)
    level = (options.magnitude + options.magnitude_std * normal_N).clamp(0, 10) / 10
    which = (operation * len(OPERATIONS)).to(torch.int64)
    which = torch.where(whether < _RATE, which, -1)
    return Choice(which, level, torch.where(sign < 0.5, -1.0, 1.0), options.increasing)


def apply(levels_N3HW: Tensor, choice: Choice, fill_3: Tensor) -> Tensor:
    """Apply the chosen operation to each image."""
    images = change_some(
        levels_N3HW,
        choice.is_one_of(*_LOOK_UPS),
        lambda some, rows: _look_up(some, choice.of(rows)),
    )
    images = change_some(
        images, choice.is_one_of(*_ENHANCEMENTS), lambda some, rows: _enhance(some, choice.of(rows))
    )
    return change_some(
        images, choice.is_one_of(*_MAPS), lambda some, rows: _affine(some, choice.of(rows), fill_3)
    )


def _look_up(levels_N3HW: Tensor, choice: Choice) -> Tensor:
    whole = levels_N3HW.flatten(2).to(torch.int64)
    return _tables(levels_N3HW, choice).gather(2, whole).view(levels_N3HW.shape)


def _tables(levels_N3HW: Tensor, choice: Choice) -> Tensor:
    """Return each channel's look-up table (N, 3, 256); other operations get one without effect."""
    level = torch.arange(256, device=levels_N3HW.device, dtype=torch.float64)
    strength = choice.level_N.double()[:, None]
    bits = (4 * strength).floor()
    threshold = (256 * strength).floor()
    if choice.increasing:
        bits, threshold = 4 - bits, 256 - threshold
    step = 2 ** (8 - bits)
    added = (110 * strength).floor()
    same_for_channels = {
        "invert": 255 - level.expand(len(strength), 256),
        "posterise": (level / step).floor() * step,
        "solarise": torch.where(level < threshold, level, 255 - level),
        "solarise_add": torch.where(level < 128, (level + added).clamp(max=255), level),
    }
    tables = level.expand(*levels_N3HW.shape[:2], 256)
    for name, table in same_for_channels.items():
        tables = torch.where(spread(choice.is_one_of(name), 3), table[:, None], tables)
    contrast, equal = _auto_contrast(levels_N3HW, level), _equalise(levels_N3HW, level)
    tables = torch.where(spread(choice.is_one_of("auto_contrast"), 3), contrast, tables)
    tables = torch.where(spread(choice.is_one_of("equalise"), 3), equal, tables)
    return tables.to(levels_N3HW.dtype)


def _auto_contrast(levels_N3HW: Tensor, level: Tensor) -> Tensor:
    """Return tables that spread each channel's levels over 0 to 255."""
    low = levels_N3HW.amin((2, 3)).double()[..., None]
    high = levels_N3HW.amax((2, 3)).double()[..., None]
    scale = 255 / torch.where(high > low, high - low, 1.0)
    spread = (level * scale - low * scale).clamp(0, 255).trunc()
    return torch.where(high > low, spread, level)


def _equalise(levels_N3HW: Tensor, level: Tensor) -> Tensor:
    """Return tables that make each channel's levels about as frequent."""
    whole = levels_N3HW.flatten(2).to(torch.int64)
    counts = torch.zeros(*whole.shape[:2], 256, dtype=torch.int64, device=whole.device)
    counts = counts.scatter_add(2, whole, torch.ones_like(whole))
    highest = counts.gather(2, whole.amax(2, keepdim=True))
    step = (whole.shape[2] - highest).div(255, rounding_mode="floor")
    below = counts.cumsum(2) - counts
    equal = (step // 2 + below).div(step.clamp(min=1), rounding_mode="floor").clamp(max=255)
    return torch.where(step > 0, equal.double(), level)


def _enhance(levels_N3HW: Tensor, choice: Choice) -> Tensor:
    """Blend with black, the mean grey, the own grey or the smoothed image, as ImageEnhance does."""
    if choice.increasing:
        factor = (1 + 0.9 * choice.sign_N * choice.level_N).clamp(min=0.1)
    else:
        factor = 0.1 + 1.8 * choice.level_N
    factor = spread(factor)
    red, green, blue = levels_N3HW.to(torch.int64).split(1, dim=1)
    luma_N1HW = (19595 * red + 38470 * green + 7471 * blue + 32768) >> 16
    total_N = luma_N1HW.sum((1, 2, 3))
    mean_N = (total_N.double() / luma_N1HW[0].numel() + 0.5).floor().to(levels_N3HW.dtype)
    base = torch.where(
        spread(choice.is_one_of("colour")), luma_N1HW.to(levels_N3HW.dtype), _smooth(levels_N3HW)
    )
    base = torch.where(spread(choice.is_one_of("contrast")), spread(mean_N), base)
    base = torch.where(spread(choice.is_one_of("brightness")), 0.0, base)
    return (base + factor * (levels_N3HW - base)).clamp(0, 255).trunc()


def _smooth(levels_N3HW: Tensor) -> Tensor:
    """Return Pillow's SMOOTH filter: weights 1 around 5, of 13; the outermost pixels stay."""
    height, width = levels_N3HW.shape[2:]
    if min(height, width) < 3:
        return levels_N3HW
    total = 4 * levels_N3HW[:, :, 1:-1, 1:-1]
    for row in range(3):
        for column in range(3):
            total = total + levels_N3HW[:, :, row : row + height - 2, column : column + width - 2]
    inner = functional.pad((total / 13 + 0.5).floor(), (1, 1, 1, 1))
    is_inner = functional.pad(torch.ones_like(inner[:, :, 1:-1, 1:-1]), (1, 1, 1, 1))
    return torch.where(is_inner > 0, inner, levels_N3HW)


def _matrices(choice: Choice, height: int, width: int) -> Tensor:
    """Return (N, 6): where in the image a pixel of the result comes from, as Pillow's AFFINE."""
    angle = -torch.deg2rad(choice.signed("rotate", 30.0))
    cosine, sine = torch.cos(angle), torch.sin(angle)
    x, y = width / 2, height / 2  # what a rotation leaves in place
    right = x - cosine * x - sine * y + choice.signed("translate_x", 0.45 * width)
    lower = y + sine * x - cosine * y + choice.signed("translate_y", 0.45 * height)
    across, down = choice.signed("shear_x", 0.3), choice.signed("shear_y", 0.3)
    return torch.stack([cosine, sine + across, right, down - sine, cosine, lower], dim=1)


def _affine(levels_N3HW: Tensor, choice: Choice, fill_3: Tensor) -> Tensor:
    """Return the mapped images, sampled with Pillow's bicubic."""
    num, _, height, width = levels_N3HW.shape
    matrices_N6 = _matrices(choice, height, width)
    along = torch.arange(width, device=levels_N3HW.device) + 0.5
    down = torch.arange(height, device=levels_N3HW.device)[:, None] + 0.5
    a, b, c, d, e, f = (part.view(-1, 1, 1) for part in matrices_N6.unbind(1))
    x, y = a * along + b * down + c, d * along + e * down + f  # (N, H, W)
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    left, top = (x - 0.5).floor(), (y - 0.5).floor()
    across, below = (x - 0.5 - left)[..., None], (y - 0.5 - top)[..., None]
    columns = [(left + step).clamp(0, width - 1).to(torch.int64) for step in (-1, 0, 1, 2)]
    pixels = levels_N3HW.permute(0, 2, 3, 1).reshape(-1, 3)
    first_pixel = (torch.arange(num, device=pixels.device) * (height * width)).view(-1, 1, 1)
    lines = []
    for step in (-1, 0, 1, 2):
        start = first_pixel + (top + step).clamp(0, height - 1).to(torch.int64) * width
        taps = [pixels[start + column] for column in columns]  # (N, H, W, 3)
        lines.append(_cubic(taps, across))
    sampled = _cubic(lines, below).clamp(0, 255).trunc()
    return torch.where(inside[..., None], sampled, fill_3).permute(0, 3, 1, 2)


def _cubic(taps: list[Tensor], fraction: Tensor) -> Tensor:
    """Return the cubic through the two inner taps, with central differences as slopes × 2."""
    first, second, third, fourth = taps
    linear = third - first
    square = 2 * (first - second) + third - fourth
    cube = second - first - third + fourth
    return second + fraction * (linear + fraction * (square + fraction * cube))
