"""The encoder in a weights file or a checkpoint, with timm's names; nothing is executed."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pospre.errors import UserError
from pospre.nn.encoder_options import Positions
from pospre.nn.positions.foreign import turns, without_empty_table
from pospre.nn.positions.scheme import Resampling
from pospre.nn.weight_layouts import POSITIONS, check_positions, split_address, timm_names
from pospre.nn.weight_names import timm_name
from pospre.object_store import Bucket, is_remote
from pospre.run.checkpoints import torch_file
from pospre.run.checkpoints.reading import open_checkpoint
from pospre.run.resume import recorded
from pospre.training.build import Weights
from pospre.untrusted_json import parse_object

EXPORTED = (".safetensors", ".pth", ".pth.tar", ".pt", ".bin")
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PREFIX = {"student": "encoder.", "teacher": "teacher.module."}


class Keys(NamedTuple):
    """Names in errors of the options that give a file and choose its encoder."""

    weights: str
    which: str


@dataclass(frozen=True)
class Source:
    """Encoder tensors under timm's names."""

    name: str  # of the source
    tensors: dict[str, Tensor]  # by timm's names
    keys: Keys  # for errors
    positions: Positions | None = None  # as in a recipe, if known
    # whether they are a run's, with rotary ones in our layout; otherwise the publisher's
    is_run: bool = False
    # names of the file's tensors that are not an encoder's
    left_out: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)  # of a .safetensors file
    resampling: Resampling | None = None  # of its positions to another grid, see nn.weight_layouts

    @property
    def named(self) -> str:
        """Its name in errors."""
        return f"{self.keys.weights}{self.name}"


def is_weights_file(uri: str) -> bool:
    """Return whether ``uri`` is a file of weights, with or without ``,positions=…``."""
    return uri.partition(POSITIONS)[0].endswith(EXPORTED)


def read_source(
    uri: str, which: Weights, keys: Keys, *, otherwise: Positions | None = None
) -> Source:
    """Return the encoder tensors at ``uri``: a checkpoint, a folder of them, or a file of weights.

    ``,positions=SCHEME`` after it gives its positions, and ``otherwise`` is for files without, if
    no tensor shows them. ``which`` is the encoder of a file with several. ``UserError`` if it is
    missing or damaged, has no teacher, or has values that are not finite or not floats.
    """
    if is_weights_file(uri):
        source = _read_file(uri, which, keys, otherwise)
    else:
        source = _read_run(uri, which, keys)
    for key, tensor in source.tensors.items():
        if tensor.dtype not in _NUMBERS and tensor.dim():  # batch norms count in a scalar
            kind = str(tensor.dtype).removeprefix("torch.")
            raise UserError(
                f"{source.named}: tensor '{key}' holds {kind}, but weights must be float16, "
                "bfloat16, float32 or float64. Quantised weights are useless without their "
                "scales: save the encoder in float32."
            )
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{source.name}: tensor '{key}' holds values that are not finite")
    return source


def _read_run(uri: str, which: Weights, keys: Keys) -> Source:
    checkpoint = open_checkpoint(uri)
    uri, content = checkpoint.uri, checkpoint.content
    tensors = content["state"]["model"]
    start = _PREFIX[which]
    own = {
        timm_name(key[len(start) :]): value
        for key, value in tensors.items()
        if key.startswith(start)
    }
    if not own:
        raise UserError(
            f"{keys.which} = {which}, but {uri} was trained without a teacher; use student"
        )
    recipe: dict[str, Any] = recorded(content).recipe
    positions = recipe["encoder"].get("positions")
    return Source(f"{uri} ({which})", own, keys, positions, is_run=True)


def _read_file(uri: str, which: Weights, keys: Keys, otherwise: Positions | None) -> Source:
    """Return the encoder in a file of weights; see ``nn.weight_layouts`` and ``read_source``."""
    uri, told = split_address(uri)
    with _local_copy(uri) as path:
        if not path.is_file():
            raise UserError(
                f"{keys.weights}{uri} does not exist. Give a weight file, a run or a checkpoint."
            )
        content, metadata = _load(path, uri)
    found = timm_names(content, uri, which, keys.which)
    own = recipe_in(metadata)  # of an export of ours
    noted = otherwise if own is None else own["encoder"].get("positions")
    if noted is not None and not turns(noted):  # of others the tensors tell
        noted = None
    positions = check_positions(
        found.tensors, f"{keys.weights}{uri}", found.positions or noted, told
    )
    tensors = without_empty_table(found.tensors)
    name = f"{uri} ({found.origin})" if found.origin else uri
    how = metadata.get("resampling")  # our exports may be of weights of others
    resampling = next((each for each in get_args(Resampling) if each == how), found.resampling)
    return Source(name, tensors, keys, positions, False, found.left_out, metadata, resampling)


@contextlib.contextmanager
def _local_copy(uri: str) -> Iterator[Path]:
    """Yield the file at ``uri`` as a local path; a download is deleted afterwards."""
    if not is_remote(uri):
        yield Path(uri)
        return
    with tempfile.TemporaryDirectory(prefix="pospre-") as folder:
        target = Path(folder) / uri.rpartition("/")[2]
        with Bucket(uri) as bucket, target.open("wb") as file:
            bucket.download(file)
        yield target


def _load(path: Path, name: str) -> tuple[Any, dict[str, str]]:
    """Return the content of a file of tensors, and the texts of a ``.safetensors`` header."""
    try:
        with path.open("rb") as file:
            _refuse_text(file.read(256).lstrip(), name)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                return tensors, dict(file.metadata() or {})
        with path.open("rb") as file:
            return torch_file.load(file), {}
    except UserError:  # which is a ValueError
        raise
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{name} is damaged, or not a .safetensors file ({error})") from error
    except (ValueError, UnpicklingError) as error:
        raise UserError(
            f"{name} is damaged, or holds more than tensors, which could be code ({error}): "
            "nothing of it was loaded or run. Use a .safetensors file, or a .pth of a plain dict "
            "of tensors."
        ) from error


def _refuse_text(start: bytes, name: str) -> None:
    """Raise ``UserError`` if a download is text instead of weights."""
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{name} is a Git LFS pointer; `git lfs pull` fetches the weights.")
    if start[:1] == b"<":
        raise UserError(
            f"{name} is a web page, not weights. The site probably wants a login: log in, accept "
            "the licence (DINOv3's weights are gated), and download the file again."
        )


def recipe_in(metadata: dict[str, str]) -> dict[str, Any] | None:
    """Return the recipe recorded in our export; None for other files."""
    try:
        recipe: dict[str, Any] = parse_object(metadata["recipe"])
        return recipe if isinstance(recipe["encoder"], dict) else None
    except (KeyError, ValueError):
        return None
