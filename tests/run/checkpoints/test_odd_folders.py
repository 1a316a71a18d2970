"""One bad file among checkpoints: named and passed over, wherever it lies and whatever it is."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.errors import Unreachable, UserError
from pospre.run.checkpoints import reading
from pospre.run.checkpoints.files import DamagedCheckpoint
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.folder import restore_run
from tests.data.flaky_s3 import Fault, FlakyS3
from tests.disk import snapshot
from tests.run.checkpoints.checkpoint_files import CONTENT, holding, shard, write_checkpoint
from tests.test_untrusted_json import DEEP

REMOTE = "s3://bucket/odd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one good checkpoint."""
    write_checkpoint(CONTENT, tmp_path / "ep0-ba2")
    return tmp_path


@pytest.mark.parametrize("name", ["manifest.json", "state.json"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.symlink_to("nowhere"),
        os.mkfifo,  # it waited for ever
        lambda path: path.symlink_to("/dev/zero"),
        Path.mkdir,
    ],
)
def test_what_is_no_file_is_passed_over(
    spoil: Callable[[Path], Any], name: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "ep9-ba999"
    write_checkpoint(CONTENT, path)
    (path / name).unlink()
    spoil(path / name)
    newest = open_newest([str(folder)])
    assert newest is not None and newest.uri == f"{folder}/ep0-ba2"
    said = f"warning: {path} is an incomplete checkpoint: it lacks {name}; passed over\n"
    assert capfd.readouterr().err in (said, "")  # a link to nowhere is no manifest at all
    assert read_checkpoint(str(folder / "ep0-ba2")).sha256 == newest.sha256


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"files": [{"file": "state.json", "bytes": Infinity, "sha256": "a"}]}',
        b'{"files": [{"file": "state.json", "bytes": 1e999, "sha256": "a"}]}',
        b'{"files": [{"file": "state.json", "bytes": [], "sha256": "a"}]}',
        b'{"files": [{"file": "rank0-0a1b2c3d.safetensors", "bytes": 1, "sha256": "a"}]}',
        b"[1]",
        b"\xff",
        DEEP.encode(),
    ],
)
def test_a_bad_manifest_is_passed_over(
    manifest: bytes, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "ep1-ba4").mkdir()
    (folder / "ep1-ba4" / "manifest.json").write_bytes(manifest)
    newest = open_newest([str(folder)])
    assert newest is not None and newest.uri == f"{folder}/ep0-ba2"
    assert "its manifest is damaged; passed over" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error"), "cannot be read: Input/output error"),
        (MemoryError(), "cannot be read: it does not fit into the memory"),
        (UserError("access is denied"), "access is denied"),  # as a bucket says of one object
    ],
)
def test_what_cannot_be_read_is_passed_over(
    error: Exception,
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    write_checkpoint(CONTENT, folder / "ep9-ba999")
    read = reading._read_files

    def fails(place: str, *given: Any) -> dict[str, bytes]:
        if place.endswith("ep9-ba999"):
            raise error
        return read(place, *given)

    monkeypatch.setattr(reading, "_read_files", fails)
    newest = open_newest([str(folder)])
    assert newest is not None and newest.uri == f"{folder}/ep0-ba2"
    assert f"{said}; passed over" in capfd.readouterr().err
    monkeypatch.setattr(os, "listdir", lambda _: fails("/ep9-ba999"))
    if isinstance(error, OSError):
        with pytest.raises(UserError, match=f"{folder} cannot be read: Input/output error"):
            open_newest([str(folder)])


@pytest.fixture
def bucket(bucket: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fill the bucket with two good checkpoints; give a client of it."""
    monkeypatch.setenv("POSPRE_S3_PATIENCE", "3")
    write_checkpoint(holding({"a": torch.ones(3)}), folder / "ep1-ba4")
    for name, content in snapshot(folder).items():
        bucket.put_object(Bucket="bucket", Key=f"odd/{name}", Body=content)
    return bucket


@pytest.mark.parametrize("has_sums", [False, True])
def test_bits_that_change_on_the_way_are_fetched_again(
    has_sums: bool, bucket: Any, folder: Path, proxy: FlakyS3, capfd: pytest.CaptureFixture[str]
) -> None:
    proxy.is_tagless = not has_sums
    tensors = shard(folder / "ep1-ba4").name
    for name in ("manifest.json", tensors):
        before = proxy.gets[name]
        proxy.spoil(name, Fault(flip=True))
        newest = open_newest([REMOTE])
        assert newest is not None and newest.uri == f"{REMOTE}/ep1-ba4"
        assert proxy.gets[name] == before + 2 and "warning" not in capfd.readouterr().err
    proxy.spoil_always(tensors, Fault(flip=True))
    newest = open_newest([REMOTE])
    assert newest is not None and newest.uri == f"{REMOTE}/ep0-ba2"
    assert "damaged" in capfd.readouterr().err
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(f"{REMOTE}/ep1-ba4")


def test_a_list_that_changes_on_the_way_is_no_traceback(
    bucket: Any, proxy: FlakyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = b"<Size>"
    ask = "_ask_upstream"
    handler = proxy._server.RequestHandlerClass
    answer = getattr(handler, ask)

    def changed(self: Any, *given: Any, **more: Any) -> Any:
        status, headers, body = answer(self, *given, **more)
        return status, headers, body.replace(listed, listed + b"x")

    monkeypatch.setattr(handler, ask, changed)
    with pytest.raises(Unreachable, match="the list of objects is damaged"):
        open_newest([REMOTE])


@pytest.mark.parametrize("line", ["[1]", '{"step": "2"}', DEEP, '{"step": Infinity}', "3"])
def test_a_last_line_that_is_no_step_keeps_the_others(line: str, bucket: Any, folder: Path) -> None:
    bucket.put_object(Bucket="bucket", Key="odd/metrics.jsonl", Body=f'{{"step": 5}}\n{line}')
    (folder / "metrics.jsonl").write_text(f'{{"step": 3}}\n{line}')
    restore_run(folder, REMOTE)
    assert (folder / "metrics.jsonl").read_text() == f'{{"step": 5}}\n{line}'
