"""The section of a recipe that says what the data are, and which views are cut out of them."""

from pydantic import Field

from pospre.arguments import Section
from pospre.data.reading import Reading
from pospre.data.views import options
from pospre.recipe.values import Numbers, PositiveNumbers


# mypy does not see that sections are frozen, as these options are
class RandAugment(Section, options.RandAugment):  # type: ignore[misc]
    """See there."""


class Augment(Section, options.Augment):  # type: ignore[misc]
    """Changes of a view in training."""

    rand_augment: RandAugment | None = None


class View(Section, options.ViewOptions):  # type: ignore[misc]
    """A group of views; without a size they have that of the encoder."""

    augment: Augment = Augment()


class Data(Section, Reading):
    """Where the images are, and the groups of views that are cut out of each, by name."""

    path: str
    batch_size: int = Field(gt=0, description="samples per step, over all ranks")
    views: dict[str, View] = Field(default={"view": View()}, min_length=1)
    mean: Numbers | None = Field(
        default=None, description="of the normalisation; None: ImageNet's, or the data set's own"
    )
    std: PositiveNumbers | None = None
