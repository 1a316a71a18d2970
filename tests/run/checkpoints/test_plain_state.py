"""States as JSON and tensors: each value comes back as it was, and nothing else comes of a file."""

import datetime
import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer.utils import reproducibility
from safetensors.torch import load_file
from torch import Tensor

from pospre.run.checkpoints.files import DamagedCheckpoint, HashedFile
from pospre.run.checkpoints.plain_state import Plain, restored
from pospre.run.checkpoints.rank_files import write_tensors
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.run.checkpoints.saver import plain_random
from tests.run.checkpoints.checkpoint_files import CONTENT, forge, holding, shard, write_checkpoint

NUMBERS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
KINDS = (*NUMBERS, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn)
MODEL = {
    **{str(kind): torch.ones(3, dtype=kind) for kind in KINDS},
    "transposed": torch.randn(4, 3).t(),
    "part": torch.randn(5, 6)[1:, 2:],
    "scalar": torch.tensor(-0.0),
    "empty": torch.zeros(0, 3),
    "not finite": torch.tensor([math.nan, math.inf]),
}


def test_safetensors_reads_the_tensors_as_we_do(tmp_path: Path) -> None:
    write_checkpoint(holding(MODEL), tmp_path / "ep0-ba2")
    ours = read_checkpoint(str(tmp_path / "ep0-ba2")).content["state"]["model"]
    theirs = load_file(shard(tmp_path / "ep0-ba2"))
    assert ours.keys() == MODEL.keys()
    for key, value in MODEL.items():
        for found in (ours[key], theirs[f"state/model/{key}"]):
            assert found.dtype == value.dtype and found.shape == value.shape, key
            assert repr(found.tolist()) == repr(value.tolist()), key


STATE = {
    "betas": (0.9, 0.95),
    "tuples": ((3, (1, 2), None), [("DropPos", {"repr": "…"})], ()),
    "clock": {"total_wct": datetime.timedelta(3, 4, 5)},
    "floats": [0.1, -0.0, 5e-324, math.inf, (-math.inf,)],
    "whole": [-(1 << 63), (1 << 64) - 1, True, None],
    "text": ["\ud800", 'a/b"', ""],
    "a/b": {"": {}, "c": []},
}


def test_each_value_comes_back_as_it_was() -> None:
    found = restored(Plain(STATE).text(), {})
    assert repr(found) == repr(STATE)  # also the types, their order and the sign of 0
    assert math.isnan(restored(Plain({"a": math.nan}).text(), {})["a"])


@pytest.mark.parametrize("odd", [{1: 0}, {"a": {1}}, {"a": b"a"}, {"a": np.int64(1)}, [1 << 64]])
def test_what_would_not_come_back_is_not_written(odd: Any) -> None:
    with pytest.raises(AssertionError, match=r"has a key|holds a"):
        Plain({"x": odd})


def test_random_states_come_back(tmp_path: Path) -> None:
    states = reproducibility.get_rng_state()
    write_checkpoint({**CONTENT, "rng": plain_random(states)}, tmp_path / "ep0-ba1")
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    reproducibility.load_rng_state(read_checkpoint(str(tmp_path / "ep0-ba1")).content["rng"])
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == drawn


def split(*shards: tuple[list[int], list[int]], shape: Any = (4, 3)) -> dict[str, Any]:
    """Return the description of a tensor whose shards each have a file of their own."""
    listed = [{"file": f"{n}", "offset": at, "size": size} for n, (at, size) in enumerate(shards)]
    return {"shape": list(shape), "shards": listed}


def joined(described: Any, files: dict[str, Tensor]) -> Any:
    text = json.dumps({"content": {"a": described}, "types": [[["a"], "tensor"]]}).encode()
    return restored(text, {name: {"a": tensor} for name, tensor in files.items()})["a"]


def test_shards_become_the_tensor() -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    files = {"0": whole[:3, :2].clone(), "1": whole[3:, :2].clone(), "2": whole[:, 2:].clone()}
    described = split(([0, 0], [3, 2]), ([3, 0], [1, 2]), ([0, 2], [4, 1]))
    assert torch.equal(joined(described, files), whole)


HALVES = {"0": torch.ones(2, 3), "1": torch.ones(2, 3)}
AT_0, AT_2 = ([0, 0], [2, 3]), ([2, 0], [2, 3])
TWICE = {"shape": [4, 3], "shards": [{"file": "0", "offset": [0, 0], "size": [2, 3]}] * 2}


@pytest.mark.parametrize(
    ("described", "files"),
    [
        (TWICE, HALVES),  # one shard for two
        (split(AT_0, AT_2, shape=(1 << 40, 3)), HALVES),
        (split(AT_0, AT_2, shape=(-4, -3)), HALVES),
        (split(AT_0, AT_2, shape=(12,)), HALVES),
        (split(AT_0, shape=(4, 3)), HALVES),
        (split(AT_0, ([3, 0], [2, 3])), HALVES),
        (split(AT_0, ([-1, 0], [2, 3])), HALVES),
        (split(AT_0, ([2], [2, 3])), HALVES),
        (split(AT_0, ([2, 0], [3, 2])), HALVES),
        (split(AT_0, AT_2), {"0": torch.ones(2, 3), "1": torch.ones(2, 3, dtype=torch.int64)}),
        (split(AT_0, AT_2), {"0": torch.ones(2, 3)}),
        (split(shape=(0,)), {}),
        ([1], {}),
    ],
)
def test_a_tensor_that_is_not_as_described_is_refused(
    described: Any, files: dict[str, Tensor]
) -> None:
    with pytest.raises((ValueError, LookupError, TypeError, RuntimeError)):
        joined(described, files)


@pytest.mark.parametrize(
    "types",
    [
        5,
        [[[], "tuple"]],
        [[["b"], "tuple"]],
        [[["a", 9], "tuple"]],
        [[["a"], "eval"]],
        [[["a", 0], "tuple"]],
        [[["a"], "timedelta"]],
        [[["a"], "float"]],
        [[["t", 0], "float"]],
        [[["a"], "tuple"], [["a", 0], "float"]],
        [[[{}], "tuple"]],
    ],
)
def test_odd_types_are_refused(types: Any) -> None:
    noted = {"content": {"a": ["x", 1], "t": "inf"}, "types": types}
    with pytest.raises((ValueError, LookupError, TypeError)):
        restored(json.dumps(noted).encode(), {})


def renamed(content: bytes) -> bytes:
    return content.replace(b"state/model/a", b"state/model/b")


@pytest.mark.parametrize(
    "spoil", [renamed, lambda content: content[:-1], lambda content: b"", lambda content: b"\0" * 9]
)
def test_other_files_of_tensors_are_refused(
    spoil: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    write_checkpoint(holding({"a": torch.ones(3)}), tmp_path / "ep0-ba2")
    path = shard(tmp_path / "ep0-ba2")
    forge(tmp_path / "ep0-ba2", path.name, spoil(path.read_bytes()))
    with pytest.raises(DamagedCheckpoint, match="ep0-ba2 is damaged: its content is not valid"):
        read_checkpoint(str(tmp_path / "ep0-ba2"))


def test_tensors_are_written_aligned() -> None:
    file = HashedFile(io.BytesIO())
    write_tensors(file, {"a": torch.ones(1, dtype=torch.int8), "b": torch.ones(1).double()})
    content = file.file.getvalue()  # type: ignore[attr-defined]
    start = 8 + int.from_bytes(content[:8], "little")
    places = {key: at["data_offsets"][0] for key, at in json.loads(content[8:start]).items()}
    assert start % 8 == 0 and places == {"b": 0, "a": 8}
