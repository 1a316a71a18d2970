"""The sections of what a run starts from: images, encoder, and reference.

Options of the encoder, the loader and its views are declared with their code, and inherited here.
"""

from typing import Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from pospre.arguments import Section
from pospre.data.reading import Reading
from pospre.data.views import augment_options, options
from pospre.nn.encoder_options import EncoderOptions, Kernel
from pospre.recipe.values import (
    Numbers,
    PositiveNumbers,
)


# mypy does not see that sections are frozen, like these options
class RandAugment(Section, augment_options.RandAugment):  # type: ignore[misc]
    """RandAugment as timm names it: ``rand-m9-mstd0.5-inc1``."""


class Augment(Section, augment_options.Augment):  # type: ignore[misc]
    """Changes of a view in training."""

    rand_augment: RandAugment | None = None


class View(Section, options.ViewOptions):  # type: ignore[misc]
    """A group of views; the default size is the encoder's."""

    augment: Augment = Augment()


class Data(Section, Reading):
    """The images, and the groups of views cropped from each, by name."""

    path: str
    """Image folder, ``.beton`` file or MDS directory; local, or ``s3://`` for MDS."""
    batch_size: int = Field(gt=0)
    """Samples per step, over all ranks."""
    views: dict[str, View] = Field(default={"view": View()}, min_length=1)
    """Groups of views by name; methods say which they need."""
    mean: Numbers | None = None
    """For normalisation; None: the data set's own, that of encoder.weights, or ImageNet's."""
    std: PositiveNumbers | None = None
    """As ``mean``."""


OF_WEIGHTS = ("weights", "weights_from", "kernel", "keep")
"""Keys of the encoder's section that are not arguments of ``build_encoder``."""


class Encoder(Section, EncoderOptions):
    """The encoder, and the weights to start from, which may also say what it is."""

    name: str = ""
    weights: str | None = None
    """Run folder, checkpoint, or a file of weights: ours, timm's, MAE's, DINOv2's, I-JEPA's, …;
    local or s3://; FILE,positions=none if it was trained without positions, FILE,positions=drop to
    leave them out. Without a name, keys that the section leaves out are as in these weights.
    """
    weights_from: Literal["student", "teacher"] = "student"
    """Which encoder of a file: the trained one, or its EMA."""
    kernel: Kernel = "bicubic"
    """How the patch kernel of weights gets another patch_size: ``bicubic``, scaled by (old / new)²;
    ``pinv``, FlexiViT's pseudo-inverse; ``timm``, timm's.
    """

    keep: Literal["fit", "fade"] | None = None
    """What ``positions`` that are not those of the weights keep of them: ``fit``, biases (of
    ``alibi``, ``torus`` or ``relative``) fitted to what the weights' own positions do to attention;
    the default of these three. ``fade``: at first all; the weights' own fade out over the first
    half of the training, while the new ones (but ``lookhere``) fade in.
    """

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if not self.name and self.weights is None:
            words = "a section with name, such as vitb16, or with weights, which show the encoder"
            raise PydanticCustomError("range", words)
        if self.keep is not None and self.weights is None:
            words = "a section with weights if it has keep: there is nothing to keep without"
            raise PydanticCustomError("range", words)
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``build_encoder``."""
        return self.model_dump(exclude={*OF_WEIGHTS})


class Reference(Section):
    """The reference: an encoder that stays as it is, which methods such as ``gram`` compare with.

    Every checkpoint has the hash of its tensors, and a run resumes with no other one.
    """

    weights: str
    """``start``: the encoder that ``encoder.weights`` gives, as published; or a run, a checkpoint,
    a file of weights, or timm:NAME,FILE.
    """
    weights_from: Literal["student", "teacher"] = "student"
    """Which encoder of a run or a file; of ``start``, ``encoder.weights_from`` says it."""
    store: bool = True
    """Keep a copy of its tensors in the run's folder, for resumed runs; otherwise these read
    ``weights`` again.
    """
    encoder: Encoder | None = None
    """Its encoder's options; None: as its weights show."""
