"""The content of a checkpoint, read from the bytes of its files and checked; nothing is executed.

The ``.metadata`` of torch's distributed checkpoint is a pickle, which torch's own reader executes.
Here it makes records of what describes tensors, which do nothing (see ``torch_file.py``).

A hash shows only that a file is complete. Content that training does not write is found here, while
an older checkpoint can still replace this one, not later in a library. Numpy, for example, would
read memory at any address that a state names.
"""

import io
import math
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import Timestamp
from torch import Tensor

from pospre.errors import UserError
from pospre.run.checkpoints import torch_file
from pospre.run.checkpoints.files import METADATA, REST, DamagedCheckpoint, verify
from pospre.run.checkpoints.records import Records, record_kind

_LIST = 1 << 12  # bytes at the end of a file in which the list of its records is
_HEADER = 30  # bytes before the names of a record, whose lengths are the last four
_METADATA = "torch.distributed.checkpoint.metadata."
_KINDS: dict[str, type] = {
    name: record_kind(name)
    for name in (
        *(
            _METADATA + kind
            for kind in (
                "Metadata",
                "MetadataIndex",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        "torch.distributed.checkpoint.filesystem._StorageInfo",
        "torch.Size",
        "torch.serialization._get_layout",
    )
}
_SECTIONS = ("data", "encoder", "algorithms", "trainer")
_WORDS = 624  # of numpy's random state, a Mersenne twister


def assemble(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the whole content of a checkpoint, on the CPU.

    ``files`` are the manifest, and every file that it lists. ``DamagedCheckpoint`` if a file
    differs from what was written, or holds more than plain data; ``UserError`` if it is no
    checkpoint of this package.
    """
    verify(files, name)
    content = _rest(files[REST], f"{name}/{REST}")
    try:
        for key, tensor in load_tensors(files).items():
            *path, last = key.split("/")
            place = content["state"]
            for step in path:
                place = place.setdefault(step, {})
            place[last] = tensor
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{name} is damaged, or its {METADATA} holds more than descriptions of "
            "tensors (nothing in it was executed)"
        ) from error
    return content


def _rest(data: bytes, name: str) -> dict[str, Any]:
    """Return everything but the tensors of the model and the optimiser."""
    try:
        content = torch_file.load(io.BytesIO(data))
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(
            f"{name} is not part of a checkpoint of pospre.train: it holds more than plain data "
            f"and tensors ({error}; nothing in it was executed)"
        ) from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{name} is damaged ({error})") from error
    if not isinstance(content, dict) or "RecipeRecord" not in callback_states(content):
        raise UserError(f"{name} is not part of a checkpoint of pospre.train: no recipe")
    return content


def callback_states(content: dict[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks in a checkpoint's content."""
    state = content.get("state")
    return state.get("callbacks", {}) if isinstance(state, dict) else {}


def load_tensors(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return the tensors of all ranks' files, whole, on the CPU; nothing is ever executed.

    Raises:
        ValueError: the files are no such checkpoint.
    """
    try:
        return _load(files)
    except Exception as error:  # a dozen kinds, of whatever damaged files lead to
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _load(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    described = Records(io.BytesIO(files[METADATA]), _KINDS).load().state
    tensors: dict[str, Tensor] = {}
    missing: dict[str, int] = {}
    kinds = described["state_dict_metadata"]
    for key, entry in kinds.items():
        missing[key] = math.prod(_numbers(entry.state["size"])) * _dtype(entry).itemsize
    if sum(missing.values()) > sum(map(len, files.values())):
        raise ValueError("it describes more data than it holds")
    for index, info in described["storage_data"].items():
        key, start = index.state["fqn"], _numbers(index.state["offset"])
        name, place, length = (info.state[k] for k in ("relative_path", "offset", "length"))
        chunks = (chunk.state for chunk in kinds[key].state["chunks"])
        shape = next(_numbers(c["sizes"]) for c in chunks if _numbers(c["offsets"]) == start)
        part = _tensor(memoryview(files[name])[place : place + length], _dtype(kinds[key]), shape)
        missing[key] -= part.nbytes
        size = _numbers(kinds[key].state["size"])
        if shape == size:
            tensors[key] = part
            continue
        if key not in tensors:
            tensors[key] = torch.zeros(size, dtype=part.dtype)
        target = tensors[key]
        for axis, begin in enumerate(start):
            target = target.narrow(axis, begin, shape[axis])
        target.copy_(part)
    if any(missing.values()):
        raise ValueError("parts are missing")
    return tensors


def _tensor(file: memoryview, dtype: torch.dtype, shape: list[int]) -> Tensor:
    """Return the tensor in a file of ``torch.save``, contiguous there, without a second copy.

    The file is a zip that holds the values as they are. Its list of records is at the end. The
    places in that list are relative to what zipfile is given of the file.
    """
    end = file[-_LIST:]
    with zipfile.ZipFile(io.BytesIO(end)) as archive:
        record = next(each for each in archive.infolist() if each.filename.endswith("/data/0"))
    place = record.header_offset + len(file) - len(end)
    start = place + _HEADER + sum(struct.unpack_from("<HH", file, place + _HEADER - 4))
    values = file[start : start + record.file_size]
    if len(values) != math.prod(shape) * dtype.itemsize:
        raise ValueError("a tensor has another size than described")
    tensor = torch.empty(shape, dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy()[:] = values
    return tensor


def _dtype(entry: Any) -> torch.dtype:
    dtype: torch.dtype = entry.state["properties"].state[0]
    return dtype


def _numbers(size: Any) -> list[int]:
    """Return the numbers of a ``torch.Size``."""
    if not all(type(number) is int and number >= 0 for number in size.args[0]):
        raise ValueError("a size is not valid")
    return list(size.args[0])


def check_state(content: dict[str, Any], name: str) -> None:
    """Raise ``DamagedCheckpoint`` if a part of the content is not what training writes."""
    state = content["state"]
    checks: list[tuple[str, Callable[[Any], bool], Any]] = [
        ("recipe", _is_record, callback_states(content)["RecipeRecord"]),
        ("model", _is_model, state.get("model", {})),
        ("timestamp", _is_clock, state.get("timestamp", {"Timestamp": Timestamp().state_dict()})),
        ("schedulers", _are_schedules, state.get("schedulers", {})),
        ("rng", _are_random, content.get("rng", [])),
    ]
    for part, is_sound, value in checks:
        try:
            is_odd = not is_sound(value)
        except Exception:  # whatever comes of a key that lacks, or of another kind
            is_odd = True
        if is_odd:
            raise DamagedCheckpoint(f"no run can resume from {name}: its '{part}' is not valid")


def _is_record(record: Any) -> bool:
    recipe = record["recipe"]
    is_length = isinstance(recipe["trainer"]["max_duration"], str)
    hashes = [record["data"], record["fingerprints"]]
    is_whole = record.keys() == {"recipe", "num_samples", "data", "fingerprints", "classes"}
    return (
        is_whole
        and all(isinstance(recipe[key], dict) for key in _SECTIONS)
        and (
            is_length
            and type(record["num_samples"]) is int
            and all(
                type(what) is type(value) is str for each in hashes for what, value in each.items()
            )
            and isinstance(record["classes"], list | None)
            and all(type(name) is str for name in record["classes"] or [])
        )
    )


def _is_model(tensors: Any) -> bool:
    return all(type(key) is str and isinstance(each, Tensor) for key, each in tensors.items())


def _is_clock(clock: Any) -> bool:
    usual, found = Timestamp().state_dict(), clock["Timestamp"]
    return found.keys() == usual.keys() and all(
        type(value) is type(usual[key]) and value >= usual[key] for key, value in found.items()
    )


def _are_schedules(schedules: Any) -> bool:
    return all(
        type(each[key]) is int and each[key] >= 0
        for each in schedules.values()
        for key in ("last_epoch", "_step_count")
    ) and all(math.isfinite(rate) for each in schedules.values() for rate in each["_last_lr"])


def _are_random(ranks: Any) -> bool:
    for state in ranks:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        name, words, place, has_gauss, gauss = state["numpy"]
        if name != "MT19937" or len(words) != _WORDS or place not in range(_WORDS + 1):
            return False
        if not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
            return False
        if has_gauss not in (0, 1) or not isinstance(gauss, float):
            return False
        if not isinstance(state.get("cuda", state["torch"]), Tensor):
            return False
    return isinstance(ranks, list)
