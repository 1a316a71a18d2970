"""The section of a recipe that says what the data are, and which views are cut out of them."""

from typing import Literal

from pydantic import Field

from pospre.arguments import Section
from pospre.data.views import options
from pospre.recipe.values import Bytes, Numbers, PositiveNumbers, RisingRange


# mypy does not see that sections are frozen, as these options are
class RandAugment(Section, options.RandAugment):  # type: ignore[misc]
    """See there."""


class Augment(Section, options.Augment):  # type: ignore[misc]
    """Changes of a view in training."""

    rand_augment: RandAugment | None = None


class View(Section, options.ViewOptions):  # type: ignore[misc]
    """A group of views; without a size they have that of the encoder."""

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
