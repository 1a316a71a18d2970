"""Damaged samples: named and fatal, or left out, counted and replaced by the next."""

import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pospre.data import batch_filler
from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from tests.refusals import refuses

VIEWS = [ViewGroup(size=32, count=2)]
SETTINGS: dict[str, Any] = {"views": VIEWS, "batch_size": 4, "seed": 3, "num_workers": 2}
BAD = (7, 8)
CUT_OFF = 3
SMALL_VIEWS = [ViewGroup(size=16, scale=(0.02, 0.1))]


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
    place = r"(shard\.00000\.mds, sample \d \(\w+/\d+\.jpg\)|photos\.beton, sample \d)"
    said = rf"{place} cannot be decoded: .* differ from those written.*: skip"
    refuses(said, lambda: batches(damaged))


def test_damaged_samples_are_counted_and_replaced(damaged, whole):
    """Their views are those drawn for the sample that stands in."""
    good, expected = batches(whole, batch_size=22)
    ours, found = batches(damaged, bad_samples="skip", batch_size=22)
    assert tuple(sorted(ours.bad)) == BAD and not good.bad
    (batch,), (other,) = found, expected
    rows = {int(index): row for row, index in enumerate(other["index"])}
    for index, row in rows.items():
        wanted = rows[9] if index in BAD else row
        for key, value in other.items():
            assert torch.equal(batch[key][row], value[wanted]), key


def test_each_damaged_sample_warns_once(damaged):
    loader = build_loader(damaged, bad_samples="skip", shuffle=False, **SETTINGS)
    with pytest.warns(UserWarning, match=r"sample .*The next sample takes its place") as seen:
        list(loader)
        list(loader)
    assert len([one for one in seen if "takes its place" in str(one.message)]) == 2


def save_photo(path: Path, seed: int, **options: Any) -> None:
    coarse = np.random.default_rng(seed).integers(0, 256, (20, 10, 3), dtype=np.uint8)
    Image.fromarray(coarse).resize((150, 300), Image.Resampling.BICUBIC).save(path, **options)


@pytest.fixture
def cut_off(tmp_path) -> Path:
    """Photographs of which one ends at 60% and says so properly: it is good down to there."""
    folder = tmp_path / "cut_off"
    folder.mkdir()
    for number in range(12):
        save_photo(folder / f"{number:02d}.jpg", number, quality=90)
    shutil.copytree(folder, tmp_path / "good")
    broken = folder / f"{CUT_OFF:02d}.jpg"
    data = broken.read_bytes()
    broken.write_bytes(data[: int(0.6 * len(data))] + b"\xff\xd9")
    return folder


def rows(path: Path, epoch: int, state: int = 0, world: int = 1, **options: Any) -> list[Any]:
    """Return (epoch, index, views) of every sample of an epoch, in the order of all ranks."""
    few: dict[str, Any] = {"views": SMALL_VIEWS, "batch_size": 6 // world, "world_size": world}
    ranks = []
    for rank in range(world):
        settings = {**SETTINGS, **few, "rank": rank, "bad_samples": "skip", **options}
        loader = build_loader(path, **settings)
        loader.load_state_dict({"epoch": epoch, "samples": state})
        ranks.append(list(loader))
    return [row for batches in zip(*ranks, strict=True) for batch in batches for row in told(batch)]


def told(batch: dict[str, torch.Tensor]) -> list[Any]:
    keys = ("epoch", "index", "view/image")
    return [tuple(batch[key][row].tolist() for key in keys) for row in range(len(batch["index"]))]


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
@pytest.mark.parametrize("repeats", [1, 2])
def test_what_stands_in_does_not_depend_on_what_was_seen_before(cut_off, repeats):
    """Damage that only some views reach: one long run, resumed runs and two ranks agree."""
    long = build_loader(
        cut_off,
        **{**SETTINGS, "views": SMALL_VIEWS, "batch_size": 6, "bad_samples": "skip"},
        repeats=repeats,
    )
    used = replaced = 0
    for epoch in range(6):
        long.epoch = epoch
        history = [row for batch in long for row in told(batch)]
        good = rows(cut_off.parent / "good", epoch, repeats=repeats)
        for (_, index, views), (_, wanted, expected) in zip(history, good, strict=True):
            used += index == wanted == CUT_OFF
            replaced += index != wanted
            if index == wanted:  # also what lies above the damage is as it was
                assert views == expected
            else:
                assert (wanted, index) == (CUT_OFF, CUT_OFF + 1)
        assert rows(cut_off, epoch, repeats=repeats) == history
        assert rows(cut_off, epoch, 6, repeats=repeats) == history[6:]
        assert rows(cut_off, epoch, world=2, repeats=repeats) == history
        assert rows(cut_off, epoch, num_workers=0, repeats=repeats) == history
    assert used and replaced and list(long.bad) == [CUT_OFF]


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_the_probe_follows_the_policy(damaged, monkeypatch, policy):
    """Also a flipped bit, which gives an image all the same, is found by it."""
    loader = build_loader(damaged, bad_samples=policy, **SETTINGS)
    if policy == "fail":
        refuses(r"sample \d.*differ from those written.*: skip", lambda: loader.probe(22))
        return
    with pytest.warns(UserWarning, match="takes its place"):
        loader.probe(22)
    assert tuple(sorted(loader.bad)) == BAD


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_a_sample_whose_columns_do_not_add_up(stored, tmp_path, policy):
    path = Path(shutil.copytree(stored("mds"), tmp_path / "torn"))
    shard = path / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    (begin,) = np.frombuffer(data[4:8], "<u4").tolist()
    data[begin : begin + 4] = np.array([7], "<u4").tobytes()  # another size of the image column
    shard.write_bytes(data)
    loader = build_loader(path, bad_samples=policy, shuffle=False, **SETTINGS)
    if policy == "fail":
        for start in (loader.probe, lambda: list(loader)):
            with pytest.raises(UserError, match=r"sample 0 is damaged\..*bad_samples: skip"):
                start()
        return
    with pytest.warns(UserWarning, match=r"sample 0 is damaged\. .*takes its place"):
        loader.probe()
    assert list(loader.bad) == [0]
    assert next(iter(loader))["index"].tolist() == [1, 1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
def test_a_torn_block_over_a_picture_and_its_name(stored, tmp_path):
    """4 kB of noise over the end of an image, its label and the name that messages would give."""
    path = Path(shutil.copytree(stored("mds"), tmp_path / "torn"))
    shard = path / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    ends = np.frombuffer(data[4 : 4 + 4 * 23], "<u4").tolist()
    at = max(ends[5] + 100, ends[6] - 4090)  # in the picture of sample 5, over its name and on
    data[at : at + 4096] = b"\xff" * 4096
    shard.write_bytes(data)
    refuses(r"sample \d", lambda: batches(path))
    ours, found = batches(path, bad_samples="skip", shuffle=False)
    assert 5 in ours.bad and not set(found[1]["index"].tolist()) & set(ours.bad)


def test_an_empty_file(cut_off):
    (cut_off / "00.jpg").write_bytes(b"")
    with pytest.raises(UserError, match=r"00\.jpg cannot be decoded: the file is empty\."):
        next(iter(build_loader(cut_off, shuffle=False, **SETTINGS)))


def test_nothing_but_damage_is_an_error(tmp_path):
    (tmp_path / "photos").mkdir()
    for number in range(5):
        (tmp_path / "photos" / f"{number}.jpg").write_bytes(b"\xff\xd8\xff nothing")
    refuses(r"5 in a row", lambda: batches(tmp_path / "photos", bad_samples="skip"))


@pytest.mark.parametrize("kind", ["mds", "folder"])
def test_what_is_opened_together_changes_nothing(stored, photos, monkeypatch, kind):
    path = photos if kind == "folder" else stored("mds")
    held, together = [], batch_filler.BatchFiller._open_some

    def open_some(self, *args):
        opened = together(self, *args)
        held.append(sum(image.num_bytes for _, image, _ in opened))
        return opened

    monkeypatch.setattr(batch_filler.BatchFiller, "_open_some", open_some)
    expected = batches(path, batch_size=20)[1]
    at_once, held[:] = held[:], []
    monkeypatch.setattr(batch_filler, "_MOST_OPENED", 1)
    found = batches(path, batch_size=20)[1]
    assert len(held) > len(at_once) and max(held) < max(at_once)
    for batch, other in zip(found, expected, strict=True):
        assert all(torch.equal(value, other[key]) for key, value in batch.items())


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Sixteen photographs: number 0 is cut off, number 5 is no image."""
    noise = np.random.default_rng(0).integers(0, 256, (16, 60, 80, 3), dtype=np.uint8)
    (tmp_path / "all").mkdir()
    for number, pixels in enumerate(noise):
        Image.fromarray(pixels).save(tmp_path / f"all/{number:02}.jpg")
    cut_off = (tmp_path / "all/00.jpg").read_bytes()
    (tmp_path / "all/00.jpg").write_bytes(cut_off[: len(cut_off) // 2])
    (tmp_path / "all/05.jpg").write_bytes(b"no image")
    return tmp_path


def test_the_first_bad_sample_is_named_and_no_thread_left(mixed):
    with pytest.raises(UserError, match=r"all/00\.jpg cannot be decoded.*data_prep\.convert"):
        batches(mixed, batch_size=16, shuffle=False)
    assert not [one for one in threading.enumerate() if "pospre-loader" in one.name]


def test_bad_samples_are_told_in_their_order_and_each_view_is_counted_once(mixed):
    loader = build_loader(
        mixed, **{**SETTINGS, "batch_size": 16}, shuffle=False, bad_samples="skip"
    )
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        (batch,) = loader
    assert [str(one.message).partition(".jpg")[0][-2:] for one in told] == ["00", "05"]
    assert batch["index"].tolist() == [1, 1, 2, 3, 4, 6, 6, *range(7, 16)]
    assert loader.timing.num_images == 16
