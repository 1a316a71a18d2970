"""Which checkpoint is the newest, and what is said about files that are none."""

import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from pospre.errors import UserError
from pospre.recipe.recipe import load_recipe
from pospre.run.checkpoints.reading import open_checkpoint, open_newest, read_checkpoint
from pospre.run.same_run import compare_tensors
from pospre.training.build import build_model
from pospre.training.trained import load_model
from tests.run.checkpoints.hostile import CONTENT
from tests.run.checkpoints.test_damage import Payload
from tests.training.tiny_runs import Run


def test_the_newest_is_by_progress_and_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert open_newest([str(tmp_path)]) is None
    for name in ("ep2-ba9.pt", "ep10-ba100.pt", "ep1-ba20.pt", "other.pt"):
        torch.save(CONTENT, tmp_path / name)
    (tmp_path / "ep11-ba110.pt").write_bytes((tmp_path / "ep10-ba100.pt").read_bytes()[:40])
    (tmp_path / "ep12-ba120.pt").touch()
    found = open_newest([str(tmp_path)])
    assert found is not None and found.uri == f"{tmp_path}/ep10-ba100.pt"
    said = capsys.readouterr().err
    assert "ep11-ba110.pt is no checkpoint, or one cut short (40 bytes); passed over" in said
    assert "ep12-ba120.pt is no checkpoint, or one cut short (0 bytes); passed over" in said


def test_files_that_are_no_checkpoint(tmp_path: Path) -> None:
    def said(path: Path) -> str:
        with pytest.raises(UserError) as caught:
            read_checkpoint(str(path))
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "does not exist" in said(tmp_path / "none.pt")
    text = tmp_path / "text.pt"
    text.write_text("hello")
    assert "no checkpoint, or one cut short" in said(text)
    archive = tmp_path / "archive.pt"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("data", "x")
    assert "damaged or no checkpoint" in said(archive)
    other = tmp_path / "other.pt"
    torch.save({"model": torch.zeros(2)}, other)
    assert "holds no recipe" in said(other)
    unsafe = tmp_path / "unsafe.pt"
    torch.save(Payload(tmp_path / "executed"), unsafe)
    assert "more than plain data" in said(unsafe)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_model(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="does not exist"):
        load_model(str(tmp_path / "nowhere"))


def test_the_first_differing_tensor_is_named() -> None:
    expected = {"a": torch.zeros(2), "b": torch.zeros(3, 4)}
    compare_tensors(expected, {"a": torch.ones(2), "b": torch.ones(3, 4)}, "x.pt")
    for found, words in (
        ({"a": torch.zeros(2)}, "x.pt.*lacks the tensor 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(4)}, r"'b' has shape \(4,\).*wants \(3, 4\)"),
        ({**expected, "c": torch.zeros(1)}, "'c' is not in the recipe's model"),
    ):
        with pytest.raises(UserError, match=words):
            compare_tensors(expected, found, "x.pt")


def test_a_trained_model_comes_back(tiny: Path, run: Run, tmp_path: Path) -> None:
    code, _ = run(tiny, "trainer.max_duration=4ba", "trainer.save_interval=2ba")
    assert code == 0
    folder = tmp_path / "runs" / "tiny"
    names = {path.name for path in (folder / "checkpoints").glob("*.pt")}
    assert names == {"ep0-ba2.pt", "ep1-ba4.pt"}
    model, recipe = load_model(str(folder))
    assert not model.training and recipe.run_name == "tiny"
    assert recipe.algorithms["droppos"]["position_mask_ratio"] == 0.75  # a default, spelled out
    initial, _ = load_model(str(folder / "checkpoints" / "ep0-ba2.pt"), initial=True)
    fresh = build_model(load_recipe(tiny))
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, initial.state_dict()[name])
    name = "encoder.norm.weight"
    assert not torch.equal(model.state_dict()[name], initial.state_dict()[name])

    # a copy is itself, whatever becomes of the run that it was made of
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "checkpoints" / "ep1-ba4.pt").unlink()
    copied = open_checkpoint(str(tmp_path / "copy"))
    assert copied.uri == f"{tmp_path}/copy/checkpoints/ep0-ba2.pt"

    # the same content with one tensor gone, then with another shape
    path = folder / "checkpoints" / "ep1-ba4.pt"
    content = read_checkpoint(str(path)).content
    weights = content["state"]["model"]
    weights["encoder.norm.bias"] = torch.zeros(7)
    torch.save(content, path)
    path.with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"'encoder.norm.bias' has shape \(7,\)"):
        load_model(str(path))
    code, said = run(tiny, "trainer.max_duration=4ba", "trainer.save_interval=2ba")
    assert code == 2 and "'encoder.norm.bias'" in said
