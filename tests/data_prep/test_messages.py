"""What the commands say of a mistake, which leaves every file as it was."""

import shlex
from pathlib import Path

import pytest

from data_prep import convert, scenes, statistics, verify
from tests.data.deep_files import png16
from tests.data_prep.encode.test_deep_range import TWELVE
from tests.data_prep.sample_clips import write_clips
from tests.data_prep.sample_images import bad_files, encoded, picture, write_files
from tests.refusals import refuses

COMMANDS = {
    "convert": convert.main,
    "scenes": scenes.main,
    "statistics": statistics.main,
    "verify": verify.main,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photographs, clips and what is neither; every test must leave it as it is."""
    root = tmp_path_factory.mktemp("messages")
    photos = {f"photos/ant/{number}.jpg": encoded(picture(number)) for number in range(6)}
    broken = {f"broken/{name}": data for name, data in bad_files().items()}
    cut = {
        "cut/plain/cut.jpg": bad_files()["plain/cut.jpg"],
        "cut/a.jpg": photos["photos/ant/0.jpg"],
    }
    write_clips(root / "words", 1)
    (root / "empty").mkdir()
    write_files(root, {"file": b"x", "deep/a.png": png16(TWELVE[..., None], 0)})
    return write_files(root, photos | broken | cut)


ROWS = [
    ("there are at most", "convert photos out --format mds --part 1/1000"),
    ("excludes --overwrite", "convert photos out --format mds --part 1/2 --overwrite"),
    ("excludes --overwrite and --verify", "convert photos out --format mds --part 1/2 --verify"),
    ("--merge DST takes only --verify", "convert photos out --merge x"),
    ("takes only --verify", "convert --merge x --source flat"),
    ("has no parts", "convert --merge x"),
    ("is missing; --help shows examples", "convert photos out"),
    ("--shard-mb 0", "convert photos out --format mds --shard-mb 0"),
    ("--max-side 0", "convert photos out --format mds --max-side 0"),
    ("--quality 101", "convert photos out --format mds --quality 101"),
    ("--workers 0", "convert photos out --format mds --workers 0"),
    ("--val-fraction 1", "convert photos out --format mds --val-fraction 1"),
    (r"must end in \.beton", "convert photos out --format ffcv"),
    ("has no image", "convert empty out --format mds"),
    ("is a file", "convert file out --format mds"),
    (r"cut\.jpg cannot be read", "convert cut out --format mds --workers 1 --strict"),
    ("none of the 4 samples can be read", "convert broken out --format mds --workers 1"),
    ("cannot write", "convert photos file/out --format mds --workers 1"),
    ("DST file is a file; choose another name", "convert photos file --format mds --workers 1"),
    ("DST '' has no name", "convert photos '' --format mds"),
    ("only MDS shards can go to a bucket", "convert photos s3://bucket/a.beton --format ffcv"),
    ("gs://bucket/out", "convert photos gs://bucket/out --format mds"),
    ("write s3://bucket/folder", "convert photos s3:/bucket/photos --format mds"),
    ("write s3://bucket/folder", "convert s3:/bucket/photos out --format mds"),
    ("s3://bucket/photos is an address, but a path", "convert s3://bucket/photos out --format mds"),
    ("write s3://bucket/folder", "scenes s3:/bucket/photos"),
    ("LOW below HIGH", "convert deep out --format mds --deep-range=5,5"),
    ("--deep-range is 'wide'; give auto, or", "convert deep out --format mds --deep-range=wide"),
    ("--channels 0 is out of range", "convert deep out --format mds --channels 0"),
    (r"a\.png: it has the shape 32 x 48 x 1, but 6 channels are needed",
     "convert deep out --format mds --channels 6 --workers 1"),
    ("--format mds", "convert words words.beton --format ffcv"),
    ("--seekable is for JPEGs", "convert words out --format mds --seekable"),
    ("--frames 98 is for clips", "convert photos out --format mds --frames 98"),
    ("--keywords yes is for clips", "convert photos out --format mds --keywords yes"),
    ("--num-images", "scenes out --num-images 0"),
    ("--frames", "scenes out --frames 0"),
    ("--workers", "scenes out --workers 0"),
    ("must end in .png", "statistics photos --picture x.txt"),
    ("is not a writable folder", "statistics photos --picture file/x.png"),
    ("is a folder of images", "verify photos"),
    ("nowhere", "verify nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "line"), ROWS)
def test_a_mistake_is_said_and_writes_nothing(
    words: str, line: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    command, *arguments = shlex.split(line)
    refuses(words, lambda: COMMANDS[command](arguments), folder)
