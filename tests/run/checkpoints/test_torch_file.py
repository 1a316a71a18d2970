"""Files of torch.save: read as torch reads them, and refused where they claim what is not there."""

import argparse
import datetime
import io
import pickle
import random
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from composer.utils import reproducibility

from pospre.errors import UserError
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.saver import plain_random
from pospre.run.checkpoints.torch_file import load
from pospre.training.weight_files import Keys, read_source
from tests.processes import finished
from tests.run.checkpoints.checkpoint_files import forge, write_checkpoint
from tests.run.checkpoints.hostile import (
    CONTENT,
    Call,
    Global,
    Storage,
    archive,
    pickled,
    tensor,
    with_state,
)
from tests.training.tiny_runs import environment

KINDS = (torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.uint16)
FOUR = bytes(16)  # four numbers of float32


def saved(content: Any, *, is_zip: bool = True) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(content, stream, _use_new_zipfile_serialization=is_zip)
    return stream


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_torch_writes_is_read(is_zip: bool) -> None:
    weights = torch.randn(4, 6)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    noted = torch.nn.Parameter(torch.ones(2))
    noted.origin = "timm"  # type: ignore[attr-defined]
    tensors = {
        "transposed": weights.t(),
        "part": weights[1:, 2:],
        "expanded": torch.ones(1).expand(5, 3),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
        "bool": torch.tensor([True, False]),
        **{str(kind): torch.ones(3, dtype=kind) for kind in KINDS},
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "with attributes": noted,
        **model.state_dict(),
    }
    plain = {
        "words": ["a", 1, 2.5, None, True, (1, -2)],
        "time": datetime.timedelta(3, 4, 5),
        "bytes": b"ab\xff",
        "version": torch.torch_version.TorchVersion("2.7.0"),
        "dtype": torch.float16,
        3: OrderedDict(b=1),
        "arguments": argparse.Namespace(lr=0.1, input=[224]),
    }
    content = {"tensors": tensors, "plain": plain, "again": weights}
    found = load(saved(content, is_zip=is_zip))
    assert found["plain"] == plain | {"arguments": {"lr": 0.1, "input": [224]}}
    assert found["tensors"].keys() == tensors.keys()
    for key, expected in tensors.items():
        assert found["tensors"][key].tolist() == expected.tolist(), key
        assert found["tensors"][key].dtype == expected.dtype, key
        assert found["tensors"][key].stride() == expected.stride(), key
    found["again"][1, 2] = 7.0  # one storage, as it was
    assert found["tensors"]["part"][0, 0] == 7.0


def deep_key() -> bytes:
    """Return a pickle with a tuple of a tuple of … as a key: hashing it ends the process."""
    return b"\x80\x02}(" + b")" + b"\x85" * 300_000 + b"Nu."


HOSTILE = {
    "a record is too short": (
        archive(tensor(Storage(1000), [1000], [1]), {"0": FOUR * 100 + bytes(16 * 200)}),
        "not as large as the pickle claims",
    ),
    "all records are too short": (
        archive(tensor(Storage(1 << 30), [1 << 30], [1]), {"0": FOUR}),
        "storages claim more than",
    ),
    "two storages claim the file twice": (
        archive([Storage(2500, "0"), Storage(2500, "1")], {"0": bytes(10_000)}),
        "storages claim more than",
    ),
    "a tensor reaches beyond": (
        archive(tensor(Storage(4), [5], [1]), {"0": FOUR}),
        "reaches beyond its storage",
    ),
    "a tensor begins beyond": (
        archive(tensor(Storage(4), [1], [1], 4), {"0": FOUR}),
        "reaches beyond its storage",
    ),
    "a tensor begins before": (
        archive(tensor(Storage(4), [4], [1], -1), {"0": FOUR}),
        "unknown description",
    ),
    "a tensor of too many steps": (
        archive(tensor(Storage(4), [2, 2], [1, 4]), {"0": FOUR}),
        "reaches beyond its storage",
    ),
    "a tensor is expanded without end": (
        archive(tensor(Storage(1), [1 << 40], [0]), {"0": FOUR[:4]}),
        "more than the whole file",
    ),
    "a tensor of another kind reaches beyond": (
        archive(
            Call(
                Global("torch._utils", "_rebuild_tensor_v3"),
                *(Storage(4), 0, (4,), (1,), False, {}, torch.float64),
            ),
            {"0": FOUR},
        ),
        "reaches beyond its storage",
    ),
    "one storage is of two sizes": (
        archive([Storage(4), Storage(2)], {"0": FOUR}),
        "has two types or sizes",
    ),
    "records are compressed": (
        archive(tensor(Storage(10**6), [10**6], [1]), {"0": bytes(4 * 10**6)}, compression=8),
        "compressed",
    ),
    "a tensor is no dict": (
        archive(tensor(Storage(4), [4], [1], items={0: 1.0}), {"0": FOUR}),
        "does not support item assignment",
    ),
    "a key without end": (archive(deep_key()), "a key is a tuple"),
    "what torch would not call": (archive(Call(Global("os", "getpid"))), r"names os\.getpid"),
    "an array at an address": (
        archive(Call(Global("numpy", "ndarray"), (1,))),
        r"names numpy\.ndarray",
    ),
    "a class is given a state": (
        archive(with_state(Global("argparse", "Namespace"), {"x": 1})),
        "__setstate__",
    ),
    "a class as a value": (archive([Global("argparse", "Namespace")]), "itself"),
    "room for nothing": (
        archive(b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b"."),
        "KeyError: 150",  # the code of this kind of bytes
    ),
    "lists without end": (archive(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b"."), "recur"),
    "no pickle": (archive(b"nothing"), "KeyError"),
    "no archive": (b"nothing", "KeyError"),
    "nothing": (b"", "EOFError"),
}


@pytest.mark.parametrize("name", list(HOSTILE))
def test_what_is_hostile_is_refused(name: str) -> None:
    content, said = HOSTILE[name]
    with pytest.raises((ValueError, pickle.UnpicklingError), match=said):
        load(io.BytesIO(content))


@pytest.mark.parametrize("end", [-1, -40, 200, 20])
def test_old_files_cut_short_are_refused(end: int) -> None:
    content = saved({"a": torch.ones(10), "b": torch.ones(3)}, is_zip=False).getvalue()
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        load(io.BytesIO(content[:end]))


def test_records_that_share_bytes_are_refused() -> None:
    """As in a zip bomb whose records overlap: each is small, and all are the same."""
    content = bytearray(archive([1], {"0": bytes(100_000), "1": b"", "2": b""}))
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        first = file.getinfo("archive/data/0").CRC
    for name in (b"archive/data/1", b"archive/data/2"):
        place = content.rindex(name) - 46
        content[place + 16 : place + 28] = b"".join(
            n.to_bytes(4, "little") for n in (first, 100_000, 100_000)
        )
    with pytest.raises(ValueError, match="claim more bytes than the file has"):
        load(io.BytesIO(content))


def test_a_checkpoint_that_names_an_address_ends_no_process(tmp_path: Path) -> None:
    """With the array, numpy would drop a reference at the address that the file names."""
    good, bad = tmp_path / "ep0-ba2", tmp_path / "ep1-ba4"
    for path in (good, bad):
        write_checkpoint(CONTENT, path)
    address = Call(bytearray, Call(Global("_codecs", "encode"), "A" * 8, "latin1"))
    array = Call(np.ndarray, (1,), Call(np.dtype, "O", False, True), address, items={0: None})
    forge(bad, "rest.pt", archive(CONTENT | {"rng": array}))
    ask = (
        "import sys\n"
        "from pospre.run.checkpoints.reading import open_newest\n"
        "print(open_newest(sys.argv[1:]).uri)"
    )
    done = finished([sys.executable, "-c", ask, str(tmp_path)], env=environment())
    assert done.returncode == 0, done.stderr[-2000:]  # it was -11
    assert done.stdout.strip() == str(good)
    assert f"{bad}/rest.pt is not part of a checkpoint of pospre.train" in done.stderr
    assert "numpy.ndarray; nothing in it was executed); passed over" in done.stderr


def test_hostile_checkpoints_are_passed_over(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "ep0-ba2", tmp_path / "ep1-ba4"
    for path in (good, bad):
        write_checkpoint(CONTENT, path)
    for name in ("a record is too short", "what torch would not call", "no pickle", "nothing"):
        forge(bad, "rest.pt", HOSTILE[name][0])
        newest = open_newest([str(tmp_path)])
        assert newest is not None and newest.uri == str(good)
        assert f"warning: {bad}/rest.pt is " in capfd.readouterr().err


def test_a_file_of_weights_with_less_than_it_claims_is_one_message(tmp_path: Path) -> None:
    path, short = tmp_path / "weights.pth", tensor(Storage(4096), [16, 256], [256, 1])
    path.write_bytes(archive({"pos_embed": short}, {"0": FOUR, "1": bytes(20_000)}))
    with pytest.raises(UserError, match=r"is damaged.*not as large as the pickle claims.*nothing"):
        read_source(str(path), "student", Keys("", ""))


def test_random_states_are_written_without_arrays(tmp_path: Path) -> None:
    states = reproducibility.get_rng_state()
    write_checkpoint(CONTENT | {"rng": plain_random(states)}, tmp_path / "ep0-ba1")
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    with zipfile.ZipFile(tmp_path / "ep0-ba1" / "rest.pt") as file:
        assert b"numpy\n" not in file.read("archive/data.pkl")
        assert b"numpy." not in file.read("archive/data.pkl")
    reproducibility.load_rng_state(read_checkpoint(str(tmp_path / "ep0-ba1")).content["rng"])
    assert [random.random(), np.random.rand(), torch.rand(1).item()] == drawn


def test_a_pickle_of_this_helper_is_what_torch_reads() -> None:
    content = archive({"a": tensor(Storage(4), [2, 2], [2, 1])}, {"0": FOUR})
    assert torch.equal(load(io.BytesIO(content))["a"], torch.zeros(2, 2))
    assert pickle.loads(pickled([1])) == [1]
