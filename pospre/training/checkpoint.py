"""Checkpoints: which is the newest, is it whole, does it fit the model, and what is in it.

Composer writes them (one file each, ``ep<epoch>-ba<batch>.pt``, locally or to S3). Finding and
judging them is done here: Composer's ``latest`` link lags behind the bucket, and its own loading
leaves tensors that the file lacks at random values without a word.
"""

import contextlib
import datetime
import pickle
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre.config import Recipe, recipe_from_dict
from pospre.errors import UserError
from pospre.object_store import Bucket, is_remote
from pospre.pretrain.model import PretrainModel
from pospre.training.build import build_model
from pospre.yaml_text import read_mapping

Weights = Literal["student", "teacher"]

_NAME = re.compile(r"ep(\d+)-ba(\d+)\.pt")
# What torch.load may build besides tensors and plain values: Composer's clock, torch's version
# and numpy's random state.
_ALLOWED = [
    datetime.timedelta,
    torch.torch_version.TorchVersion,
    np.ndarray,
    np.dtype,
    np.dtypes.UInt32DType,
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
]


class Found(NamedTuple):
    """A checkpoint file by progress: the greater, the newer."""

    batch: int
    epoch: int
    uri: str


def checkpoints_in(folder: str) -> list[Found]:
    """Return the checkpoints of a local or ``s3://`` folder, newest first."""
    if is_remote(folder):
        with Bucket(folder) as bucket:
            names = list(bucket.list())
    else:
        names = [path.name for path in Path(folder).glob("*.pt")]
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    found = [Found(int(m[2]), int(m[1]), f"{folder.rstrip('/')}/{m[0]}") for m in matches]
    return sorted(found, reverse=True)


def newest_checkpoint(folder: str) -> Found | None:
    """Return the newest whole checkpoint of a local or ``s3://`` folder, None without any.

    A local file cut short by a kill is passed over. S3 shows an object only when it is whole.
    """
    for found in checkpoints_in(folder):
        if is_remote(found.uri) or zipfile.is_zipfile(found.uri):
            return found
        print(f"{found.uri} is incomplete (the run was killed while writing it): passed over")
    return None


def remove_checkpoints(folder: str) -> None:
    """Delete the checkpoints of a local or ``s3://`` folder."""
    for found in checkpoints_in(folder):
        name = found.uri.rpartition("/")[2]
        if is_remote(folder):
            with Bucket(folder) as bucket:
                bucket.delete(name)
        else:
            Path(found.uri).unlink()


@contextlib.contextmanager
def local_copy(uri: str) -> Iterator[Path]:
    """Give the file at ``uri`` as a local path; a download is deleted afterwards."""
    if not is_remote(uri):
        yield Path(uri)
        return
    with tempfile.TemporaryDirectory(prefix="pospre-checkpoint-") as folder:
        target = Path(folder) / uri.rpartition("/")[2]
        with Bucket(uri) as bucket:
            bucket.fetch(target)
        yield target


def read_checkpoint(path: Path, name: str | None = None) -> dict[str, Any]:
    """Return the content of a checkpoint file on the CPU; nothing in it is ever executed.

    Args:
        path: the file.
        name: what to call it in errors (the address it was downloaded from).

    Raises:
        UserError: it is missing, cut short, no checkpoint, or not one of this package.
    """
    name = name or str(path)
    if not path.is_file():
        raise UserError(f"checkpoint {name} does not exist")
    if not zipfile.is_zipfile(path):
        raise UserError(
            f"{name} is no checkpoint, or one cut short ({path.stat().st_size} bytes); "
            "give a file that training saved whole"
        )
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UserError(
            f"{name} is no checkpoint of pospre.train: it holds more than plain data and tensors"
        ) from error
    except (RuntimeError, EOFError, OSError, KeyError, ValueError) as error:
        raise UserError(f"{name} is damaged or no checkpoint ({error})") from error
    if not isinstance(content, dict) or "RecipeRecord" not in _callbacks(content):
        raise UserError(f"{name} is no checkpoint of pospre.train (it holds no recipe)")
    return content


def _callbacks(content: dict[str, Any]) -> dict[str, Any]:
    state = content.get("state")
    return state.get("callbacks", {}) if isinstance(state, dict) else {}


def recorded(content: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the recipe and the number of samples that a checkpoint's content records."""
    record = _callbacks(content)["RecipeRecord"]
    return record["recipe"], record["num_samples"]


def compare_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], name: str) -> None:
    """Raise a ``UserError`` naming the first tensor of ``found`` that does not fit ``expected``."""
    for key, tensor in expected.items():
        if key not in found:
            raise UserError(f"{name} is of another model: it lacks the tensor '{key}'")
        if found[key].shape != tensor.shape:
            raise UserError(
                f"{name} is of another model: tensor '{key}' has shape "
                f"{tuple(found[key].shape)}, the recipe's model wants {tuple(tensor.shape)}"
            )
    for key in found:
        if key not in expected:
            raise UserError(
                f"{name} is of another model: its tensor '{key}' is not in the recipe's model"
            )


def find_file(uri: str) -> str:
    """Return the checkpoint file that ``uri`` means: a file, a folder of them, or a run folder.

    Raises:
        UserError: there is none.
    """
    if uri.endswith(".pt") or (not is_remote(uri) and Path(uri).is_file()):
        return uri
    recipe_file = Path(uri) / "recipe.yaml"
    folders = [uri, f"{uri.rstrip('/')}/checkpoints"]
    if not is_remote(uri) and recipe_file.is_file():
        folders.append(recipe_from_dict(read_mapping(recipe_file)).checkpoint_folder())
    for folder in folders:
        found = newest_checkpoint(folder)
        if found is not None:
            return found.uri
    if not is_remote(uri) and not Path(uri).exists():
        raise UserError(f"checkpoint {uri} does not exist")
    raise UserError(f"{uri} holds no checkpoint (ep<epoch>-ba<batch>.pt)")


def load_model(
    uri: str, *, initial: bool = False, weights: Weights = "student"
) -> tuple[PretrainModel, Recipe]:
    """Return the model of a checkpoint, in eval mode on the CPU, and its recipe.

    Args:
        uri: a checkpoint file, a folder of them or a run folder (the newest counts), local or S3.
        initial: give the same model with the random weights of its seed, before any training.
        weights: ``teacher`` puts the teacher's weights where the trained ones are.

    Raises:
        UserError: no such checkpoint, the file is damaged or of another model, or it has no
            teacher.
    """
    uri = find_file(str(uri))
    with local_copy(uri) as path:
        content = read_checkpoint(path, uri)
    recipe = recipe_from_dict(recorded(content)[0], source=f"recipe in {uri}")
    model = build_model(recipe)
    if not initial:
        found = content["state"]["model"]
        compare_tensors(model.state_dict(), found, uri)
        model.load_state_dict(found)
    if weights == "teacher":
        _take_teacher(model, uri)
    return model.eval(), recipe


def _take_teacher(model: PretrainModel, name: str) -> None:
    """Give every trained module that has a teacher its teacher's weights."""
    if model.teacher is None:
        raise UserError(
            f"{name} was trained without a teacher; leave out --weights teacher (the algorithm "
            "ema_teacher keeps one)"
        )
    for student, teacher in model.pairs:
        student.load_state_dict(teacher.state_dict())
