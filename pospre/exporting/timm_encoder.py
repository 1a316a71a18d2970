"""The input of every export format: an encoder under timm's names, and its origin."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.foreign import table_grid
from pospre.nn.vit import as_vit
from pospre.recipe.recipe import Recipe

_WITH_CLASSIFIER = ("timm", "onnx")
_OF_OWN = ("safetensors", "onnx")
"""Formats of our own models, too."""


@dataclass(frozen=True)
class Parts:
    """An encoder for timm's model of its architecture, and where it comes from.

    Attributes:
        model: the model, in eval mode on the CPU.
        tensors: tensors of the encoder and its classifier, under timm's names.
        kwargs: the arguments of ``timm.create_model`` that fit them.
        grid: rows and columns of the positions.
        classifier: the objective with the head for timm's classifier; None where none is written.
    """

    model: PretrainModel
    recipe: Recipe
    tensors: dict[str, Tensor]
    kwargs: dict[str, Any]
    grid: tuple[int, int]
    classifier: Any

    @property
    def is_timms(self) -> bool:
        """Whether timm has a model of this architecture."""
        return not self.model.encoder.unknown_to_timm()

    @property
    def timm_name(self) -> str:
        """The name of timm's model."""
        return self.model.encoder.timm_name

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of the classifier's classes in order; None without one, or if none is known."""
        return self.recipe.trained_on.classes if self.classifier else None

    @property
    def mean(self) -> list[float]:
        """Mean that is subtracted from pixels in [0, 1], for each channel."""
        return _digits(self.model.augment.mean)

    @property
    def std(self) -> list[float]:
        """Standard deviation by which they are then divided."""
        return _digits(self.model.augment.std)

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) in pixels of the images that the written positions are for."""
        return _image_size(self.model.encoder, self.grid)

    @property
    def output_names(self) -> list[str]:
        """Names of the results of ``outputs``, in order."""
        return ["tokens", "logits"] if self.classifier else ["tokens"]

    def metadata(self) -> dict[str, str]:
        """Return the metadata for the header of a file: text by key."""
        return {
            **({"timm_name": self.timm_name} if self.is_timms else {}),
            "timm_kwargs": json.dumps(self.kwargs),
            "mean": json.dumps(self.mean),
            "std": json.dumps(self.std),
            "resampling": getattr(self.model.encoder.positions, "resampling", "bicubic"),
            "recipe": json.dumps(self.recipe.dump()),
            **({"classes": json.dumps(self.classes)} if self.classes else {}),
        }

    def sample_images(self, count: int) -> Tensor:
        """Return seeded noise of the images' shape, (count, channels, height, width)."""
        shape = count, self.model.encoder.channels, *self.image_size
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def outputs(self, images_BCHW: Tensor) -> dict[str, Tensor]:
        """Return our ``tokens`` (B, P+N, D) of whole images, and ``logits`` with a classifier."""
        tokens = self.model.encoder(images_BCHW)
        if not self.classifier:
            return {"tokens": tokens}
        return {"tokens": tokens, **self.classifier({"student": tokens}, {})}


class OwnOutputs(torch.nn.Module):
    """Our model with the same outputs."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.model, self.outputs = parts.model, parts.outputs

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the results of ``Parts.outputs``, in order."""
        return tuple(self.outputs(images_BCHW).values())


class TimmOutputs(torch.nn.Module):
    """A timm model that returns the same outputs."""

    def __init__(self, vit: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.vit: Any = vit.eval()
        self.names = names

    def forward(self, images_BCHW: Tensor) -> tuple[Tensor, ...]:
        """Return the results of ``Parts.outputs``, in order."""
        features = self.vit.forward_features(images_BCHW)
        tokens = features.flatten(1, -2)  # Swin's is a map
        return (tokens, self.vit.forward_head(features)) if "logits" in self.names else (tokens,)


def take_parts(
    model: PretrainModel,
    recipe: Recipe,
    *,
    format: str,
    num_classes: int | None,
    grid: tuple[int, int] | None,
) -> Parts:
    """Return the parts of a model that are exported; ``grid`` None takes the encoder's positions.

    The format ``timm`` gets a zero classifier of ``num_classes`` where none is trained; the others
    none. None takes the trained classifier, or timm's usual number.
    """
    encoder = model.encoder
    if encoder.unknown_to_timm() and format in _OF_OWN:
        return _own_parts(model, recipe, grid or encoder.grid, format)
    own = None if model.layout.placer else table_grid(encoder.options.positions)
    shown = grid or own or encoder.grid
    _check_grid(encoder, shown)
    tensors = encoder.timm_state() if shown == encoder.grid else encoder.timm_state(grid=shown)
    kwargs: dict[str, Any] = dict(encoder.timm_kwargs)
    wants = num_classes is None and format in _WITH_CLASSIFIER
    classifier = _classifier(model) if wants else None
    usual = _timm_classes(encoder.timm_name)
    classes = usual if num_classes is None else num_classes
    if classifier:
        classes = _add_classifier(classifier, tensors, kwargs)
    elif format != "timm":
        classes = 0
    elif classes:
        tensors[f"{encoder.timm_head}.weight"] = torch.zeros(classes, encoder.embed_dim)
        tensors[f"{encoder.timm_head}.bias"] = torch.zeros(classes)
    if kwargs.get("fc_norm") and not classifier:  # timm's relative models have this or the other
        tensors["fc_norm.weight"] = torch.ones(encoder.embed_dim)
        tensors["fc_norm.bias"] = torch.zeros(encoder.embed_dim)
    if shown != encoder.grid:
        height, width = _image_size(encoder, shown)
        kwargs["img_size"] = height if height == width else (height, width)
    if classes != usual:
        kwargs["num_classes"] = classes
    return Parts(model, recipe, tensors, kwargs, shown, classifier)


def _own_parts(model: PretrainModel, recipe: Recipe, grid: tuple[int, int], format: str) -> Parts:
    """Return the parts of a model that timm lacks, for our own code."""
    encoder = as_vit(model.encoder)
    _check_grid(encoder, grid)
    classifier = _classifier(model) if format in _WITH_CLASSIFIER else None
    size = {"img_size": _image_size(encoder, grid)}
    return Parts(model, recipe, encoder.named_state(), size, grid, classifier)


def _check_grid(encoder: PatchEncoder, grid: tuple[int, int]) -> None:
    """Raise ``UserError`` if the positions do not support this grid."""
    if grid != encoder.grid and not encoder.positions.takes_any_grid:
        own = "x".join(map(str, encoder.grid))
        raise UserError(
            f"--grid {grid[0]}x{grid[1]} needs positions that take any grid, but "
            f"encoder.positions = {encoder.positions.name} takes a grid of {own} only. Leave out "
            "--grid."
        )


def _digits(values: Tensor) -> list[float]:
    """Return float32 numbers as Python floats, without digits beyond their precision."""
    return [float(f"{value:.7g}") for value in values.flatten().tolist()]


def _image_size(encoder: PatchEncoder, grid: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) in pixels of an image with this many patches."""
    return grid[0] * encoder.patch_size[0], grid[1] * encoder.patch_size[1]


def _timm_classes(timm_name: str) -> int:
    """Return the number of classes of ``timm.create_model(timm_name)``."""
    config = timm.get_pretrained_cfg(timm_name)
    return 1000 if config is None else int(config.num_classes)


def _classifier(model: PretrainModel) -> Any:
    """Return the objective that has a head for timm's classifier, None without one."""
    objectives = (model.objectives[name] for name in model.objectives)
    return next((each for each in objectives if hasattr(each, "timm_state")), None)


def _add_classifier(classifier: Any, tensors: dict[str, Tensor], kwargs: dict[str, Any]) -> int:
    """Add the trained class head; return its number of classes."""
    state, options = classifier.timm_state()
    tensors.update(state)
    kwargs.pop("final_norm", None)  # said by fc_norm: the norm moves behind the pooling
    if "use_fc_norm" in kwargs and "fc_norm" in options:  # what timm's Eva calls it
        bare = options.pop("fc_norm")
        options |= {"use_fc_norm": bare, "use_post_transformer_norm": not bare}
    kwargs.update(options)
    return int(kwargs.pop("num_classes"))
