"""What tells data sets of as many samples apart, and labels that are not as they were written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pospre.data.loader import build_loader
from pospre.data.opening import open_reader
from pospre.data.stores.description import Identity, difference
from pospre.data.stores.mds import MdsReader
from pospre.data.stores.subset import subset
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from tests.data.buckets import ADDRESS, NUM_SAMPLES, open_remote
from tests.data.conftest import FORMATS, picture
from tests.data_prep.reading import converted
from tests.disk import flip

Stored = Callable[[str], Path]
VIEWS = [ViewGroup(size=16)]


def identity(path: Path) -> Identity:
    return open_reader(path).identity()


@pytest.fixture
def copy(photos: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(photos, tmp_path / "photos"))


def test_formats_of_one_data_set_agree(stored: Stored, tmp_path: Path) -> None:
    known = {name: identity(stored(name)) for name in FORMATS}
    for one in FORMATS:
        for other in FORMATS:
            assert difference(known[one], known[other]) == ""
            assert {"names of the classes", "labels"} <= known[one].keys() & known[other].keys()
    assert "checksums of the samples" in known["mds"].keys() & known["ffcv"].keys()
    smaller = converted(stored("folder"), tmp_path / "small", "--shard-mb", "0.004")
    assert len(open_reader(smaller).parts) > 2 and identity(smaller) == known["mds"]


def test_the_hashes_do_not_depend_on_where_the_data_lie(
    stored: Stored, tmp_path: Path, bucket: Any
) -> None:
    for name in ("folder", "mds"):
        copied = Path(shutil.copytree(stored(name), tmp_path / name))
        assert identity(copied) == identity(stored(name))
    remote = open_remote()
    local = tmp_path / "local"
    local.mkdir()
    for entry in bucket.list_objects_v2(Bucket="bucket")["Contents"]:
        bucket.download_file("bucket", entry["Key"], str(local / Path(entry["Key"]).name))
    assert len(remote) == NUM_SAMPLES and ADDRESS.endswith("set")
    assert remote.identity() == identity(local) != {}


def relabel(root: Path) -> None:
    """Swap the images of two classes that have equally many."""
    (root / "bee").rename(root / "x")
    (root / "cat").rename(root / "bee")
    (root / "x").rename(root / "cat")


def move(root: Path) -> None:
    (root / "ant/00.jpg").rename(root / "bee/00.jpg")


def other_size(root: Path) -> None:
    picture(99).save(root / "ant/00.jpg")


def rename_class(root: Path) -> None:
    (root / "cat").rename(root / "cow")


@pytest.mark.parametrize("change", [relabel, move, other_size, rename_class])
def test_other_or_relabelled_images_are_told(photos: Path, copy: Path, change: Any) -> None:
    change(copy)
    assert len(open_reader(copy)) == len(open_reader(photos))
    assert "differ (SHA-256 " in difference(identity(photos), identity(copy))


@pytest.mark.parametrize(
    ("change", "name"),
    [(relabel, "out"), (move, "out.beton"), (other_size, "out.beton"), (rename_class, "out")],
)
def test_converted_ones_are_told_as_well(
    stored: Stored, copy: Path, tmp_path: Path, change: Any, name: str
) -> None:
    before = stored("ffcv" if name.endswith(".beton") else "mds")
    change(copy)
    after = converted(copy, tmp_path / name)
    assert "differ" in difference(identity(before), identity(after))
    if change in (move, rename_class):  # of classes and labels a folder knows as much
        assert "differ" in difference(identity(before), identity(copy))
        assert "differ" in difference(identity(stored("folder")), identity(after))


def test_data_of_other_programs_are_told_by_their_sizes(stored: Stored, tmp_path: Path) -> None:
    shards = Path(shutil.copytree(stored("mds"), tmp_path / "mds"))
    (shards / "pospre.json").unlink()
    beton = Path(shutil.copy(stored("ffcv"), tmp_path / "bare.beton"))
    for bare, other in ((shards, "mds"), (beton, "ffcv")):
        known = identity(bare)
        assert any("sizes" in what for what in known)
        assert difference(known, identity(stored(other))) == ""


def test_a_part_of_a_data_set_is_told_from_others(photos: Path) -> None:
    whole = open_reader(photos)
    parts = [subset(whole, 0.5, None, seed).identity() for seed in (0, 0, 1)]
    assert difference(parts[0], parts[1]) == ""
    assert "chosen samples" in difference(parts[0], parts[2])


def test_a_flipped_label_in_a_beton_is_told_at_the_start(stored: Stored, tmp_path: Path) -> None:
    target = tmp_path / "copy.beton"
    for suffix in ("", ".json"):
        shutil.copy(f"{stored('ffcv')}{suffix}", f"{target}{suffix}")
    from ffcv.reader import Reader
    from ffcv.types import FieldDescType, HeaderType

    row = Reader(str(target)).metadata.dtype
    label = row.fields["f1"][1]
    flip(target, HeaderType.itemsize + 2 * FieldDescType.itemsize + 7 * row.itemsize + label)
    with pytest.raises(UserError, match=r"its labels differ from those in copy\.beton\.json"):
        open_reader(target)


def test_a_flipped_label_in_a_shard_is_told_when_it_is_read(stored: Stored, tmp_path: Path) -> None:
    target = Path(shutil.copytree(stored("mds"), tmp_path / "mds"))
    reader = open_reader(target)
    assert isinstance(reader, MdsReader)
    before = reader.read(7)
    path, offset, size = reader._byte_range(7)
    data = path.read_bytes()[offset : offset + size]
    image = before.encoded.numpy().tobytes()
    flip(path, offset + data.index(image) + len(image), bits=1)
    assert abs(open_reader(target).read(7).label - before.label) == 1
    with pytest.raises(UserError, match=r"its bytes or its label differ.*bad_samples"):
        list(build_loader(target, batch_size=2, views=VIEWS, num_workers=0))
