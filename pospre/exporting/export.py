"""Encoders for other software; that software reads each format back before it gets its name."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.errors import UserError
from pospre.evaluation.models import open_model
from pospre.evaluation.run import require_finite
from pospre.exporting import hf_folder, onnx_file, own_file, timm_file
from pospre.exporting.card import judged, make_card, measurements_of
from pospre.exporting.target import CARD, card_of, check_target, parse_grid
from pospre.exporting.timm_encoder import Parts, take_parts
from pospre.training.weight_files import Keys

_KEYS = Keys("URI = ", "--weights")
COSINE = 0.99999
"""The least cosine of tokens and logits with ours, in any software that reads the export."""
_ROUNDINGS = 10
"""So many times our own rounding the difference of two float32 codes may be."""
_FORMATS: dict[str, ModuleType] = {
    "timm": timm_file,
    "safetensors": timm_file,
    "hf": hf_folder,
    "onnx": onnx_file,
}


def export(
    checkpoint: str,
    out: Path,
    *,
    format: str,
    num_classes: int | None = None,
    grid: str | None = None,
    weights: Literal["student", "teacher"] = "student",
    license: str | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write the encoder of ``checkpoint`` to ``out``, with a card, completely or not at all.

    Args:
        checkpoint: a checkpoint, a folder of them or a run folder; or a file of weights or
            ``timm:NAME,FILE``, see ``open_model``.
        out: the file to write; of ``hf`` the folder.
        format: ``timm``, ``safetensors``, ``hf`` or ``onnx``.
        num_classes: number of classes of timm's classifier, see ``--help``.
        grid: grid of the positions, such as ``"14x14"``; None takes the encoder's.
        weights: the trained ones, or the teacher's.
        license: of the weights, for the card; None: not stated.
        overwrite: replace ``out`` if it exists.

    Returns:
        Lines that say how to load it.

    Raises:
        UserError: nothing was written; ``out`` exists or has the wrong ending, the checkpoint
            cannot be used, or the format cannot hold its encoder.
    """
    check_target(out, format, num_classes, overwrite)
    wanted = None if grid is None else parse_grid(grid)
    source = open_model(checkpoint, weights=weights, keys=_KEYS)
    require_finite(source.model, checkpoint)
    model, recipe = source.model, source.recipe
    parts = take_parts(model, recipe, format=format, num_classes=num_classes, grid=wanted)
    measured = measurements_of(parts, checkpoint, weights, source.step)
    judgement = judged(parts, measured, weights)
    kind = _FORMATS[format] if parts.is_timms or format == "onnx" else own_file
    partial, card = out.with_name(f".partial-{os.getpid()}-{out.name}"), card_of(out, format)
    try:
        kind.write(parts, partial)
        images = parts.sample_images(2)
        reader, outputs = kind.compute(parts, partial, images)
        agreement = _compare(parts, images, reader, outputs, kind.TOLERANCE)
        checked, loading = f"{reader}; {agreement}", kind.usage(parts, out)
        text = make_card(
            parts,
            library=kind.LIBRARY,
            loading=loading,
            checked=checked,
            checkpoint=checkpoint,
            weights=weights,
            step=source.step,
            license=license,
            measured=measured,
            judgement=judgement,
        )
        write_atomic(partial / CARD if format == "hf" else card, text.encode())
        _show(partial, out)
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error}") from error
    finally:
        _clear(partial)
    warning = "warning: " if judgement is not None and judgement.outcome == "worse" else ""
    mean, std = (tuple(round(value, 4) for value in each) for each in (parts.mean, parts.std))
    return [
        *([source.origin] if source.origin else []),
        f"written: {out}; its card: {card}",
        f"checked: {checked}",
        *([] if judgement is None else [f"{warning}verdict: {judgement.sentence}"]),
        "",
        *loading,
        f"# pixels in [0, 1], normalised with mean={mean}, std={std}",
    ]


def _compare(
    parts: Parts, images: Tensor, reader: str, theirs: Mapping[str, Tensor], tolerance: float
) -> str:
    """Return how far the outputs of ``reader`` are from ours, in words.

    Raises:
        UserError: too far, but no farther than rounding moves ours; nothing is written.
        RuntimeError: too far; nothing is written.
    """
    ours = parts.outputs(images)
    pairs = [(ours[name], theirs[name]) for name in ours if name in theirs]
    difference = max(_difference(own, other) for own, other in pairs)
    cosine = min(float(F.cosine_similarity(own, other, dim=-1).min()) for own, other in pairs)
    if not (difference < tolerance and cosine >= COSINE):
        rounding = _rounding(parts, images, ours)
        if not difference < _ROUNDINGS * rounding:
            raise RuntimeError(
                f"{reader}, but computes other features: {difference}, cosine {cosine}"
            )
        if cosine < COSINE:
            raise UserError(
                f"{reader}, but float32 does not determine this encoder's features: rounding alone "
                f"moves them by {rounding:.0e} of the largest, cosine {cosine:.6f}. Its attention "
                "is too sharp, or its weights are too large. Nothing was written."
            )
    what = "features and logits" if len(pairs) > 1 else "features"
    return (
        f"its {what} are ours (largest relative difference {difference:.0e}, smallest cosine "
        f"{cosine:.6f})"
    )


def _difference(own: Tensor, other: Tensor) -> float:
    return float((own - other).abs().max() / own.abs().max())


def _rounding(parts: Parts, images: Tensor, ours: Mapping[str, Tensor]) -> float:
    """Return how far our outputs move with the images' last bits; with sharp attention, far.

    Single draws differ by a factor of twenty, and so does float64, so the largest is taken.
    """
    generator, last_bit = torch.Generator().manual_seed(0), torch.finfo(images.dtype).eps
    differences = []
    for _ in range(8):
        noise = 2 * torch.rand(images.shape, generator=generator) - 1
        moved = parts.outputs(images * (1 + last_bit * noise))
        differences += [_difference(ours[name], moved[name]) for name in ours]
    return max(differences)


def _show(partial: Path, out: Path) -> None:
    """Rename a complete output; a folder cannot replace another one at once."""
    old = partial.with_name(f"{partial.name}.old")
    if out.is_dir():
        os.replace(out, old)
    os.replace(partial, out)
    _clear(old)


def _clear(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
