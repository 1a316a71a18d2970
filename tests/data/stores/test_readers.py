"""Readers: what they find in a data set, and what they say about a bad one."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pospre.data.opening import open_reader
from pospre.data.stores.image_folder import describe_classes
from pospre.data.stores.subset import subset
from pospre.errors import UserError
from tests import refusals
from tests.disk import overwrite

NUM_IMAGES = 22


def refuses(path: Path | str, said: str) -> None:
    """Check that no reader opens and no file changes; ``said``: words with … between them."""
    words = [re.escape(each) for each in said.split(" … ")]
    folder = path if isinstance(path, Path) and path.is_dir() else None
    refusals.refuses(words, lambda: open_reader(path), folder)


@pytest.mark.timeout(60)
def test_a_fifo_in_the_place_of_a_file_hangs_nothing(stored, photos, tmp_path):
    """Neither training nor a conversion, which both ask whether a folder holds shards."""
    folder = Path(shutil.copytree(photos, tmp_path / "photos"))
    os.mkfifo(folder / "index.json")
    assert len(open_reader(folder)) == NUM_IMAGES
    for name in ("index.json", "pospre.json"):
        shards = Path(shutil.copytree(stored("mds"), tmp_path / f"mds {name}"))
        (shards / name).unlink()
        os.mkfifo(shards / name)
        refuses(shards, f"{name} is not a regular file")
    os.mkfifo(tmp_path / "fifo.beton")
    refuses(tmp_path / "fifo.beton", "is a FIFO; give an image folder")


def test_every_format_returns_the_files_bytes(data_set, photos):
    reader = open_reader(data_set)
    files = sorted(photos.rglob("*.jpg"))
    assert len(reader) == len(files) == NUM_IMAGES
    for index, file in enumerate(files):
        assert reader.read(index).encoded.numpy().tobytes() == file.read_bytes()
        if reader.format != "ffcv":  # FFCV stores no paths
            assert file.relative_to(photos).as_posix() in reader.name(index)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("empty", "has no images"),
        ("notes", "has no images … 1 other files, for instance notes.txt"),
        ("notes/notes.txt", "is a file, but not a .beton"),
        ("nowhere", "nowhere does not exist … give an image folder"),
        ("s3://bucket/data.beton", "s3://bucket/data.beton is remote … copy it first"),
        ("gs://bucket/data", "from s3://; copy it first"),
    ],
)
def test_paths_that_are_no_data_set(tmp_path: Path, path: str, said: str) -> None:
    for name in ("empty", "notes"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("nothing to see")
    refuses(path if ":" in path else tmp_path / path, said)


# MDS


@pytest.fixture
def mds(stored: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored("mds"), tmp_path / "mds"))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_shards_of_streamings_own_writer(tmp_path):
    streaming = pytest.importorskip("streaming")
    columns = {"extra": "str", "image": "bytes", "label": "int"}
    target = str(tmp_path / "mds")
    with streaming.MDSWriter(out=target, columns=columns, size_limit=300) as writer:
        for number in range(9):
            writer.write({"extra": "x" * number, "image": bytes([number] * 50), "label": -number})
    reader = open_reader(target)
    assert len(list(Path(target).glob("shard.*"))) > 1 and len(reader) == 9
    for number in range(9):
        sample = reader.read(number)
        assert (sample.encoded.tolist(), sample.label) == ([number] * 50, -number)
    with pytest.raises(IndexError):
        reader.read(9)


def in_json(name: str, values: dict[str, Any]) -> Callable[[Path], None]:
    """Change the entries of ``index.json`` or ``pospre.json``."""
    return lambda mds: edit_json(mds / name, lambda content: content.update(values))


def of_shard(**values: Any) -> Callable[[Path], None]:
    """Change what the index says of the first shard."""
    return lambda mds: edit_json(mds / INDEX, lambda index: index["shards"][0].update(values))


def renamed(mds: Path) -> None:
    """Neither a description nor known names."""
    (mds / NOTES).unlink()
    (mds / SHARD).rename(mds / "shard.00000.raw")
    of_shard(raw_data={"basename": "x", "bytes": 1})(mds)


INDEX, NOTES, SHARD, AGAIN = "index.json", "pospre.json", "shard.00000.mds", "onvert again"
FORMAT = "is not in the converter's format"
ZIPPED = {"compression": "zstd", "zip_data": {"basename": "x", "bytes": 9}}
OF_SHARD: list[tuple[str, dict[str, Any]]] = [
    ("format 'mds', version 1; MDS version 2 is supported", {"version": 1}),
    ("format 'json'", {"format": "json"}),
    ("without a valid 'compression'", {"compression": ["zstd"]}),
    ("without a valid 'raw_data'", {"raw_data": {"basename": SHARD}}),
    ("valid 'raw_data'", {"raw_data": {"basename": "x", "bytes": 5, "hashes": {"sha1": 5}}}),
    ("without a valid 'samples'", {"samples": -1}),
    ("without a valid 'column_names'", {"column_names": ["image"]}),
    ("without a valid 'column_names'", {"column_names": [["image"], "label", "path"]}),
    ("'picture': 'bytes'", {"column_names": ["picture", "label", "path"]}),
    ("'image': 'pkl'", {"column_encodings": ["pkl", "int", "str"]}),
    ("without a valid 'column_encodings'", {"column_encodings": None}),
    ("without a valid 'column_sizes'", {"column_sizes": [-5, 8, None]}),
    ("the column 'label' 4 bytes; its type has 8", {"column_sizes": [None, 4, None]}),
    ("the column 'label' None bytes; its type has 8", {"column_sizes": [None, None, None]}),
]
OF_INDEX: list[tuple[str, dict[str, Any]]] = [
    ("MDS version 3", {"version": 3}),
    (f"{INDEX} lists '{SHARD}' as a shard", {"shards": [SHARD]}),
    ("without a valid 'raw_data'", {"shards": [{"format": "mds", "version": 2}]}),
    ("has no samples", {"shards": []}),
]
OF_NOTES: list[tuple[str, dict[str, Any]]] = [
    ("has format 'pospre-mds', version 1; expected", {"version": 1}),
    ("has 5 samples, but the data have 22", {"samples": 5}),
    ("disagree about shard.0000", {"manifest": {"shard.00001.mds": [5, ""]}}),
    (f"'manifest … {FORMAT}", {"manifest": {"a": [1]}}),
    (f"'manifest … {FORMAT}", {"manifest": {"a": ["1", "x"]}}),
    (f"'classes … {FORMAT}", {"classes": "ant"}),
    (f"'classes … {FORMAT}", {"classes": [1, 2]}),
    (f"'labels_sha256' … {FORMAT}", {"labels_sha256": 3}),
]


@pytest.mark.parametrize(
    ("said", "change"),
    [
        *((f"{said} … {AGAIN}", of_shard(**values)) for said, values in OF_SHARD),
        *((f"{said} … {AGAIN}", in_json(INDEX, values)) for said, values in OF_INDEX),
        *((f"{NOTES} … {said} … {AGAIN}", in_json(NOTES, values)) for said, values in OF_NOTES),
        ("compressed with zstd … without compression", of_shard(**ZIPPED)),
        (f"{SHARD} is missing … {AGAIN}", lambda mds: (mds / SHARD).unlink()),
        (f"{SHARD} does not match {INDEX}", lambda mds: overwrite(mds / SHARD, 0, bytes(100))),
        ("shard … is missing", renamed),
        (f"no {INDEX} … not finished … Convert again", lambda mds: (mds / INDEX).unlink()),
        *(
            (f"{name} … {AGAIN}", lambda mds, name=name, data=data: (mds / name).write_bytes(data))
            for name in (INDEX, NOTES)
            for data in (b"", b"{", b"[]", b"\xff\xfe\x00")
        ),
    ],
)
def test_what_is_wrong_with_shards_is_named(
    mds: Path, said: str, change: Callable[[Path], None]
) -> None:
    change(mds)
    refuses(mds, said)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.999])
def test_a_truncated_shard_is_named(mds: Path, kept: float) -> None:
    shard, data = mds / SHARD, (mds / SHARD).read_bytes()
    shard.write_bytes(data[: kept if isinstance(kept, int) else int(kept * len(data))])
    refuses(mds, f"{shard} has  … instead of {len(data)} … data_prep.convert … --format mds")


@pytest.mark.parametrize("content", ['{"cat": 0}', "[1]", "no JSON", '{"version": 2}'])
def test_a_foreign_index_in_a_folder_of_images(image_folder, content):
    folder = image_folder(num_images=4)
    (folder / "index.json").write_text(content)
    reader = open_reader(folder)
    assert (reader.format, len(reader)) == ("folder", 4)


def test_a_shard_cut_while_in_use_is_named(mds):
    reader = open_reader(mds)
    shard = mds / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(UserError, match=r"shard\.00000\.mds is truncated: it ends at byte 5000"):
        reader.read(NUM_IMAGES - 1)


ODD: tuple[Any, ...] = (None, True, -1, 0, 1.5, "", "x", [], {}, [1], {"a": 1}, 2**63, "\ud800")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a JSON value holds others; of lists the first."""
    yield path
    keys = value if isinstance(value, dict) else range(isinstance(value, list) and len(value) > 0)
    for key in keys:
        yield from places(value[key], (*path, key))


@pytest.mark.parametrize("name", ["index.json", "pospre.json"])
def test_values_of_any_other_type_are_read_or_refused(mds, name):
    original = json.loads((mds / name).read_text())
    refused = 0
    for path in places(original):
        for odd in ODD:
            whole: Any = {"": json.loads(json.dumps(original))}
            inner = whole
            for key in ("", *path)[:-1]:
                inner = inner[key]
            inner[("", *path)[-1]] = odd
            (mds / name).write_text(json.dumps(whole[""]))
            try:
                open_reader(mds).identity()
            except UserError:
                refused += 1
    assert refused > 100


def test_classes_are_named_with_their_counts(photos: Path) -> None:
    reader = open_reader(photos)
    assert reader.classes is not None
    labels = list(reader.labels())
    counts = [f"{name} ({labels.count(k)})" for k, name in enumerate(reader.classes)]
    assert describe_classes(reader.classes, labels) == ", ".join(counts)
    few = subset(reader, 0.5, None, 0)
    assert few.labels() == [few.about(index)[0] for index in range(len(few))]
    many = [f"c{number}" for number in range(20)]
    assert describe_classes(many, ()) == "c0, c1, c2, c3, c4, c5, c6, …, c19"
