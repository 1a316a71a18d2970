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

from pospre.errors import UserError
from pospre.run import run as door
from pospre.run.checkpoints import reading
from pospre.run.checkpoints.files import DamagedCheckpoint
from pospre.run.checkpoints.folders import checkpoints_in
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.training.build import load_model
from tests.disk import flip
from tests.run.checkpoints.checkpoint_files import forge, shard, write_checkpoint
from tests.run.checkpoints.hostile import CONTENT, Global, with_state
from tests.training.tiny_runs import SHORT, Run, contents, curve


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
    assert sizes.keys() == {"rest.pt", ".metadata", shard(newest).name}
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
    tensors, manifest = shard(newest), newest / "manifest.json"
    named = manifest.read_text().replace(tensors.name, "../../secret")
    damages: dict[str, Callable[[], Any]] = {
        "0 bytes, ": lambda: tensors.write_bytes(b""),
        f"lacks {tensors.name}": tensors.unlink,
        "its manifest is damaged": lambda: manifest.write_text("{"),
        "its manifest is damaged; ": lambda: manifest.write_text(named),
        # as a careless copy leaves them
        "is not the one": lambda: shutil.copy(folder / "ep0-ba2" / "rest.pt", newest),
    }
    for path in (tensors, newest / "rest.pt", newest / ".metadata"):
        size = path.stat().st_size
        for place in (0, size // 2, size - 8):
            said = f"SHA-256 of {path.name} " + " " * len(damages)  # each a key of its own
            damages[said] = lambda path=path, place=place: flip(path, place)  # type: ignore[misc]
    for said, damage in damages.items():
        damage()
        found = open_newest([str(folder)])
        assert found is not None and found.uri == f"{folder}/ep0-ba2", said
        warned = capfd.readouterr().err
        assert warned.startswith(f"warning: {newest}") and said.strip() in warned, warned
        with pytest.raises(DamagedCheckpoint):
            load_model(str(newest))  # named itself, there is nothing to fall back to
        shutil.rmtree(newest)
        shutil.copytree(good, newest)
    # one that was not finished is none, and is removed
    manifest.unlink()
    assert [found.uri for found in checkpoints_in(str(folder))] == [f"{folder}/ep0-ba2"]
    stale = newest / "abc__1_0.distcp"
    stale.write_bytes(b"of a killed save")
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"resuming from {folder}/ep0-ba2\n" in said and not stale.exists()
    assert curve(folder.parent) == curve(six_steps)


def test_a_run_goes_on_from_the_newest_that_is_not_malicious(
    folder: Path, six_steps: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    path, proof = folder / "ep1-ba4", tmp_path / "executed"
    torch.save({"state": Payload(proof)}, tmp_path / "forged")
    forge(path, "rest.pt", (tmp_path / "forged").read_bytes())
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


@pytest.mark.parametrize("form", ["zip", "legacy", "plain"])
def test_no_form_of_pickle_is_executed(
    form: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, path, proof = tmp_path / "ep0-ba2", tmp_path / "ep1-ba4", tmp_path / "executed"
    for each in (good, path):
        write_checkpoint(CONTENT, each)
    content = {"state": {"callbacks": {"RecipeRecord": Payload(proof)}}}
    forged = tmp_path / "forged"
    if form == "plain":
        forged.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, forged, _use_new_zipfile_serialization=form == "zip")
    forge(path, "rest.pt", forged.read_bytes())  # with the manifest, as those who swap files may
    newest = open_newest([str(tmp_path)])
    assert newest is not None and newest.uri == str(good)
    said = capfd.readouterr().err
    assert f"warning: {path}/rest.pt is" in said and "weights_only" not in said
    assert not proof.exists()
    if form == "plain":
        pickle.loads(forged.read_bytes())
    else:
        torch.load(forged, weights_only=False)
    assert proof.exists()  # it would have been


@pytest.mark.parametrize("part", ["metadata", "inside", "bytes", "shard"])
def test_nothing_that_describes_tensors_is_executed(
    part: str, folder: Path, tmp_path: Path
) -> None:
    newest, proof = folder / "ep1-ba4", tmp_path / "executed"
    described = pickle.loads((newest / ".metadata").read_bytes())
    name, content = ".metadata", pickle.dumps(Payload(proof))
    if part == "inside":
        described.planner_data = Payload(proof)
        content = pickle.dumps(described)
    elif part == "bytes":  # what torch's own reader would unpickle freely, in place of a tensor
        key = next(iter(described.state_dict_metadata))
        described.state_dict_metadata[key] = torch.distributed.checkpoint.BytesStorageMetadata()
        content = pickle.dumps(described)
    elif part == "shard":  # in the place of the first tensor
        name = shard(newest).name
        first = min(described.storage_data.values(), key=lambda info: info.offset)
        spoilt = pickle.dumps(Payload(proof), protocol=2)
        content = (newest / name).read_bytes()
        content = spoilt.ljust(first.length, b"\0") + content[first.length :]
    forge(newest, name, content)
    with pytest.raises(DamagedCheckpoint, match=r"nothing in it was executed"):
        read_checkpoint(str(newest))
    assert not proof.exists()
    if part in ("metadata", "inside"):
        pickle.loads(content)
        assert proof.exists()  # it would have been


def test_a_poisoned_description_leaves_older_ones_readable(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    newest = folder / "ep1-ba4"
    kind = Global("torch.distributed.checkpoint.metadata", "TensorStorageMetadata")
    forge(newest, ".metadata", with_state(kind, (None, {"__setstate__": None})))
    found = open_newest([str(folder)])
    assert found is not None and found.uri == f"{folder}/ep0-ba2"
    assert f"warning: {newest} is damaged" in capfd.readouterr().err


def test_none_usable_is_an_error_and_nothing_is_overwritten(
    folder: Path, tiny: Path, run: Run
) -> None:
    for path in folder.iterdir():
        flip(shard(path), shard(path).stat().st_size // 2)
    before = contents(folder.parent)
    for _ in range(2):
        code, said = run(tiny, *SHORT)
        assert code == 2 and f"no checkpoint in {folder} can be used" in said
        assert "ep1-ba4 is damaged" in said and "Restore one" in said
    assert before == contents(folder.parent)
    with pytest.raises(UserError, match="can be used"):
        load_model(str(folder.parent))


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
    assert b"mkdir" in (newest / ".metadata").read_bytes()  # it was swapped indeed


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


def test_a_checkpoint_without_training_state_is_refused(folder: Path, tiny: Path, run: Run) -> None:
    path = folder / "ep1-ba4"
    content = read_checkpoint(str(path)).content
    del content["state"]["timestamp"]
    write_checkpoint(content, path)
    code, said = run(tiny, *SHORT)
    assert code == 2 and "no 'timestamp'" in said
