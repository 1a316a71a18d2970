"""Damaged, swapped and malicious checkpoints: named, passed over, never executed, never step 0."""

import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import State
from composer.loggers import Logger

from pospre.run import run as door
from pospre.run.checkpoints import reading
from pospre.run.checkpoints.files import DamagedCheckpoint
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.training.build import load_model
from tests.disk import flip, snapshot
from tests.refusals import refuses
from tests.run.checkpoints.checkpoint_files import forge, shard, write_checkpoint
from tests.training.tiny_runs import SHORT, Run, curve

TERABYTES = 1 << 42


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def folder(trained: Path) -> Path:
    """Return the checkpoints of a run that was killed after its fifth step."""
    folder = trained / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["ep0-ba2", "ep1-ba4", "ep1-ba6"]
    shutil.rmtree(folder / "ep1-ba6")
    return folder


def test_a_manifest_says_what_was_written(folder: Path) -> None:
    newest = folder / "ep1-ba4"
    noted = json.loads((newest / "manifest.json").read_text())
    sizes = {path.name: path.stat().st_size for path in newest.iterdir()}
    del sizes["manifest.json"]
    assert {item["file"]: item["bytes"] for item in noted["files"]} == sizes
    assert sizes.keys() == {"state.json", shard(newest).name}
    assert noted["versions"] == read_checkpoint(str(newest)).content["versions"]


def test_what_is_damaged_is_passed_over(
    folder: Path,
    six_steps: Path,
    tiny: Path,
    run: Run,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    newest, good = folder / "ep1-ba4", tmp_path / "good"
    shutil.copytree(newest, good)
    tensors, manifest, state = shard(newest), newest / "manifest.json", newest / "state.json"
    noted, size = manifest.read_text(), shard(newest).stat().st_size

    def claims_terabytes() -> None:
        os.truncate(tensors, TERABYTES)
        manifest.write_text(noted.replace(f'"bytes": {size}', f'"bytes": {TERABYTES}'))

    damages: list[tuple[str, Callable[[], Any]]] = [
        (f"{tensors.name} has 0 bytes, {size} were written", lambda: tensors.write_bytes(b"")),
        # sparse: no place on the disk, and more than the memory of any machine
        (f"{tensors.name} has {TERABYTES} bytes", lambda: os.truncate(tensors, TERABYTES)),
        (f"state.json has {TERABYTES} bytes", lambda: os.truncate(state, TERABYTES)),
        (f"manifest is damaged: it has {TERABYTES}", lambda: os.truncate(manifest, TERABYTES)),
        ("of memory are available; passed over", claims_terabytes),
        (f"lacks {tensors.name}", tensors.unlink),
        ("its manifest is damaged", lambda: manifest.write_text("{")),
        *(
            ("its manifest is damaged", lambda to=to: manifest.write_text(to))
            for to in (noted.replace(tensors.name, name) for name in ("../../secret", "a" * 300))
        ),
        ("has no recipe", lambda: forge(newest, state.name, b'{"content": {}, "types": []}')),
        (
            "its content is not valid (ValueError: it is not UTF-8",
            lambda: forge(newest, state.name, b"\x80\x02]q\0."),
        ),
        # as a careless copy leaves them; by chance, both may have as many bytes
        ("state.json", lambda: shutil.copy(folder / "ep0-ba2" / state.name, newest)),
        *(
            (f"SHA-256 of {path.name}", lambda path=path, place=place: flip(path, place))
            for path in (tensors, state)
            for place in (0, path.stat().st_size // 2, path.stat().st_size - 8)
        ),
    ]
    for said, damage in damages:
        damage()
        found = open_newest([str(folder)])
        assert found is not None and found.uri == f"{folder}/ep0-ba2", said
        warned = capfd.readouterr().err
        assert warned.startswith(f"warning: {newest}") and said in warned, warned
        with pytest.raises(DamagedCheckpoint):
            load_model(str(newest))  # named itself, there is nothing to fall back to
        shutil.rmtree(newest)
        shutil.copytree(good, newest)
    # one that was not finished is none, and is removed
    manifest.unlink()
    assert [found.uri for found in checkpoints_in(str(folder))] == [f"{folder}/ep0-ba2"]
    stale = newest / "rank1-0a1b2c3d.safetensors"
    stale.write_bytes(b"of a killed save")
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"resuming from {folder}/ep0-ba2\n" in said and not stale.exists()
    assert curve(folder.parent) == curve(six_steps)


def test_a_run_goes_on_from_the_newest_that_is_not_malicious(
    folder: Path, six_steps: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    path, proof = folder / "ep1-ba4", tmp_path / "executed"
    for name in (shard(path).name, "state.json"):
        forge(path, name, pickle.dumps({"state": Payload(proof)}))
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"warning: {path}" in said and "passed over" in said
    assert f"resuming from {folder}/ep0-ba2" in said and "Traceback" not in said
    assert curve(folder.parent) == curve(six_steps)
    assert not proof.exists()
    ours, theirs = (load_model(str(place))[0] for place in (folder.parent, six_steps))
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key


def test_a_run_that_is_stopped_before_a_damaged_one_names_what_it_has_saved(
    folder: Path, tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(shard(folder / "ep1-ba4"), 5000)

    class Told(CheckpointSaver):
        def batch_start(self, state: State, logger: Logger) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(door, "CheckpointSaver", Told)
    code, said = run(tiny, *SHORT)
    assert code == 75 and re.search(rf"after step 3 of 6, saved in {folder}/ep\d-ba3;", said)


def test_none_usable_is_an_error_and_nothing_is_overwritten(
    folder: Path, tiny: Path, run: Run
) -> None:
    for path in folder.iterdir():
        flip(shard(path), shard(path).stat().st_size // 2)
    before = snapshot(folder.parent)
    for _ in range(2):
        code, said = run(tiny, *SHORT)
        assert code == 2 and f"no checkpoint in {folder} can be used" in said
        assert "ep1-ba4 is damaged" in said and "Restore one" in said
    assert before == snapshot(folder.parent)
    refuses("can be used", lambda: load_model(str(folder.parent)))


def test_what_was_checked_is_what_is_loaded(
    folder: Path,
    six_steps: Path,
    tiny: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    newest, proof = folder / "ep1-ba4", tmp_path / "executed"
    assemble = reading.assemble

    def swap(*arguments: Any) -> Any:
        for path in newest.iterdir():
            path.write_bytes(pickle.dumps(Payload(proof)))
        return assemble(*arguments)

    monkeypatch.setattr(reading, "assemble", swap)
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"resuming from {newest}" in said and not proof.exists()
    assert curve(folder.parent) == curve(six_steps)
    assert b"mkdir" in (newest / "state.json").read_bytes()  # it was swapped indeed


def test_what_a_file_says_of_algorithms_is_not_evaluated(
    folder: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    path, proof = folder / "ep1-ba4", tmp_path / "executed"
    content = read_checkpoint(str(path)).content
    text = f"__builtins__['__import__']('os').mkdir({str(proof)!r})"
    content["state"]["algorithms"].append(("BlurPool", {"repr": text}))
    content["state"]["_algorithms"] = content["state"]["algorithms"]  # its name long ago
    write_checkpoint(content, path)
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"resuming from {path}" in said, said
    assert not proof.exists()
