"""Damaged samples: named and fatal, or left out, counted and replaced by the next."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch

from pospre.data.loader import build_loader
from pospre.data.views import ViewGroup
from pospre.errors import UserError

SETTINGS = {"views": [ViewGroup(size=32, count=2)], "batch_size": 4, "seed": 3, "num_workers": 2}


@pytest.fixture
def damaged(stored, tmp_path) -> Path:
    """The photographs as MDS, samples 7 and 8 with their pictures' ends overwritten."""
    target = tmp_path / "mds"
    shutil.copytree(stored("mds"), target)
    shard = target / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    for number in (7, 8):
        begin, end = (
            int.from_bytes(data[4 + 4 * (number + k) : 8 + 4 * (number + k)], "little")
            for k in (0, 1)
        )
        data[begin + (end - begin) // 2 : end - 60] = bytes(
            (end - 60) - (begin + (end - begin) // 2)
        )
    shard.write_bytes(data)
    return target


def batches(path: Path, epoch: int = 0, **options):
    loader = build_loader(path, **{**SETTINGS, **options})
    loader.epoch = epoch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return loader, list(loader)


def test_a_damaged_sample_is_named(damaged):
    with pytest.raises(UserError, match=r"shard\.00000\.mds, sample [78] .*bad_samples: skip"):
        batches(damaged)


def test_damaged_samples_are_counted_and_replaced(damaged, stored):
    good, expected = batches(stored("mds"))
    ours, found = batches(damaged, bad_samples="skip")
    assert sorted(ours.bad) in ([7, 8], [7], [8]) and not good.bad
    replaced = 0
    for batch, other in zip(found, expected, strict=True):
        for row, index in enumerate(other["index"].tolist()):
            if index in (7, 8):
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
    rows = {}
    for batch, other in zip(first, second, strict=True):
        for key, value in batch.items():
            assert torch.equal(value, other[key])
        for row, index in enumerate(batch["index"].tolist()):
            if index == 9:
                rows[len(rows)] = batch["view/image"][row]
    assert len(rows) > 1 and all(torch.equal(rows[0], row) for row in rows.values())


def test_each_damaged_sample_warns_once(damaged):
    loader = build_loader(damaged, bad_samples="skip", shuffle=False, **SETTINGS)
    with pytest.warns(UserWarning, match=r"sample 7 .*The next sample takes its place") as seen:
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
