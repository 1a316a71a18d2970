"""What is not this conversion's own is neither removed nor mixed in."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from data_prep.plan.records import Record, parse
from data_prep.publish import atomic
from data_prep.publish.local import LocalDestination, LocalShards
from pospre.errors import UserError
from tests.data_prep.reading import FORMATS, Says, call, destination, partial, read_samples, run
from tests.data_prep.sample_images import write_files
from tests.disk import snapshot


def write(source: Path, target: Path, *options: object) -> int:
    """Convert in six blocks."""
    return run(source, target, "--shard-mb", 0.009, *options)


def free(target: Path, *kinds: str) -> list[str]:
    """Return the kinds of locks that others could hold; the lock is the open file's."""
    found = []
    for kind in kinds:
        try:
            with LocalShards(target).locked(shared=kind == "shared"):
                found.append(kind)
        except UserError as error:
            assert "; wait for it" in str(error)
    return found


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Convert, but press Ctrl-C when two blocks are finished."""
    keep = LocalDestination.keep

    def interrupted(source: Path, target: Path, *options: object) -> None:
        calls = []

        def stop(self: LocalDestination, folder: Path, record: Record) -> None:
            keep(self, folder, record)
            calls.append(record.number)
            if len(calls) == 2:
                raise KeyboardInterrupt

        monkeypatch.setattr(LocalDestination, "keep", stop)
        assert write(source, target, *options) == 130
        monkeypatch.undo()

    return interrupted


@pytest.mark.parametrize("options", [[], ["--overwrite"], ["--part", "1/2"]])
def test_a_folder_with_the_name_of_the_partial_one(
    tmp_path: Path, photos: Path, options: list[str], refused: Says
) -> None:
    target = tmp_path / "out"
    write_files(partial(target), {"thesis.tex": b"x", "data/figure.png": b"y"})
    before = snapshot(tmp_path)
    assert "move it away or choose another DST" in refused(write, photos, target, *options)
    assert snapshot(tmp_path) == before


def test_the_source_is_where_blocks_would_be_kept(tmp_path: Path, photos: Path) -> None:
    source = photos.rename(tmp_path / "out.partial")
    before = snapshot(tmp_path)
    for options in ([], ["--overwrite"]):
        assert write(source, tmp_path / "out", *options) == 2
        assert write(source / "ant", tmp_path / "out", *options) == 2
    assert snapshot(tmp_path) == before


def test_what_others_put_beside_finished_blocks_stays(tmp_path: Path, photos: Path) -> None:
    target = tmp_path / "out"
    assert write(photos, target, "--part", "1/1") == 0
    write_files(partial(target), {"notes.txt": b"x"})
    assert call("--merge", target) == 0
    assert len(read_samples(target)) == 12
    assert [path.name for path in partial(target).iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("data_format", FORMATS)
def test_merging_leaves_what_is_there(
    tmp_path: Path, photos: Path, data_format: str, refused: Says
) -> None:
    target = destination(tmp_path, data_format)
    assert write(photos, target, "--part", "1/1") == 0
    if data_format == "mds":
        write_files(target, {"precious.jpg": b"x"})
    else:
        target.write_bytes(b"precious")
    before = snapshot(tmp_path)
    assert f"{target} exists and was not made by this command" in refused(call, "--merge", target)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("options", [[], ["--overwrite"]])
def test_what_comes_during_the_conversion_is_left(
    tmp_path: Path, photos: Path, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, keep = tmp_path / "out", LocalDestination.keep

    def meanwhile(self: LocalDestination, folder: Path, record: Record) -> None:
        write_files(target, {"precious.jpg": b"x"})
        keep(self, folder, record)

    monkeypatch.setattr(LocalDestination, "keep", meanwhile)
    assert write(photos, target, *options) == 2
    assert [path.name for path in target.iterdir()] == ["precious.jpg"]
    assert len(list(partial(target).glob("*.*.json"))) == 6  # nor is the work lost


@pytest.mark.parametrize("name", ["thesis.tex", "sub.mds/thesis.tex"])
def test_overwrite_leaves_shards_that_do_not_lie_alone(
    tmp_path: Path, photos: Path, name: str, refused: Says
) -> None:
    target = tmp_path / "out"
    assert write(photos, target) == 0
    write_files(target, {name: b"x"})
    assert "with more than a data set" in refused(write, photos, target, "--overwrite")
    assert (target / name).read_bytes() == b"x"


def test_a_file_with_the_name_of_the_description(
    tmp_path: Path, photos: Path, refused: Says
) -> None:
    target = destination(tmp_path, "ffcv")
    notes = Path(f"{target}.json")
    notes.write_text('{"notes": "precious"}')
    assert f"{notes} " in refused(write, photos, target)
    assert notes.read_text() == '{"notes": "precious"}'
    assert not target.exists() and not partial(target).exists()


def test_unfinished_work_of_another_conversion_is_left(
    tmp_path: Path,
    photos: Path,
    interrupt: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    printed: Says,
) -> None:
    target, other = tmp_path / "out", ("--quality", 80, "--overwrite")
    assert write(photos, target) == 0
    interrupt(photos, target, *other)
    assert "2 of 6 blocks are finished and kept" in capsys.readouterr().err
    assert "already holds this conversion" in printed(write, photos, target)
    assert len(list(partial(target).glob("*.*.json"))) == 2
    # … and the same command resumes from there
    assert "2 of 6 blocks were already finished" in printed(write, photos, target, *other)
    # but not with other settings
    interrupt(photos, target, "--quality", 70, "--overwrite")
    assert "finished before" not in printed(write, photos, target, *other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_locks_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "_LOCK_SECONDS", 0)
    target = tmp_path / "out"
    store = LocalShards(target)
    with store.locked(shared=False):
        store.discard()  # takes no lock away
        assert free(target, "alone", "shared") == []
    with store.locked(shared=True):  # the other part takes no lock away, either
        assert free(target, "alone", "shared", "shared", "alone") == ["shared", "shared"]
    assert free(target, "alone") == ["alone"]
    assert not list(tmp_path.iterdir())


def test_an_old_data_set_comes_back_if_it_cannot_be_replaced(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "out", Path.rename
    assert write(photos, target) == 0
    before = snapshot(target)

    def fail(path: Path, to: Path) -> Path:
        if path == partial(target) / "data":
            raise PermissionError(13, "Permission denied")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    assert write(photos, target, "--quality", 80, "--overwrite") == 2
    monkeypatch.undo()
    assert snapshot(target) == before
    # one that was moved aside by a run that was killed then goes with the next
    old = tmp_path / "out.partial-old"
    target.rename(old)
    assert write(photos, target, "--quality", 80) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "photos"]


def test_work_of_an_older_version_is_not_gone_on_with(
    tmp_path: Path, photos: Path, refused: Says
) -> None:
    target = tmp_path / "out"
    assert write(photos, target, "--part", "1/2") == 0
    path = partial(target) / "plan.json"
    content = json.loads(path.read_text())
    content["version"] -= 1
    path.write_text(json.dumps(content))
    assert "(made by another version)" in refused(write, photos, target, "--part", "2/2")
    assert write(photos, target, "--overwrite") == 0


def test_a_record_without_checksums_is_damaged() -> None:
    with pytest.raises(UserError, match=r"0\.json is damaged; remove it"):
        parse(Record, b'{"number": 0, "key": "x", "labels": [1, 2]}', "0.json")
