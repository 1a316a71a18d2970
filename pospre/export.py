"""``python -m pospre.export URI OUT --format timm|safetensors``: encoder weights for others."""

import argparse
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pospre.errors import UserError, run_command

if TYPE_CHECKING:
    from torch import Tensor

    from pospre.model.model import PretrainModel
    from pospre.nn.encoder import Encoder

_FORMATS = ("timm", "safetensors")
_EPILOG = """\
formats:
  timm         what timm.create_model(NAME, checkpoint_path=OUT) loads, every tensor, strictly; the
               exact call is printed. timm's models have a classifier: that of a run with
               "supervised" goes along, else a zero one (--num-classes). OUT ends in .pth, or in
               .safetensors.
  safetensors  the bare encoder under timm's names, with recipe, architecture and pixel
               normalisation as metadata. OUT ends in .safetensors.

examples:
  python -m pospre.export runs/droppos_vits16 droppos_vits16.pth --format timm
  python -m pospre.export runs/mae_vits16 mae.pth --format timm --num-classes 0
  python -m pospre.export s3://bucket/mae/checkpoints mae.safetensors --format safetensors
  python -m pospre.export runs/intertwined_vits16 for_1024.pth --format timm --grid 64x64

exit codes: 0 done, 2 a mistake in the command or the checkpoint (said in one message).
"""
_TOLERANCE = 1e-5  # relative to the largest feature


def main(argv: list[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pospre.export",
        description="Write the encoder of a checkpoint for other software.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", metavar="URI", help="checkpoint file or run folder; also s3://"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="file to write")
    parser.add_argument("--format", required=True, choices=_FORMATS, help="see below")
    parser.add_argument(
        "--num-classes",
        type=int,
        help="classes of a zero classifier of --format timm; 0: none. Default: the trained "
        "classifier, or what timm's create_model makes without being told (mostly 1000)",
    )
    parser.add_argument(
        "--grid",
        metavar="RxC",
        help="rows and columns of the positions written, for images of so many patches; default: "
        "the encoder's. Positions of a field (crop_field) are read from it at once, which keeps "
        "more than resampling the file would; RxC of the field itself writes it as it is",
    )
    parser.add_argument(
        "--weights",
        default="student",
        choices=("student", "teacher"),
        help="the trained encoder (default), or the momentum teacher that followed it",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    arguments = parser.parse_args(argv)
    lines = export(
        arguments.checkpoint,
        arguments.out,
        format=arguments.format,
        num_classes=arguments.num_classes,
        grid=arguments.grid,
        weights=arguments.weights,
        overwrite=arguments.overwrite,
    )
    print("\n".join(lines))
    return 0


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
    _check_target(out, format, num_classes, overwrite)
    wanted = None if grid is None else _parse_grid(grid)
    # Late, so that a mistyped option answers at once.
    from pospre.evaluation.run import require_finite
    from pospre.exchange.start import refuse_export
    from pospre.training.checkpoints.content import load_model

    refuse_export(checkpoint)
    model, recipe = load_model(checkpoint, weights=weights)
    require_finite(model, checkpoint)
    shown = wanted or model.encoder.grid
    trained = num_classes is None and format == "timm" and "supervised" in model.objectives
    tensors, kwargs = _tensors(model, format, num_classes, shown, classifier=trained)
    metadata = _metadata(model, kwargs, recipe.dump())
    partial = out.with_name(f".partial-{os.getpid()}-{out.name}")
    try:
        _write(partial, tensors, metadata)
        difference = _check_features(model, partial, kwargs, shown, classifier=trained)
        os.replace(partial, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)
    normalise = ", ".join(f"{key}={_rounded(metadata[key])}" for key in ("mean", "std"))
    return [
        f"written: {out}",
        f"checked: timm loads all {len(tensors)} tensors; its "
        f"{'features and logits' if trained else 'features'} are ours (largest relative "
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


def _check_target(out: Path, format: str, num_classes: int | None, overwrite: bool) -> None:
    """Refuse, before any work, what cannot be written."""
    endings = (".safetensors",) if format == "safetensors" else (".pth", ".safetensors")
    if out.suffix not in endings:
        raise UserError(f"OUT = {out} must end in {' or '.join(endings)} for --format {format}.")
    if num_classes is not None and format != "timm":
        raise UserError(f"--num-classes is for --format timm; {format} has no classifier.")
    if num_classes is not None and num_classes < 0:
        raise UserError(f"--num-classes is {num_classes}; give 0 (no classifier) or more.")
    if out.is_dir():
        raise UserError(f"OUT = {out} is a folder; name a file in it.")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; --overwrite replaces it.")
    if not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} of OUT does not exist; make it first.")


def _parse_grid(text: str) -> tuple[int, int]:
    """Return (rows, columns) of ``14x14``."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise UserError(f"--grid is '{text}'; give rows and columns of patches, such as 14x14.")
    return int(match[1]), int(match[2])


def _tensors(
    model: "PretrainModel",
    format: str,
    num_classes: int | None,
    grid: tuple[int, int],
    *,
    classifier: bool,
) -> tuple[dict[str, "Tensor"], dict[str, Any]]:
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
        classes = _add_classifier(model, tensors, kwargs)
    elif classes:
        tensors.update(_zero_head(encoder, classes))
    if (
        kwargs.get("fc_norm") and not classifier
    ):  # timm's relative models have this norm or the other
        tensors.update(_plain_norm(encoder.embed_dim))
    if resized:
        height, width = _image_size(encoder, grid)
        kwargs["img_size"] = height if height == width else (height, width)
    if classes != usual:
        kwargs["num_classes"] = classes
    return tensors, kwargs


def _image_size(encoder: "Encoder", grid: tuple[int, int]) -> tuple[int, int]:
    """Return (height, width) in pixels of an image of so many patches."""
    return grid[0] * encoder.patch_size[0], grid[1] * encoder.patch_size[1]


def _metadata(
    model: "PretrainModel", kwargs: dict[str, Any], recipe: dict[str, Any]
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
    import timm

    config = timm.get_pretrained_cfg(timm_name)
    return 1000 if config is None else int(config.num_classes)


def _add_classifier(
    model: "PretrainModel", tensors: dict[str, "Tensor"], kwargs: dict[str, Any]
) -> int:
    """Add the trained class head; return how many classes it has."""
    from pospre.algorithms.supervised.supervised import Classification

    objective = model.objectives["supervised"]
    assert isinstance(objective, Classification)
    state, options = objective.timm_state()
    tensors.update(state)
    kwargs.pop("final_norm", None)  # said by fc_norm: the norm moves behind the pooling
    kwargs.update(options)
    return int(kwargs.pop("num_classes"))


def _plain_norm(dim: int) -> dict[str, "Tensor"]:
    """Return a norm behind the pooling with nothing learned in it."""
    import torch

    return {"fc_norm.weight": torch.ones(dim), "fc_norm.bias": torch.zeros(dim)}


def _zero_head(encoder: "Encoder", num_classes: int) -> dict[str, "Tensor"]:
    """Return timm's classifier with nothing learned in it: every logit is 0."""
    import torch

    return {
        f"{encoder.timm_head}.weight": torch.zeros(num_classes, encoder.embed_dim),
        f"{encoder.timm_head}.bias": torch.zeros(num_classes),
    }


def _write(path: Path, tensors: dict[str, "Tensor"], metadata: dict[str, str]) -> None:
    """Write a ``.pth`` (a plain state dict) or ``.safetensors`` file to the disk itself."""
    import safetensors.torch
    import torch

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
    model: "PretrainModel",
    path: Path,
    kwargs: dict[str, Any],
    grid: tuple[int, int],
    *,
    classifier: bool,
) -> float:
    """Load the file with timm and return how far its features are from ours, relatively.

    With a trained ``classifier`` its logits are compared as well.

    A timm of another version might build another network under the same names: then the file is
    not given out.
    """
    import timm
    import torch

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
            logits = model.objectives["supervised"]({"student": ours}, {})["logits"]
            pairs.append((logits, theirs(images)))
    difference = max(float((ours - found).abs().max() / ours.abs().max()) for ours, found in pairs)
    if not difference < _TOLERANCE:
        raise RuntimeError(f"timm {timm.__version__} computes other features: {difference}")
    return difference


def _rounded(numbers: str) -> Sequence[float]:
    return tuple(round(number, 4) for number in json.loads(numbers))


if __name__ == "__main__":
    sys.exit(run_command(main))
