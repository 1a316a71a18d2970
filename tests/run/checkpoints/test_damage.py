"""Damaged, swapped and malicious checkpoints: named, passed over, never executed, never step 0."""

import hashlib
import json
import os
import pickle
import re
import shutil
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import State
from composer.loggers import Logger

from pospre.errors import UserError
from pospre.run import run as door
from pospre.run.checkpoints import reading as checkpoint_reading
from pospre.run.checkpoints.file import write_checkpoint
from pospre.run.checkpoints.reading import open_newest, read_checkpoint
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.training.trained import load_model
from tests.run.checkpoints.hostile import CONTENT
from tests.training.tiny_runs import SHORT, Run, contents, curve


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.proof),)


@pytest.fixture
def folder(tiny: Path, run: Run, tmp_path: Path) -> Path:
    """Return the checkpoints of a run that was killed after its fifth step."""
    assert run(tiny, *SHORT)[0] == 0
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    assert [path.name for path in sorted(folder.glob("*.pt"))] == CHECKPOINTS
    shutil.copytree(tmp_path / "runs" / "tiny", tmp_path / "whole")
    (folder / "ep1-ba6.pt").unlink()
    return folder


CHECKPOINTS = ["ep0-ba2.pt", "ep1-ba4.pt", "ep1-ba6.pt"]


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)


def test_a_manifest_says_what_was_written(folder: Path) -> None:
    noted = json.loads((folder / "ep1-ba4.json").read_text())
    assert (noted["file"], noted["bytes"]) == (
        "ep1-ba4.pt",
        (folder / "ep1-ba4.pt").stat().st_size,
    )
    assert read_checkpoint(str(folder / "ep1-ba4.pt")).sha256 == noted["sha256"]


def test_every_flipped_bit_is_found(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, manifest = folder / "ep1-ba4.pt", folder / "ep1-ba4.json"
    good, size = path.read_bytes(), path.stat().st_size
    weights = read_checkpoint(str(path)).content["state"]["model"]
    for place in (0, 30, 90, 2000, size // 4, size // 2, size - 5000, size - 300, size - 8):
        flip(path, place)
        newest = open_newest([str(folder)])
        assert newest is not None and newest.uri.endswith("ep0-ba2.pt"), place
        assert f"{path} is damaged" in capfd.readouterr().err
        path.write_bytes(good)
    # files of older versions have no manifest: what is accepted is what was written
    manifest.unlink()
    found = 0
    for place in range(1, size, size // 25):
        flip(path, place)
        newest = open_newest([str(folder)])
        assert newest is not None
        if newest.uri.endswith("ba4.pt"):  # in the padding
            for key, tensor in newest.content["state"]["model"].items():
                assert torch.equal(tensor, weights[key]), (place, key)
        else:
            found += 1
        path.write_bytes(good)
    assert found > 20
    # an older file and a newer manifest, as a careless copy leaves them
    shutil.copy(folder / "ep0-ba2.json", manifest)
    with pytest.raises(UserError, match="SHA-256 is not the one in its manifest"):
        load_model(str(path))


@pytest.mark.parametrize("kind", ["cut", "malicious"])
def test_a_run_goes_on_from_the_newest_whole_one(
    kind: str, folder: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    path, proof = folder / "ep1-ba4.pt", tmp_path / "executed"
    spoil(path, kind, proof)
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"warning: {path}" in said and "passed over" in said
    assert f"going on from {folder}/ep0-ba2.pt" in said and "Traceback" not in said
    assert curve(folder.parent) == curve(tmp_path / "whole")
    assert not proof.exists()
    ours, theirs = (load_model(str(place))[0] for place in (folder.parent, tmp_path / "whole"))
    for key, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[key]), key


def test_a_run_that_is_stopped_before_a_damaged_one_names_what_it_has_saved(
    folder: Path, tiny: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(folder / "ep1-ba4.pt", 5000)

    class Told(CheckpointSaver):
        def batch_start(self, state: State, logger: Logger) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(door, "CheckpointSaver", Told)
    code, said = run(tiny, *SHORT)
    assert code == 75 and re.search(rf"after step 3 of 6, saved in {folder}/ep\d-ba3\.pt", said)


def spoil(path: Path, kind: str, proof: Path) -> None:
    if kind == "malicious":
        path.with_suffix(".json").unlink()
        torch.save({"state": Payload(proof)}, path)
    else:
        path.write_bytes(path.read_bytes()[:-5000])


@pytest.mark.parametrize("has_manifest", [True, False])
@pytest.mark.parametrize("form", ["zip", "legacy", "plain"])
def test_no_form_of_pickle_is_executed(
    form: str, has_manifest: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good, path, proof = tmp_path / "ep0-ba2.pt", tmp_path / "ep1-ba4.pt", tmp_path / "executed"
    write_checkpoint(CONTENT, good)
    content = {"state": {"callbacks": {"RecipeRecord": Payload(proof)}}}
    if form == "plain":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=form == "zip")
    if has_manifest:  # whoever swaps the file can swap this as well
        noted = {"bytes": 0, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        path.with_suffix(".json").write_text(json.dumps(noted))
    newest = open_newest([str(tmp_path)])
    assert newest is not None and newest.uri == str(good)
    said = capfd.readouterr().err
    assert f"warning: {path} is" in said and "weights_only" not in said
    assert not proof.exists()
    if form == "plain":
        pickle.loads(path.read_bytes())
    else:
        torch.load(path, weights_only=False)
    assert proof.exists()  # it would have been


def test_none_usable_is_an_error_and_nothing_is_overwritten(
    folder: Path, tiny: Path, run: Run
) -> None:
    for path in folder.glob("*.pt"):
        flip(path, path.stat().st_size // 2)
    before = contents(folder.parent)
    for _ in range(2):
        code, said = run(tiny, *SHORT)
        assert code == 2 and f"no checkpoint in {folder} can be used" in said
        assert "ep1-ba4.pt is damaged" in said and "Bring one back" in said
    assert before == contents(folder.parent)
    with pytest.raises(UserError, match="can be used"):
        load_model(str(folder.parent))
    with pytest.raises(UserError, match=r"ep0-ba2.pt is damaged"):
        load_model(str(folder / "ep0-ba2.pt"))  # named itself, there is nothing to fall back to


def test_a_file_swapped_after_the_check_is_not_loaded(
    folder: Path, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, proof = folder / "ep1-ba4.pt", tmp_path / "executed"
    verify = checkpoint_reading.verify

    def swap(*arguments: Any) -> str:
        sha256 = verify(*arguments)
        torch.save({"state": Payload(proof)}, path)
        return sha256

    monkeypatch.setattr(checkpoint_reading, "verify", swap)
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"going on from {path}" in said and not proof.exists()
    assert curve(folder.parent) == curve(tmp_path / "whole")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)  # it was swapped indeed
    torch.load(path, weights_only=False)
    assert proof.exists()


def test_what_a_file_says_of_algorithms_is_not_evaluated(
    folder: Path, tiny: Path, run: Run, tmp_path: Path
) -> None:
    path, proof = folder / "ep1-ba4.pt", tmp_path / "executed"
    content = read_checkpoint(str(path)).content
    text = f"__builtins__['__import__']('os').mkdir({str(proof)!r})"
    content["state"]["algorithms"].append(("BlurPool", {"repr": text}))
    content["state"]["_algorithms"] = content["state"]["algorithms"]  # its name long ago
    torch.save(content, path)
    path.with_suffix(".json").unlink()
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"going on from {path}" in said, said
    assert not proof.exists()


def test_a_checkpoint_without_training_state_is_refused(folder: Path, tiny: Path, run: Run) -> None:
    path = folder / "ep1-ba4.pt"
    content = read_checkpoint(str(path)).content
    del content["state"]["timestamp"]
    torch.save(content, path)
    path.with_suffix(".json").unlink()
    code, said = run(tiny, *SHORT)
    assert code == 2 and "no 'timestamp'" in said


def test_checkpoints_of_older_versions_open(folder: Path, tiny: Path, run: Run) -> None:
    path = folder / "ep1-ba4.pt"
    content = read_checkpoint(str(path)).content
    content["state"]["callbacks"]["CheckpointSaver"] = {"all_saved_checkpoints_to_timestamp": []}
    content["state"]["callbacks"]["RunMirror"] = {}
    torch.save(content, path)
    for manifest in folder.glob("*.json"):
        manifest.unlink()
    assert zipfile.is_zipfile(path)
    code, said = run(tiny, *SHORT)
    assert code == 0 and f"going on from {path}" in said and "warning" not in said.lower(), said
