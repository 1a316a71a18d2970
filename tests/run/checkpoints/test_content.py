"""Which checkpoint is the newest, and what is said about folders that are none."""

import shutil
from pathlib import Path

import pytest
import torch

from pospre.errors import Unreachable, UserError
from pospre.recipe.recipe import load_recipe
from pospre.run.checkpoints import reading
from pospre.run.checkpoints.reading import open_checkpoint, open_newest, read_checkpoint
from pospre.run.resume import compare_tensors
from pospre.training.build import build_model, load_model
from tests.disk import full_disk
from tests.refusals import refuses
from tests.run.checkpoints.checkpoint_files import CONTENT, forge, write_checkpoint
from tests.training.tiny_runs import Run


def test_the_newest_is_by_progress_and_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_newest([str(tmp_path)]) is None
    for name in ("ep2-ba9", "ep10-ba100", "ep1-ba20", "ep11-ba110", "other"):
        write_checkpoint(CONTENT, tmp_path / name)
    (tmp_path / "ep11-ba110" / "state.json").unlink()
    (tmp_path / "ep12-ba120").mkdir()  # a save that has only begun
    found = open_newest([str(tmp_path)])
    assert found is not None and found.uri == f"{tmp_path}/ep10-ba100"
    said = capsys.readouterr().err
    assert "ep11-ba110 is an incomplete checkpoint: it lacks state.json; passed over" in said
    assert said.count("warning") == 1


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refuses("holds no checkpoint", lambda: open_checkpoint(str(tmp_path / "empty")))
    (tmp_path / "text").write_text("hello")
    refuses("holds no checkpoint", lambda: open_checkpoint(str(tmp_path / "text")))
    refuses("does not exist", lambda: open_checkpoint(str(tmp_path / "ep0-ba2")))
    (tmp_path / "ep0-ba2").mkdir()
    with pytest.raises(UserError, match=r"ep0-ba2 is an incomplete checkpoint: .* manifest\.json"):
        open_checkpoint(str(tmp_path / "ep0-ba2"))
    # under another name its manifest tells that it is one
    write_checkpoint(CONTENT, tmp_path / "sent")
    assert open_checkpoint(str(tmp_path / "sent")).uri == str(tmp_path / "sent")
    forge(tmp_path / "sent", "state.json", b'{"content": {"state": {}}, "types": []}')
    refuses("no recipe", lambda: open_checkpoint(str(tmp_path / "sent")))


def test_the_first_differing_tensor_is_named() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(3, 4)}
    compare_tensors(expected, {"a": torch.ones(2), "b": torch.ones(3, 4)}, "x")
    for found, words in (
        ({"a": torch.zeros(2)}, "x.*lacks the tensor 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b' has shape \(4,\).*wants \(3, 4\)"),
        ({**expected, "c": torch.zeros(1)}, "'c' is not in the recipe's model"),
    ):
        with pytest.raises(UserError, match=words):
            compare_tensors(expected, found, "x")


def test_a_trained_model_comes_back(tiny: Path, run: Run, tmp_path: Path) -> None:
    code, _ = run(tiny, "trainer.max_duration=4ba", "trainer.save_interval=2ba")
    assert code == 0
    folder = tmp_path / "runs" / "tiny"
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"ep0-ba2", "ep1-ba4"}
    model, recipe = load_model(str(folder))
    assert not model.training and recipe.run_name == "tiny"
    assert recipe.algorithms["droppos"]["position_mask_ratio"] == 0.75  # a default, spelled out
    name, initial = "encoder.norm.weight", build_model(load_recipe(tiny))
    assert not torch.equal(model.state_dict()[name], initial.state_dict()[name])

    # a copy is itself, whatever becomes of the run that it was made of
    shutil.copytree(folder, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "ep1-ba4")
    copied = open_checkpoint(str(tmp_path / "copy"))
    assert copied.uri == f"{tmp_path}/copy/checkpoints/ep0-ba2"

    # the same content with one tensor gone, then with another shape
    path = folder / "checkpoints" / "ep1-ba4"
    content = read_checkpoint(str(path)).content
    weights = content["state"]["model"]
    weights["encoder.norm.bias"] = torch.zeros(7)
    write_checkpoint(content, path)
    refuses(r"'encoder.norm.bias' has shape \(7,\)", lambda: load_model(str(path)))
    code, said = run(tiny, "trainer.max_duration=4ba", "trainer.save_interval=2ba")
    assert code == 2 and "'encoder.norm.bias'" in said


# The copy of a checkpoint that the ranks of a node read together

URI = "s3://bucket/run/ep1-ba4"


def test_a_busy_bucket_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answers: list[Unreachable | dict[str, bytes]]
    answers = [Unreachable("503 SlowDown"), {"state.json": b"all of it"}]

    def fetch(_: str) -> dict[str, bytes]:
        answer = answers.pop(0)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    monkeypatch.setattr(reading, "_files_of", fetch)
    reading._copy(URI, tmp_path / "ep1-ba4", None)
    assert (tmp_path / "ep1-ba4" / "state.json").read_bytes() == b"all of it"


def test_a_node_without_room_is_named(tmp_path: Path) -> None:
    held = {"state.json": bytes(20_000)}
    said = f"{URI} cannot be copied to {tmp_path}/ep1-ba4 on .*File too large.*set TMPDIR"
    with full_disk(10_000), pytest.raises(UserError, match=said):
        reading._copy(URI, tmp_path / "ep1-ba4", held)
    reading._copy(URI, tmp_path / "ep1-ba4", held)
    assert held == {}  # the memory is free
