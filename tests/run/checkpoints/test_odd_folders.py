"""One bad file among checkpoints: named and passed over, wherever it lies and whatever it is."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from pospre.errors import Unreachable
from pospre.run.checkpoints.file import DamagedCheckpoint, write_checkpoint
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.mirror import restore_run
from tests.data.flaky_s3 import Fault, FlakyS3, flaky_s3, use_bucket
from tests.run.checkpoints.hostile import CONTENT
from tests.test_untrusted_json import DEEP

REMOTE = "s3://bucket/odd"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with one good checkpoint."""
    write_checkpoint(CONTENT, tmp_path / "ep0-ba2.pt")
    return tmp_path


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda path: path.symlink_to("nowhere"), "does not exist"),
        (os.mkfifo, "is no regular file"),  # it waited for ever
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (Path.mkdir, "is no regular file"),
    ],
)
def test_what_is_no_file_is_passed_over(
    spoil: Callable[[Path], Any], said: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = folder / "ep9-ba999.pt"
    spoil(path)
    newest = open_newest([str(folder)])
    assert newest is not None and newest.uri == f"{folder}/ep0-ba2.pt"
    assert f"warning: checkpoint {path} {said}; passed over\n" in capfd.readouterr().err


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"bytes": Infinity, "sha256": "a"}',
        b'{"bytes": 1e999, "sha256": "a"}',
        b'{"bytes": [], "sha256": "a"}',
        b"[1]",
        b"\xff",
        DEEP.encode(),
    ],
)
@pytest.mark.parametrize("name", ["ep1-ba4.json", "ep1-ba4/manifest.json"])
def test_a_bad_manifest_is_passed_over(
    name: str, manifest: bytes, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if name.startswith("ep1-ba4/"):
        (folder / "ep1-ba4").mkdir()
    else:
        write_checkpoint(CONTENT, folder / "ep1-ba4.pt")
    (folder / name).write_bytes(manifest)
    newest = open_newest([str(folder)])
    assert newest is not None and newest.uri == f"{folder}/ep0-ba2.pt"
    assert "its manifest is damaged; passed over" in capfd.readouterr().err


@pytest.fixture(scope="module")
def proxy() -> Iterator[FlakyS3]:
    with flaky_s3() as flaky:
        yield flaky


@pytest.fixture
def bucket(proxy: FlakyS3, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fill a bucket with two good checkpoints; give a client of it."""
    proxy.heal()
    use_bucket(monkeypatch, proxy.url, patience=3)
    client: Any = boto3.client("s3", endpoint_url=proxy.upstream)
    client.create_bucket(Bucket="bucket")
    write_checkpoint(CONTENT, folder / "ep1-ba4.pt")
    for path in folder.iterdir():
        client.upload_file(str(path), "bucket", f"odd/{path.name}")
    return client


@pytest.mark.parametrize(("name", "has_sums"), [("ep1-ba4.pt", False), ("ep1-ba4.json", True)])
def test_bits_that_change_on_the_way_are_fetched_again(
    name: str, has_sums: bool, bucket: Any, proxy: FlakyS3, capfd: pytest.CaptureFixture[str]
) -> None:
    proxy.is_tagless = not has_sums
    proxy.spoil(name, Fault(flip=True))
    newest = open_newest([REMOTE])
    assert newest is not None and newest.uri == f"{REMOTE}/ep1-ba4.pt"
    assert proxy.gets[name] == 2 and "warning" not in capfd.readouterr().err
    proxy.spoil_always(name, Fault(flip=True))
    newest = open_newest([REMOTE])
    assert newest is not None and newest.uri == f"{REMOTE}/ep0-ba2.pt"
    assert proxy.gets[name] == 4 and "damaged" in capfd.readouterr().err
    with pytest.raises(DamagedCheckpoint):
        read_checkpoint(f"{REMOTE}/ep1-ba4.pt")


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
