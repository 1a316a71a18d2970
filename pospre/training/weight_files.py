"""The encoder in a weights file or a checkpoint, with timm's names; nothing is executed."""

import contextlib
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pospre.arguments import check_arguments
from pospre.command_line import weights_hint
from pospre.errors import UserError
from pospre.nn.encoder_options import Positions
from pospre.nn.lora import merged_state
from pospre.nn.lora_options import LoraOptions
from pospre.nn.positions.fading import settled
from pospre.nn.positions.file_tables import without_empty
from pospre.nn.positions.foreign import turns
from pospre.nn.weights.address import DROP, Address, bare_address, split_address
from pospre.nn.weights.layouts import check_positions, position_names, timm_names
from pospre.nn.weights.names import timm_name
from pospre.object_store import Bucket, is_remote
from pospre.run.checkpoints import torch_file
from pospre.run.checkpoints.reading import open_checkpoint
from pospre.run.resume import recorded
from pospre.scratch import scratch
from pospre.training.weight_records import RECORD, Known, Weights, of_export, of_hub, of_run
from pospre.untrusted_json import parse_object

EXPORTED = (".safetensors", ".pth", ".pth.tar", ".pt", ".bin")
_NUMBERS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_PREFIX = {"student": "encoder.", "teacher": "teacher.module."}


class Keys(NamedTuple):
    """Names in errors of the options that give a file, its encoder, and the size of images."""

    weights: str
    which: str
    size: str = "--image-size"


@dataclass(frozen=True)
class Source:
    """Encoder tensors under timm's names, and what is known of them."""

    name: str  # of the source
    tensors: dict[str, Tensor]  # by timm's names
    keys: Keys  # for errors
    known: Known
    # whether they are a run's, with rotary ones in our layout; otherwise the publisher's
    is_run: bool = False
    # names of the file's tensors that are not an encoder's, or that its user leaves out
    left_out: list[str] = field(default_factory=list)
    address: str = ""  # as its user gives it

    @property
    def named(self) -> str:
        """Its name in errors."""
        return f"{self.keys.weights}{self.name}"


def is_weights_file(uri: str) -> bool:
    """Return whether ``uri`` is a file of weights, whatever is said of it after its name.

    A folder of transformers stands for the file in it.
    """
    return _file_of(bare_address(uri)).endswith(EXPORTED)


def _file_of(uri: str) -> str:
    inside = Path(uri) / "model.safetensors"
    return str(inside) if not is_remote(uri) and inside.is_file() else uri


def read_source(
    address: str, which: Weights, keys: Keys, *, otherwise: Positions | None = None
) -> Source:
    """Return the encoder tensors at an address: a checkpoint, a folder of them, or a file.

    ``address`` may say more of them, see ``split_address``. ``otherwise`` are the positions of
    files without, if no tensor shows them. ``which`` is the encoder of a file with several.
    ``UserError`` if it is missing or damaged, has no teacher, has values that are not finite or not
    floats, or is not what is said of it.
    """
    said = split_address(address)
    said = said._replace(uri=_file_of(said.uri))
    if is_weights_file(said.uri):
        source = _read_file(said, which, keys, otherwise)
    else:
        if not os.path.lexists(said.uri) and not is_remote(said.uri):
            raise UserError(
                f"{keys.weights}{said.uri} does not exist. Give a file of weights, a run or a "
                f"checkpoint{weights_hint(said.uri)}."
            )
        source = _read_run(said.uri, which, keys)
    source = _with_said(source, said)
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


def _with_said(source: Source, said: Address) -> Source:
    """Return a source with what its user says of it; ``UserError`` if it is known otherwise."""
    known, dropped = source.known, []
    if said.positions == DROP:
        dropped = position_names(source.tensors)
        said, known = said._replace(positions=None), replace(known, positions="none")
    for key, value in said._asdict().items():
        own = getattr(known, key, None)
        if value is not None and key != "uri" and own not in (None, value):
            raise UserError(f"{source.named} has {key} = {own}; leave ',{key}=…' out.")
    known = replace(known, grid=said.grid or known.grid, heads=said.heads or known.heads)
    return replace(
        source,
        address=said.uri,
        tensors={key: each for key, each in source.tensors.items() if key not in dropped},
        known=known,
        left_out=[*source.left_out, *dropped],
    )


def _read_run(uri: str, which: Weights, keys: Keys) -> Source:
    checkpoint = open_checkpoint(uri)
    uri, content = checkpoint.uri, checkpoint.content
    tensors, recipe = content["state"]["model"], recorded(content).recipe
    if recipe.get("lora") is not None:
        given = check_arguments("lora", LoraOptions, recipe["lora"], f"recipe in {uri}")
        tensors = merged_state(tensors, LoraOptions(**given), uri)
    if recipe["encoder"].get("fades_from") is not None:
        left = settled(tensors)
        if left is None:
            raise UserError(
                f"{keys.weights}{uri} has positions that still fade. Train it to the half of its "
                "trainer.max_duration, or give a later checkpoint."
            )
        tensors = left
        recipe = {**recipe, "encoder": {**recipe["encoder"], "fades_from": None}}
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
    known = of_run(recipe, own, uri)
    pixels = {key: tensors.get(f"augment.{key}") for key in ("mean", "std")}
    numbers = {
        key: tuple(each.flatten().tolist()) for key, each in pixels.items() if each is not None
    }
    known = replace(known, pixels=numbers)
    return Source(f"{uri} ({which})", own, keys, known, is_run=True)


def _read_file(said: Address, which: Weights, keys: Keys, otherwise: Positions | None) -> Source:
    """Return the encoder in a file of weights; see ``nn.weights.layouts`` and ``read_source``."""
    uri = said.uri
    with _local_copy(uri) as path:
        if not path.is_file():
            raise UserError(
                f"{keys.weights}{uri} does not exist. Give a weight file, a run or a checkpoint."
            )
        content, header = _load(path, uri)
    names = timm_names(content, uri, which, keys.which)
    known = of_export(header, uri) or of_hub(uri)
    rotary = otherwise if otherwise is not None and turns(otherwise) else None  # others show
    positions = known.positions or names.positions or rotary
    if said.positions != DROP:
        named = f"{keys.weights}{uri}"
        positions = check_positions(names.tensors, named, positions, said.positions)
    resampling = known.resampling or names.resampling
    known = replace(known, positions=positions, resampling=resampling)
    name = f"{uri} ({names.origin})" if names.origin else uri
    return Source(name, without_empty(names.tensors), keys, known, left_out=names.left_out)


@contextlib.contextmanager
def _local_copy(uri: str) -> Iterator[Path]:
    """Yield the file at ``uri`` as a local path; a download is deleted afterwards."""
    if not is_remote(uri):
        yield Path(uri)
        return
    with scratch() as folder:
        target = folder / uri.rpartition("/")[2]
        with Bucket(uri) as bucket, target.open("wb") as file:
            bucket.download(file)
        yield target


def _load(path: Path, name: str) -> tuple[Any, dict[str, str]]:
    """Return the content of a file of tensors, and the texts recorded beside them."""
    try:
        with path.open("rb") as file:
            _refuse_text(file.read(256).lstrip(), name)
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                return tensors, dict(file.metadata() or {})
        with path.open("rb") as file:
            return torch_file.load(file), _record_in(file)
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


def _record_in(file: BinaryIO) -> dict[str, str]:
    """Return the texts in our record of a ``.pth`` export; none for other files."""
    if not zipfile.is_zipfile(file):
        return {}
    with torch_file.open_archive(file) as archive:
        name = next((name for name in archive.namelist() if name.endswith(f"/{RECORD}")), None)
        texts = {} if name is None else parse_object(archive.read(name))
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _refuse_text(start: bytes, name: str) -> None:
    """Raise ``UserError`` if a download is text instead of weights."""
    if start.startswith(b"version https://git-lfs"):
        raise UserError(f"{name} is a Git LFS pointer; `git lfs pull` fetches the weights.")
    if start[:1] == b"<":
        raise UserError(
            f"{name} is a web page, not weights. The site probably wants a login: log in, accept "
            "the licence (DINOv3's weights are gated), and download the file again."
        )
