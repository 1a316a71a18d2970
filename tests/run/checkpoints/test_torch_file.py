"""Files of torch.save: read as torch reads them, and refused where they claim what is not there."""

import argparse
import datetime
import io
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.errors import UserError
from pospre.run.checkpoints.torch_file import load
from pospre.training.weight_files import Keys, read_source
from tests.run.checkpoints.hostile import (
    Call,
    Global,
    Storage,
    archive,
    pickled,
    tensor,
    with_state,
)

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
        "arguments": argparse.Namespace(lr=0.1, input=[224]),
    }
    content = {"tensors": tensors, "plain": plain, "again": weights, 3: OrderedDict(b=weights)}
    found = load(saved(content, is_zip=is_zip))
    assert found.keys() == content.keys() and found["plain"] == {}  # only tensors are kept
    assert found[3]["b"].tolist() == weights.tolist()
    assert found["tensors"].keys() == tensors.keys()
    for key, expected in tensors.items():
        assert found["tensors"][key].tolist() == expected.tolist(), key
        assert found["tensors"][key].dtype == expected.dtype, key
        assert found["tensors"][key].stride() == expected.stride(), key
    found["again"][1, 2] = 7.0  # one storage, as it was
    assert found["tensors"]["part"][0, 0] == 7.0


DEEP = b")" + b"\x85" * 300_000
"""The end of a pickle that makes a tuple of a tuple of …: hashing it ends the process."""
ORDERED = b"\x80\x02ccollections\nOrderedDict\n"


def halves(count: int) -> bytes:
    """Return a pickle of dicts that hold the next one twice, so that 2^count are the last."""
    steps = b"".join(b"}q%c(X\x01\0\0\0ah%cX\x01\0\0\0bh%cu" % (n + 1, n, n) for n in range(count))
    return b"\x80\x02}q\0" + steps + b"."


HOSTILE = {
    "a record is too short": (
        archive(tensor(Storage(1000), [1000], [1]), {"0": FOUR * 100 + bytes(16 * 200)}),
        "not as large as the pickle claims",
    ),
    "all records are too short": (archive(tensor(Storage(1 << 30), [1 << 30], [1]), {"0": FOUR}),
     "storages claim more than"),
    "two storages claim the file twice": (
        archive([Storage(2500, "0"), Storage(2500, "1")], {"0": bytes(10_000)}),
        "storages claim more than",
    ),
    "a tensor reaches beyond": (archive(tensor(Storage(4), [5], [1]), {"0": FOUR}),
     "reaches beyond its storage"),
    "a tensor begins beyond": (archive(tensor(Storage(4), [1], [1], 4), {"0": FOUR}),
     "reaches beyond its storage"),
    "a tensor begins before": (archive(tensor(Storage(4), [4], [1], -1), {"0": FOUR}),
     "unknown description"),
    "a tensor of too many steps": (archive(tensor(Storage(4), [2, 2], [1, 4]), {"0": FOUR}),
     "reaches beyond its storage"),
    "a tensor is expanded without end": (
        archive(tensor(Storage(1), [1 << 40], [0]), {"0": FOUR[:4]}),
        "much more than the whole file",
    ),
    "tensors are expanded without end": (
        archive({n: tensor(Storage(1), [1 << 17], [0]) for n in range(10)}, {"0": FOUR[:4]}),
        "much more than the whole file",
    ),
    "a tensor of endless dimensions": (
        archive(tensor(Storage(1), [1] * 65, [1] * 65), {"0": FOUR[:4]}),
        "unknown description",
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
    "one storage is of two sizes": (archive([Storage(4), Storage(2)], {"0": FOUR}),
     "has two types or sizes"),
    "records are compressed": (
        archive(tensor(Storage(10**6), [10**6], [1]), {"0": bytes(4 * 10**6)}, compression=8),
        "compressed",
    ),
    "a tensor is no dict": (archive(tensor(Storage(4), [4], [1], items={0: 1.0}), {"0": FOUR}),
     "does not support item assignment"),
    "a key without end": (archive(b"\x80\x02}(" + DEEP + b"Nu."), "a key is a tuple"),
    "an ordered dict with such a key": (archive(ORDERED + b"(](](" + DEEP + b"Nee" + b"tR."),
     "a key is a tuple"),
    "a key that is no text": (archive({1.5: 0}), "a key is a float"),
    "dicts that hold the next one twice": (archive(halves(40)), "more than 100000 values"),
    "an ordered dict again and again": (
        archive(
            ORDERED
            + b"q\0((]q\1("
            + b"(X\x01\0\0\0aNl" * 1000
            + b"etq\2}("
            + b"".join(b"J" + n.to_bytes(4, "little") + b"h\0h\2R" for n in range(1000))
            + b"u."
        ),
        "more than 100000 values",
    ),
    "dicts without end": (archive(b"\x80\x02" + b"}K\0" * 30 + b"N" + b"s" * 30 + b"."), "deep"),
    "a pickle without end": (archive(b"\x80\x02" + b"]" * (1 << 23) + b"."), "EOFError"),
    "what torch would not call": (archive(Call(Global("os", "getpid"))), r"names os\.getpid"),
    "an array at an address": (archive(Call(Global("numpy", "ndarray"), (1,))),
     r"names numpy\.ndarray"),
    "a class is given a state": (archive(with_state(Global("argparse", "Namespace"), {"x": 1})),
     "__setstate__"),
    "room for nothing": (
        archive(b"\x80\x05\x96" + (1 << 33).to_bytes(8, "little") + b"."),
        "KeyError: 150",  # the code of this kind of bytes
    ),
    "no pickle": (archive(b"nothing"), "KeyError"),
    "no archive": (b"nothing", "KeyError"),
    "nothing": (b"", "EOFError"),
}  # fmt: skip


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


@pytest.mark.parametrize(
    "content",
    [
        Call(Global("torch.torch_version", "TorchVersion"), 1 << 40),
        Call(Global("torch", "device"), "cpu", 1 << 40),
        Call(Global("__builtin__", "bytes"), 1 << 40),
        Call(Global("datetime", "timedelta"), 1 << 70),
        Call(Global("builtins", "set"), [[1]]),
        [Global("argparse", "Namespace")],
        b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".",  # lists without end
        b"\x80\x02" + DEEP + b".",
    ],
)
def test_what_is_no_tensor_is_neither_called_nor_walked(content: Any) -> None:
    assert (
        load(io.BytesIO(archive({"a": content} if not isinstance(content, bytes) else content)))
        == {}
    )


def test_a_file_of_weights_with_less_than_it_claims_is_one_message(tmp_path: Path) -> None:
    path, short = tmp_path / "weights.pth", tensor(Storage(4096), [16, 256], [256, 1])
    path.write_bytes(archive({"pos_embed": short}, {"0": FOUR, "1": bytes(20_000)}))
    with pytest.raises(UserError, match=r"is damaged.*not as large as the pickle claims.*nothing"):
        read_source(str(path), "student", Keys("", ""))


def test_a_pickle_of_this_helper_is_what_torch_reads() -> None:
    content = archive({"a": tensor(Storage(4), [2, 2], [2, 1])}, {"0": FOUR})
    assert torch.equal(load(io.BytesIO(content))["a"], torch.zeros(2, 2))
    assert pickle.loads(pickled([1])) == [1]
