"""A state of training as JSON and tensors, and back; ``files.py`` has the format.

Nothing in a checkpoint can be executed: JSON has values only, and each type that JSON lacks is
restored by a function of this module.
"""

import datetime
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pospre.untrusted_json import INTEGERS, parse_object

_TENSOR = "tensor"


class Plain:
    """A state without its tensors, and the descriptions of these.

    Attributes:
        tensors: the tensors of the state by name: its path, joined by ``/``.
        described: for each of them its entry in the JSON, to which shards are added.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self._types: list[tuple[list[str | int], str]] = []
        self._content = self._plain(content, [])

    def text(self) -> bytes:
        """Return the JSON."""
        noted = {"content": self._content, "types": self._types}
        return json.dumps(noted, allow_nan=False).encode()

    def _plain(self, value: Any, path: list[str | int]) -> Any:
        """Return a value as JSON has it; note its type if JSON lacks it, inner ones first."""
        if isinstance(value, dict):
            assert all(isinstance(key, str) for key in value), f"{path} has a key that is no text"
            return {key: self._plain(item, [*path, key]) for key, item in value.items()}
        if isinstance(value, list | tuple):
            items = [self._plain(item, [*path, index]) for index, item in enumerate(value)]
            return items if isinstance(value, list) else self._typed("tuple", path, items)
        if isinstance(value, Tensor):
            return self._typed(_TENSOR, path, self._described(value, "/".join(map(str, path))))
        if isinstance(value, datetime.timedelta):
            parts = [value.days, value.seconds, value.microseconds]
            return self._typed("timedelta", path, parts)
        if isinstance(value, float) and not math.isfinite(value):
            return self._typed("float", path, str(value))
        is_whole = isinstance(value, int) and value in INTEGERS
        is_plain = is_whole or value is None or isinstance(value, str | float)
        assert is_plain, f"{path} holds a {type(value).__name__}"
        return value

    def _typed(self, kind: str, path: list[str | int], value: Any) -> Any:
        self._types.append((path, kind))
        return value

    def _described(self, tensor: Tensor, name: str) -> dict[str, Any]:
        assert name not in self.tensors, f"two tensors are {name}"
        self.tensors[name] = tensor
        self.described[name] = {"shape": list(tensor.shape), "shards": []}
        return self.described[name]


def restored(text: bytes, files: Mapping[str, dict[str, Tensor]]) -> dict[str, Any]:
    """Return the content of a checkpoint from its JSON and the tensors of its files.

    Each shard is taken out of ``files``, so that no tensor can claim more than the files hold.

    Raises:
        Exception: of a dozen kinds, if something in it is not as this module writes it.
    """
    noted = parse_object(text)
    for path, kind in noted["types"]:
        *steps, last = path
        parent = noted["content"]
        for step in steps:
            parent = parent[step]
        if type(parent) not in (dict, list):
            raise ValueError(f"{path} is in no dict or list")
        if kind == _TENSOR:
            parent[last] = _joined("/".join(map(str, path)), parent[last], files)
        else:
            parent[last] = _TYPES[kind](parent[last])
    return noted["content"]


def _joined(name: str, described: dict[str, Any], files: Mapping[str, dict[str, Tensor]]) -> Tensor:
    """Return a whole tensor, joined from its shards."""
    shape, shards = described["shape"], described["shards"]
    parts = [files[shard["file"]].pop(name) for shard in shards]
    first = parts[0]
    for part, shard in zip(parts, shards, strict=True):
        if part.dtype != first.dtype or list(part.shape) != shard["size"]:
            raise ValueError(f"{name} is not as described")
    # the parts are in memory, so a whole one of their size is no larger than the files
    if len(shape) != first.dim() or math.prod(shape) != sum(part.numel() for part in parts):
        raise ValueError(f"{name} is not as large as its shards")
    if len(parts) == 1 and not any(shards[0]["offset"]):
        return first
    whole = torch.zeros(shape, dtype=first.dtype)
    while parts:
        part, offset = parts.pop(), shards[len(parts)]["offset"]
        target = whole
        for axis, (begin, length) in enumerate(zip(offset, part.shape, strict=True)):
            target = target.narrow(axis, begin, length)
        target.copy_(part)
    return whole


def _tuple(value: Any) -> tuple[Any, ...]:
    if type(value) is not list:
        raise ValueError("a tuple must be a list")
    return tuple(value)


def _timedelta(value: Any) -> datetime.timedelta:
    days, seconds, microseconds = value
    return datetime.timedelta(days, seconds, microseconds)


def _float(value: Any) -> float:
    if value not in ("nan", "inf", "-inf"):
        raise ValueError("it must be nan, inf or -inf")
    return float(value)


_TYPES: dict[str, Callable[[Any], Any]] = {
    "tuple": _tuple,
    "timedelta": _timedelta,
    "float": _float,
}
