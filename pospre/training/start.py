"""Starting an encoder from weights that another training left behind.

Every tensor of the encoder is taken from the file, or may be fresh and is named; nothing stays
random without a word. Only positions may be fresh, when the file has none of their kind.
"""

import contextlib
import json
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pospre.errors import UserError
from pospre.model.algorithm import algorithm_class
from pospre.model.model import PretrainModel
from pospre.model.teacher import follow
from pospre.nn.encoder import Encoder
from pospre.nn.patch_encoder import PatchEncoder
from pospre.nn.positions import resample_positions
from pospre.nn.swin.encoder import SwinEncoder
from pospre.object_store import Bucket, is_remote
from pospre.recipe.recipe import recorded_recipe
from pospre.training.checkpoints.content import Weights, model_of, recorded
from pospre.training.checkpoints.reading import open_checkpoint

EXPORTED = (".safetensors", ".pth", ".bin")
_PREFIX = {"student": "encoder.", "teacher": "teacher.module."}
_TABLE = "relative_position_bias_table"
_SHARED = f"shared_rel_pos.{_TABLE}"


class Source(NamedTuple):
    """Encoder tensors under timm's names, and the kind of positions where known."""

    name: str
    tensors: dict[str, Tensor]
    positions: str | None = None


def load_weights(model: PretrainModel, uri: str, which: Weights = "student") -> str:
    """Load an encoder's weights into ``model`` and into the teachers that follow it.

    Args:
        model: with its algorithms attached.
        uri: checkpoint, folder of them or run folder, or an exported ``.safetensors`` or ``.pth``
            (also MAE's published ones); local or S3.
        which: the encoder of a checkpoint.

    Returns:
        One line that says what was loaded, what is fresh and what was not used.

    Raises:
        UserError: the file cannot be read, or does not fit; the first such tensor is named.
    """
    source = read_source(uri, which, model.encoder.grid)
    _check_kind(model.encoder, source)
    expected = model.encoder.state_dict()
    loaded, fresh = {}, []
    for key, own in expected.items():
        found = _matching(key, own, model.encoder, source)
        if found is None:
            fresh.append(key)
        else:
            loaded[key] = found.to(own.dtype)
    if model.position_source is not None:
        fresh.append(f"the positions of {model.position_source}")
    unused = [key for key in source.tensors if key not in expected and key != _SHARED]
    _check_unused(unused, source)
    model.encoder.load_state_dict(loaded, strict=False)
    follow(model.teachers.pairs, 0.0)
    parts = [f"encoder: {len(loaded)} of {len(expected)} tensors from {source.name}"]
    for title, keys in (("fresh", fresh), ("not used", unused)):
        if keys:
            parts.append(f"{title}: {_listed(keys)}")
    return "; ".join(parts)


def read_source(uri: str, which: Weights, grid: tuple[int, int]) -> Source:
    """Return the encoder tensors at ``uri``; nothing in the file is ever executed.

    ``grid`` is of the positions wanted, where they come from a field instead of a table.

    Raises:
        UserError: missing, damaged, without a teacher, or with values that are not finite.
    """
    exported = uri.endswith(EXPORTED)
    if exported and which == "teacher":
        raise UserError(f"encoder.weights_from = teacher, but {uri} holds one encoder; use student")
    source = _read_export(uri) if exported else _read_run(uri, which, grid)
    for key, tensor in source.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise UserError(f"{source.name}: tensor '{key}' holds values that are not finite")
    return source


def _read_run(uri: str, which: Weights, grid: tuple[int, int]) -> Source:
    checkpoint = open_checkpoint(uri)
    uri, content = checkpoint.uri, checkpoint.content
    tensors = content["state"]["model"]
    start = _PREFIX[which]
    own = {key[len(start) :]: value for key, value in tensors.items() if key.startswith(start)}
    if not own:
        raise UserError(
            f"encoder.weights_from = {which}, but {uri} was trained without a teacher; use student"
        )
    recipe: dict[str, Any] = recorded(content)[0]
    positions = recipe["encoder"].get("positions")
    if any(algorithm_class(name).gives_positions for name in recipe["algorithms"]):
        model = model_of(checkpoint, weights=which)[0]  # the encoder's own table holds nothing
        assert model.position_source is not None
        own["pos_embed"] = model.position_table(grid)
        if list(model.positions.named[model.position_source].parameters()):
            positions = "learned"
    return Source(f"{uri} ({which})", own, positions)


def _read_export(uri: str) -> Source:
    with _local_copy(uri) as path:
        if not path.is_file():
            raise UserError(f"encoder.weights = {uri} does not exist")
        tensors = _load(path, uri)
    tensors = tensors.get("model", tensors) if isinstance(tensors, dict) else None
    if not isinstance(tensors, dict) or "patch_embed.proj.weight" not in tensors:
        raise UserError(f"{uri} holds no Vision Transformer under timm's names")
    return Source(uri, {key: value for key, value in tensors.items() if _of_encoder(key, value)})


@contextlib.contextmanager
def _local_copy(uri: str) -> Iterator[Path]:
    """Give the file at ``uri`` as a local path; a download is deleted afterwards."""
    if not is_remote(uri):
        yield Path(uri)
        return
    with tempfile.TemporaryDirectory(prefix="pospre-") as folder:
        target = Path(folder) / uri.rpartition("/")[2]
        with Bucket(uri) as bucket, target.open("wb") as file:
            bucket.download(file)
        yield target


def _load(path: Path, name: str) -> Any:
    """Return what a file of tensors holds. What torch says of others is not repeated.

    It advises to load them with code execution allowed.
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with warnings.catch_warnings(action="ignore"):  # about pickles that it refuses
            return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise UserError(f"{name} is damaged, or no .safetensors file ({error})") from error
    except Exception as error:  # pickle.UnpicklingError, and a dozen kinds for damaged files
        raise UserError(
            f"{name} is damaged, or holds more than tensors, which could be code: nothing of it "
            "was loaded or run. Use a .safetensors file, or a .pth of a plain dict of tensors."
        ) from error


def refuse_export(uri: str) -> None:
    """Raise a ``UserError`` for an exported encoder where a checkpoint is wanted."""
    if not uri.endswith(".safetensors"):
        return
    try:
        with safe_open(uri, "pt") as file:
            recipe = recorded_recipe(json.loads(file.metadata()["recipe"]))
        origin = f": {recipe.run_path()}"
    except Exception:  # remote, or not ours: then nobody knows
        origin = ""
    raise UserError(
        f"{uri} is an exported encoder, without the heads and the recipe of a checkpoint; give the "
        f"checkpoint or run folder that it was exported from{origin}"
    )


def _of_encoder(key: str, value: Any) -> bool:
    """Return whether an entry of a file is a tensor of an encoder or of a classifier on it.

    MAE saved its decoder along. An encoder without positions is exported with a table of zeros.
    """
    if not isinstance(value, Tensor) or key.startswith(("decoder", "mask_token")):
        return False
    return key != "pos_embed" or bool(value.any())


def _check_kind(encoder: PatchEncoder, source: Source) -> None:
    tables = any(key.endswith(f"attn.{_TABLE}") for key in source.tensors)
    if tables and isinstance(encoder, SwinEncoder):
        raise UserError(
            f"encoder.weights = {source.name} holds Swin's attention bias as tables of one window; "
            "the network that gives it for any window is in the run: use its folder or a "
            "checkpoint."
        )
    learned = source.positions in ("learned", "learned_sincos")
    if encoder.position_kind == "sincos" and learned:
        raise UserError(
            f"encoder.positions = sincos is a fixed table, but {source.name} has learned its own; "
            "use encoder.positions=learned"
        )


def _matching(key: str, own: Tensor, encoder: Encoder, source: Source) -> Tensor | None:
    """Return the source's tensor for ``key``; None where a fresh one is allowed."""
    found = source.tensors.get(key)
    if found is None and key.endswith(f"rel_pos.{_TABLE}"):
        found = source.tensors.get(_SHARED)  # SimMIM's fine-tuning: a copy for every block
        if found is None:
            return None
    if found is None and key == "pos_embed":
        return None
    if found is None:
        raise UserError(f"encoder.weights = {source.name} lacks the tensor '{key}'")
    if key == "pos_embed" and found.shape != own.shape:
        return _resampled(found, own, encoder, source)
    if found.shape != own.shape:
        raise UserError(
            f"encoder.weights = {source.name}: tensor '{key}' has shape {tuple(found.shape)}, the "
            f"recipe's encoder wants {tuple(own.shape)}"
        )
    return found


def _resampled(found: Tensor, own: Tensor, encoder: Encoder, source: Source) -> Tensor:
    """Return the position table of another grid at the encoder's."""
    prefix = encoder.num_prefix_tokens
    count = found.shape[1] - prefix
    side = round(max(count, 0) ** 0.5)
    if found.shape[-1] != own.shape[-1] or side * side != count:
        raise UserError(
            f"encoder.weights = {source.name}: tensor 'pos_embed' has shape {tuple(found.shape)}, "
            f"the recipe's encoder wants {tuple(own.shape)}; only square grids are resampled"
        )
    patches = resample_positions(found[0, prefix:], (side, side), encoder.grid)
    return torch.cat([found[0, :prefix], patches])[None]


def _check_unused(unused: list[str], source: Source) -> None:
    """Raise a ``UserError`` if the file has a part of an encoder that this one lacks."""
    allowed = ("pos_embed", "norm.", "fc_norm.", "head.", "shared_rel_pos.")
    for key in unused:
        if not key.startswith(allowed) and not key.endswith(f"rel_pos.{_TABLE}"):
            raise UserError(
                f"encoder.weights = {source.name}: its tensor '{key}' is not in the recipe's "
                "encoder; compare name, depth, class_token, num_registers and layer_scale"
            )


def _listed(keys: list[str]) -> str:
    return ", ".join(keys) if len(keys) < 5 else f"{keys[0]} … {keys[-1]} ({len(keys)})"
