"""An encoder's weights as timm's model of its architecture takes them, checked by timm itself."""

import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import timm
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.run import require_finite
from pospre.exchange.start import refuse_export
from pospre.exchange.target import check_target, parse_grid
from pospre.model.model import PretrainModel
from pospre.nn.encoder import Encoder
from pospre.training.checkpoints.content import load_model

_TOLERANCE = 1e-5  # relative to the largest feature


def export(
    checkpoint: str,
    out: Path,
    *,
    format: str,
    num_classes: int | None = None,
    grid: str | None = None,
    weights: Literal["student", "teacher"] = "student",
    overwrite: bool = False,
) -> list[str]:
    """Write the encoder of ``checkpoint`` to ``out``, whole or not at all.

    Args:
        checkpoint: a checkpoint file, a folder of them or a run folder.
        out: the file to write.
        format: ``timm`` or ``safetensors``.
        num_classes: of timm's classifier, see ``--help``.
        grid: of the positions, such as ``"14x14"``; None takes the encoder's.
        weights: the trained ones, or the teacher's.
        overwrite: replace ``out`` if it exists.

    Returns:
        Lines that say how to load the file.

    Raises:
        UserError: nothing was written; ``out`` exists or has the wrong ending, or the checkpoint
            cannot be used.
    """
    check_target(out, format, num_classes, overwrite)
    wanted = None if grid is None else parse_grid(grid)
    refuse_export(checkpoint)
    model, recipe = load_model(checkpoint, weights=weights)
    require_finite(model, checkpoint)
    shown = wanted or model.encoder.grid
    classifier = _classifier(model) if num_classes is None and format == "timm" else None
    tensors, kwargs = _tensors(model, format, num_classes, shown, classifier)
    metadata = _metadata(model, kwargs, recipe.dump())
    partial = out.with_name(f".partial-{os.getpid()}-{out.name}")
    try:
        _write(partial, tensors, metadata)
        difference = _check_features(model, partial, kwargs, shown, classifier)
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    normalise = ", ".join(f"{key}={_rounded(metadata[key])}" for key in ("mean", "std"))
    return [
        f"written: {out}",
        f"checked: timm loads all {len(tensors)} tensors; its "
        f"{'features and logits' if classifier else 'features'} are ours (largest relative "
        f"difference {difference:.0e})",
        "",
        "import timm",
        f"model = {create_model_line(model.encoder.timm_name, out, kwargs)}",
        f"# pixels in [0, 1], normalised with {normalise}",
    ]


def create_model_line(timm_name: str, out: Path, kwargs: dict[str, Any]) -> str:
    """Return the call of timm that loads ``out``."""
    arguments = [f"checkpoint_path={str(out)!r}", *(f"{k}={v!r}" for k, v in kwargs.items())]
    return f"timm.create_model({timm_name!r}, {', '.join(arguments)})"


def _tensors(
    model: PretrainModel,
    format: str,
    num_classes: int | None,
    grid: tuple[int, int],
    classifier: Any,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what goes into the file, and what ``timm.create_model`` must be told to take it."""
    encoder = model.encoder
    tensors = encoder.timm_state()
    resized = grid != encoder.grid
    if resized and encoder.pos_embed is None:
        raise UserError(
            f"--grid {grid[0]}x{grid[1]} is for positions of a table or a field, but "
            f"encoder.positions is {encoder.position_kind}."
        )
    if resized or model.position_source is not None:
        tensors["pos_embed"] = model.position_table(grid)
    usual = _timm_classes(encoder.timm_name)
    classes = usual if num_classes is None else num_classes
    if format == "safetensors":
        classes = 0
    kwargs: dict[str, Any] = dict(encoder.timm_kwargs)
    if classifier:
        classes = _add_classifier(classifier, tensors, kwargs)
    elif classes:
        tensors.update(_zero_head(encoder, classes))
    if kwargs.get("fc_norm") and not classifier:  # timm's relative models have this or the other
        tensors.update(_plain_norm(encoder.embed_dim))
    if resized:
        height, width = _image_size(encoder, grid)
        kwargs["img_size"] = height if height == width else (height, width)
    if classes != usual:
        kwargs["num_classes"] = classes
    return tensors, kwargs


def _image_size(encoder: Encoder, grid: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) in pixels of an image of so many patches."""
    return grid[0] * encoder.patch_size[0], grid[1] * encoder.patch_size[1]


def _metadata(
    model: PretrainModel, kwargs: dict[str, Any], recipe: dict[str, Any]
) -> dict[str, str]:
    """Return the header of a ``.safetensors`` file: text by key."""
    return {
        "format": "pt",
        "timm_name": model.encoder.timm_name,
        "timm_kwargs": json.dumps(kwargs),
        "mean": json.dumps(model.augment.mean.flatten().tolist()),
        "std": json.dumps(model.augment.std.flatten().tolist()),
        "recipe": json.dumps(recipe),
    }


def _timm_classes(timm_name: str) -> int:
    """Return how many classes ``timm.create_model(timm_name)`` has."""
    config = timm.get_pretrained_cfg(timm_name)
    return 1000 if config is None else int(config.num_classes)


def _classifier(model: PretrainModel) -> Any:
    """Return the objective that has a head for timm's classifier, None without one."""
    objectives = (model.objectives[name] for name in model.objectives)
    return next((found for found in objectives if hasattr(found, "timm_state")), None)


def _add_classifier(classifier: Any, tensors: dict[str, Tensor], kwargs: dict[str, Any]) -> int:
    """Add the trained class head; return how many classes it has."""
    state, options = classifier.timm_state()
    tensors.update(state)
    kwargs.pop("final_norm", None)  # said by fc_norm: the norm moves behind the pooling
    kwargs.update(options)
    return int(kwargs.pop("num_classes"))


def _plain_norm(dim: int) -> dict[str, Tensor]:
    """Return a norm behind the pooling with nothing learned in it."""
    return {"fc_norm.weight": torch.ones(dim), "fc_norm.bias": torch.zeros(dim)}


def _zero_head(encoder: Encoder, num_classes: int) -> dict[str, Tensor]:
    """Return timm's classifier with nothing learned in it: every logit is 0."""
    return {
        f"{encoder.timm_head}.weight": torch.zeros(num_classes, encoder.embed_dim),
        f"{encoder.timm_head}.bias": torch.zeros(num_classes),
    }


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a ``.pth`` (a plain state dict) or ``.safetensors`` file to the disk itself."""
    if path.suffix == ".safetensors":
        content = safetensors.torch.save(tensors, metadata)
    else:
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        content = buffer.getvalue()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _check_features(
    model: PretrainModel,
    path: Path,
    kwargs: dict[str, Any],
    grid: tuple[int, int],
    classifier: Any,
) -> float:
    """Load the file with timm and return how far its features are from ours, relatively.

    With a trained ``classifier`` its logits are compared as well.

    A timm of another version might build another network under the same names: then the file is
    not given out.
    """
    theirs: Any = timm.create_model(
        model.encoder.timm_name, checkpoint_path=str(path), **kwargs
    ).eval()
    height, width = _image_size(model.encoder, grid)
    shape = 2, model.encoder.channels, height, width
    images = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model.tokens(images)
        found = theirs.forward_features(images).flatten(1, -2)  # Swin's is a map
        pairs = [(ours, found)]
        if classifier:
            logits = classifier({"student": ours}, {})["logits"]
            pairs.append((logits, theirs(images)))
    difference = max(float((ours - found).abs().max() / ours.abs().max()) for ours, found in pairs)
    if not difference < _TOLERANCE:
        raise RuntimeError(f"timm {timm.__version__} computes other features: {difference}")
    return difference


def _rounded(numbers: str) -> Sequence[float]:
    return tuple(round(number, 4) for number in json.loads(numbers))
