import json
import shutil
from pathlib import Path

import pytest

from pospre.data.opening import open_reader
from tests.data_prep.reading import FORMATS, Says, call, destination, partial, run
from tests.data_prep.sample_images import encoded, odd_files, picture, write_files
from tests.disk import flip, snapshot


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Images of many kinds; one of them cannot be read."""
    more = {f"plain/{number}.jpg": encoded(picture(number)) for number in range(20)}
    return write_files(tmp_path / "source", odd_files() | more | {"odd/empty.jpg": b""})


def write(source: Path, target: Path, *options: object, shard_mb: float = 0.016) -> int:
    return run(source, target, "--shard-mb", shard_mb, *options)


@pytest.mark.parametrize("data_format", FORMATS)
def test_merged_parts_are_the_whole(
    tmp_path: Path, source: Path, data_format: str, printed: Says
) -> None:
    whole = destination(tmp_path / "whole", data_format)
    target = destination(tmp_path / "parts", data_format)
    assert write(source, whole, "--workers", 3) == 0
    for number in (3, 1, 2):
        assert f"wrote part {number}/3 of {target}" in printed(
            write, source, target, "--part", f"{number}/3"
        )
        assert not target.exists()
    assert "ok: 35 decoded" in printed(call, "--merge", target, "--verify")
    assert snapshot(target.parent) == snapshot(whole.parent)
    before = snapshot(target.parent)
    assert "already holds this conversion" in printed(call, "--merge", target)
    assert snapshot(target.parent) == before
    # a part that comes late changes nothing
    assert write(source, target, "--part", "2/3") == 0
    assert snapshot(target.parent) == before
    reader = open_reader(target)
    assert len(reader) == 35 and reader.classes == ["odd", "plain"]
    if data_format == "mds":
        assert len(json.loads((target / "index.json").read_text())["shards"]) > 3


def test_parts_of_machines_without_a_shared_disk(tmp_path: Path, source: Path) -> None:
    for number in (1, 2):
        assert write(source, tmp_path / str(number) / "out", "--part", f"{number}/2") == 0
    for number in (1, 2):
        there = partial(tmp_path / str(number) / "out")
        shutil.copytree(there, partial(tmp_path / "all" / "out"), dirs_exist_ok=True)
    assert call("--merge", tmp_path / "all" / "out") == 0
    assert write(source, tmp_path / "whole" / "out") == 0
    assert snapshot(tmp_path / "all") == snapshot(tmp_path / "whole")


def test_missing_parts_are_named(tmp_path: Path, source: Path, refused: Says) -> None:
    target = tmp_path / "out"
    assert write(source, target, "--part", "2/4") == 0
    message = refused(call, "--merge", target)
    assert "lacks part 1/4, 3/4, 4/4 (blocks 1" in message and message.count("\n") == 1
    for number in (1, 3, 4):
        assert write(source, target, "--part", f"{number}/4") == 0
    shard = sorted(partial(target).glob("data/shard.*"))[0]
    shard.write_bytes(shard.read_bytes()[:-1])  # a copy that was cut short
    assert "lacks part 1/4 (blocks 1 of" in refused(call, "--merge", target)
    assert write(source, target, "--part", "1/4") == 0
    assert call("--merge", target) == 0


def test_foreign_parts_are_refused(tmp_path: Path, source: Path, refused: Says) -> None:
    target, other = tmp_path / "out", tmp_path / "other"
    assert write(source, target, "--part", "1/2") == 0
    assert "another conversion (made with quality=90 instead of 50)" in refused(
        write, source, target, "--part", "2/2", "--quality", 50
    )
    write_files(source, {"odd/alpha.png": encoded(picture(77))})
    assert "(made from other images or older versions of them)" in refused(
        write, source, target, "--part", "2/2"
    )
    assert write(source, other, "--part", "2/2") == 0
    shutil.copytree(partial(other), partial(target), dirs_exist_ok=True)
    assert "lacks part 1/2 (blocks 1" in refused(call, "--merge", target)
    assert not target.exists()


def test_a_damaged_shard_is_found(tmp_path: Path, source: Path, refused: Says) -> None:
    target = destination(tmp_path, "ffcv")
    for number in (1, 2):
        assert write(source, target, "--part", f"{number}/2") == 0
    shard = max(partial(target).glob("data/shard.*"), key=lambda path: path.stat().st_size)
    flip(shard, 100)
    assert f"{shard} has changed since it was written" in refused(call, "--merge", target)
    assert not target.exists()


def test_nothing_can_be_read_in_any_part(tmp_path: Path, refused: Says) -> None:
    source = write_files(tmp_path / "source", {f"{number}.jpg": b"" for number in range(4)})
    for number in (1, 2):
        assert write(source, tmp_path / "out", "--part", f"{number}/2", shard_mb=0.2) == 0
    assert "none of the 4 samples can be read (0.jpg: the file is empty)" in refused(
        call, "--merge", tmp_path / "out"
    )
