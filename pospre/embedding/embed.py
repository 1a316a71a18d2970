"""Features of all images of a data set, by any encoder."""

import sys
from pathlib import Path

import torch

from pospre.embedding.features import ALONE, Features, Ranks
from pospre.embedding.folder import LINES, Folder, gigabytes
from pospre.embedding.parquet import pyarrow
from pospre.embedding.settings import Embed
from pospre.errors import UserError
from pospre.evaluation.layers import check_grid
from pospre.evaluation.models import MODEL_KEYS, Subject, open_model
from pospre.evaluation.run import encoder_hash, find_device, require_finite, whole_float32
from pospre.nn.weights.timm_models import PREFIX
from pospre.object_store import is_remote
from pospre.recipe.provenance import concealed
from pospre.training.foreign import Shown, check_size
from pospre.training.weight_files import is_weights_file
from pospre.training.weight_records import Weights

_LISTED = 5  # images that could not be read, in the message


def embed(
    address: str,
    data: str,
    out: str | Path,
    settings: Embed,
    *,
    weights: Weights = "student",
    shown: Shown,
    seed: int = 0,
    device: str = "auto",
    ranks: Ranks = ALONE,
    progress: bool = True,
) -> None:
    """Write the features of all images of ``data`` into the folder ``out``.

    For ``address``, ``weights`` and ``seed`` see ``open_model``; an image size in ``shown`` is also
    for a run. A started folder is continued, and a complete one is left as it is.

    Raises:
        UserError: a wrong argument, a full disk, or images that cannot be read (without ``skip``).
    """
    if is_remote(str(out)):
        raise UserError(f"OUT {out} is remote; write to a disk, then copy the folder.")
    if settings.format == "parquet":
        pyarrow()
    subject, size = _subject(address, weights, shown, seed)
    taken, measured = subject.recipe.environment, encoder_hash(subject.model)
    torch_device = find_device(device)
    if torch_device.type == "cuda":
        torch_device = torch.device("cuda", ranks.local)
    work = Features(subject, size, data, settings, torch_device)
    plan = {
        "model": concealed(address, taken),
        "weights": weights,
        "step": subject.step,
        "encoder_sha256": measured,
        "data": concealed(data, taken),
        "images": len(work.images),
        "classes": work.images.reader.classes,
        "data_identity": work.images.reader.identity(),
        **work.described(),
    }
    folder = Folder(Path(out), plan, work.arrays, settings.format)
    if not folder.is_complete:
        _say_size(folder, ranks)
        folder.check_room()
        folder.open(ranks.rank, ranks.number)
    if not folder.is_complete:
        with whole_float32():
            work.run(folder, ranks, progress)
        if not folder.close():
            print(f"rank {ranks.rank}: done; the last rank completes {out}", file=sys.stderr)
            return
    _report(folder, settings)


def _subject(
    address: str, weights: Weights, shown: Shown, seed: int
) -> tuple[Subject, tuple[int, int]]:
    """Return the model, and the size of its views."""
    size = shown.image_size
    if not (address.startswith(PREFIX) or is_weights_file(address)):
        shown = shown._replace(image_size=None)  # its recipe has one; other views may do
    subject = open_model(address, weights=weights, shown=shown, seed=seed)
    encoder = subject.model.encoder
    size = size or encoder.image_size
    check_size(size, encoder.patch_size, MODEL_KEYS.size)
    check_grid(encoder, encoder.grid_of(*size), f"--image-size {size[0]}x{size[1]}")
    if subject.origin:
        print(subject.origin, file=sys.stderr)
    require_finite(subject.model, address)
    return subject, size


def _say_size(folder: Folder, ranks: Ranks) -> None:
    if ranks.rank == 0:
        text = f"{folder.out}: {gigabytes(folder.num_bytes)} ({_shapes(folder)})"
        print(f"{text}, {folder.arrays[0].dtype}", file=sys.stderr)


def _report(folder: Folder, settings: Embed) -> None:
    """Print what is written; raise a ``UserError`` if images could not be read."""
    print(f"written: {folder.out}: {folder.rows:,} images, {_shapes(folder)}")
    bad = [f"row {line['row']}: {line['error']}" for line in folder.lines() if "error" in line]
    if bad:
        more = f"\n  and {len(bad) - _LISTED} more" if len(bad) > _LISTED else ""
        listed = "\n  ".join(bad[:_LISTED]) + more
        text = f"{len(bad)} of {folder.rows} images could not be read:\n  {listed}\nTheir rows are "
        text += f"NaN; {folder.out / LINES} has the reason."
        if not settings.skip:
            raise UserError(f"{text} The folder is complete; skip=true accepts such rows.")
        print(f"warning: {text}", file=sys.stderr)


def _shapes(folder: Folder) -> str:
    features = folder.plan["features"].items()
    return ", ".join(f"{name} {' × '.join(map(str, shape))}" for name, shape in features)
