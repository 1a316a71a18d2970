"""Damaged samples: named and fatal, or left out, counted and replaced by the next."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.data.loader import build_loader
from pospre.data.reader import open_reader
from pospre.data.views import ViewGroup
from pospre.errors import UserError

SETTINGS: dict[str, Any] = {
    "views": [ViewGroup(size=32, count=2)],
    "batch_size": 4,
    "seed": 3,
    "num_workers": 2,
}


BAD = (7, 8)


@pytest.fixture(params=["mds", "ffcv"])
def damaged(request, stored, tmp_path) -> Path:
    """The photographs, one bit flipped in the middle of the pictures of samples 7 and 8."""
    source = stored(request.param)
    target = tmp_path / source.name
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
        shutil.copy(f"{source}.json", f"{target}.json")
    for index in BAD:
        jpeg = open_reader(source).read(index).encoded.numpy().tobytes()
        (path,) = [
            path
            for path in ([target] if target.is_file() else target.glob("**/*.mds"))
            if jpeg in path.read_bytes()
        ]
        data = bytearray(path.read_bytes())
        data[data.index(jpeg) + len(jpeg) // 2] ^= 4
        path.write_bytes(data)
    return target


@pytest.fixture
def whole(damaged, stored) -> Path:
    """The same data set without damage."""
    return stored("mds" if damaged.is_dir() else "ffcv")


def batches(path: Path, epoch: int = 0, **options):
    loader = build_loader(path, **{**SETTINGS, **options})
    loader.epoch = epoch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loader, list(loader)


def test_a_damaged_sample_is_named(damaged):
    said = r"(shard.*mds|photos\.beton), sample \d.* not those that were written.*: skip"
    with pytest.raises(UserError, match=said):
        batches(damaged)


def test_damaged_samples_are_counted_and_replaced(damaged, whole):
    good, expected = batches(whole)
    ours, found = batches(damaged, bad_samples="skip")
    assert tuple(sorted(ours.bad)) == BAD and not good.bad
    replaced = 0
    for batch, other in zip(found, expected, strict=True):
        for row, index in enumerate(other["index"].tolist()):
            if index in BAD:
                assert batch["index"][row] == 9
                replaced += 1
                continue
            for key, value in other.items():
                assert torch.equal(batch[key][row], value[row]), key
    assert replaced


def test_a_replacement_is_what_it_always_is(damaged):
    """Its views are those drawn for the sample that stands in, whatever threads there are."""
    (_, first), (_, second) = (
        batches(damaged, bad_samples="skip", num_workers=count) for count in (0, 3)
    )
    rows: dict[int, torch.Tensor] = {}
    for batch, other in zip(first, second, strict=True):
        for key, value in batch.items():
            assert torch.equal(value, other[key])
        for row, index in enumerate(batch["index"].tolist()):
            if index == 9:
                rows[len(rows)] = batch["view/image"][row]
    assert len(rows) > 1 and all(torch.equal(rows[0], row) for row in rows.values())


def test_each_damaged_sample_warns_once(damaged):
    loader = build_loader(damaged, bad_samples="skip", shuffle=False, **SETTINGS)
    with pytest.warns(UserWarning, match=r"sample .*The next sample takes its place") as seen:
        list(loader)
        list(loader)
    assert len([one for one in seen if "takes its place" in str(one.message)]) == 2


def test_nothing_but_damage_is_an_error(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(5):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(b"\xff\xd8\xff nothing")
    with pytest.raises(UserError, match=r"in a row"):
        batches(tmp_path / "photos", bad_samples="skip")


def test_an_unknown_policy_is_refused(photos):
    with pytest.raises(UserError, match=r"bad_samples 'skp' is unknown. Did you mean 'skip'"):
        build_loader(photos, bad_samples="skp", **SETTINGS)
