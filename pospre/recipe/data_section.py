"""The section of a recipe that says what the data are, and which views are cut out of them."""

from typing import Annotated, Literal

from pydantic import Field

from pospre.arguments import Section
from pospre.ranges import Pair, ShareRange, Size
from pospre.recipe.values import Bytes, Numbers, PositiveNumbers, Rate, RisingRange


class RandAugment(Section):
    """Arguments of ``pospre.data.views.augment_options.RandAugment``."""

    num_ops: int = 2
    magnitude: float = 9.0
    magnitude_std: float = 0.5
    increasing: bool = True


class Augment(Section):
    """Changes of a view in training: arguments of ``pospre.data.views.augment_options.Augment``."""

    rand_augment: RandAugment | None = None
    jitter: Annotated[tuple[float, float, float, float], Field(strict=False)] | None = None
    jitter_rate: Rate = 0.8
    grayscale_rate: Rate = 0.0
    blur_rate: Rate = 0.0
    blur_sigma: Pair = (0.1, 2.0)
    blur_kernel: int = 9
    solarize_rate: Rate = 0.0
    solarize_threshold: int = 128
    three_augment: bool = False
    erase_rate: Rate = 0.0


class View(Section):
    """A group of views: arguments of ``pospre.data.views.plan.ViewGroup``."""

    count: int = Field(default=1, gt=0)
    size: Size | None = Field(default=None, description="None: encoder.image_size")
    scale: ShareRange = (0.2, 1.0)
    ratio: Pair = (3 / 4, 4 / 3)
    flip_rate: float = Field(default=0.5, ge=0, le=1)
    interpolation: Literal["bicubic", "bilinear", "area"] = "bicubic"
    crop: Literal["random", "center", "full", "simple", "pad"] = "random"
    augment: Augment = Augment()


class Data(Section):
    """Where the images are, and the groups of views that are cut out of each, by name."""

    path: str
    batch_size: int = Field(gt=0, description="samples per step, over all ranks")
    label_fraction: float = Field(
        default=1.0, gt=0, le=1, description="of the images, as many of each class, by the seed"
    )
    labels: str | None = Field(
        default=None, description="text file that names the images to take, one in each line"
    )
    views: dict[str, View] = Field(default={"view": View()}, min_length=1)
    num_workers: int | None = Field(
        default=None, ge=0, description="decoding threads; None: one per core; 0: none of their own"
    )
    repeats: int = Field(default=1, gt=0, description="times that each sample comes in a row")
    order: Literal["random", "windows"] = Field(
        default="random", description="windows: for data that come in parts, such as s3:// shards"
    )
    window: int = Field(default=16384, gt=0, description="samples shuffled together in windows")
    lanes: int = Field(
        default=1, gt=0, description="K machines that divide it fetch 1/K of s3:// shards each"
    )
    bad_samples: Literal["fail", "skip"] = Field(
        default="fail", description="skip: warn, count, and take the next sample"
    )
    deep_range: Literal["auto"] | RisingRange = Field(
        default="auto", description="[LOW, HIGH]: values of 16-bit images that become 0 and 255"
    )
    tolerance: float = Field(
        default=1.0, ge=0, description="of views to decoding smaller: mean RMS of 255 levels"
    )
    cache_dir: str | None = Field(
        default=None, description="of s3:// shards; None: $POSPRE_CACHE or ~/.cache/pospre"
    )
    cache_limit: Bytes | None = Field(
        default=None, description="of s3:// shards on this machine, such as 200GB; None: all"
    )
    mean: Numbers | None = Field(
        default=None, description="of the normalisation; None: ImageNet's, or the data set's own"
    )
    std: PositiveNumbers | None = None
