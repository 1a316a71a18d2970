"""A recipe whose position scheme is a class of another package, in every command."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

import pospre
from pospre import evaluate, export, plan, train, trust
from pospre.errors import UserError, run_command
from pospre.evaluation.models import open_model
from pospre.recipe.recipe import load_recipe, recipe_from_dict
from pospre.training.options_text import options_text
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.nn.positions.own_scheme import NAME, forget, spiral  # noqa: F401
from tests.training.tiny_runs import Run, metrics

OPTION = f"encoder.positions.{NAME}.directions"
POSITIONS = {NAME: {"directions": 4}}

pytestmark = pytest.mark.usefixtures("spiral")


@pytest.fixture
def recipe(tiny: Path) -> Path:
    """Return the tiny recipe with these positions."""
    data = yaml.safe_load(tiny.read_text())
    data["encoder"]["positions"] = POSITIONS
    data["schedule"] = {"warmup": "1ba", "length": "3ba"}
    data["trainer"]["max_duration"] = "3ba"
    tiny.write_text(yaml.safe_dump(data))
    return tiny


def saved(folder: Path, *algorithms: str) -> Path:
    return save_checkpoint(tiny_recipe(folder, *(algorithms or ("mae",)), positions=POSITIONS))


def test_it_is_trained_resumed_and_measured(
    recipe: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust, "_trusted", set())  # a recipe that is trained is the user's own
    code, said = run(recipe, "trainer.max_duration=2ba")
    assert code == 0, said
    code, said = run(recipe)
    assert code == 0 and "resuming from" in said, said
    folder = tmp_path / "runs" / "tiny"
    assert [line["step"] for line in metrics(folder) if "loss/droppos" in line] == [1, 2, 3]
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["encoder"]["positions"] == POSITIONS
    code, said = run(recipe, f"{OPTION}=2")
    assert code == 2 and f"{OPTION} = 4, this one 2" in said, said
    data, found = yaml.safe_load(recipe.read_text())["data"]["path"], tmp_path / "knn.json"
    words = ["knn", "--model", str(folder), "--data", data, "k=3", "--output", str(found)]
    assert run_command(partial(evaluate.main, words)) == 0
    assert "top1" in json.loads(found.read_text())["results"]


@pytest.mark.parametrize("format", ["safetensors", "onnx"])
def test_it_is_exported_and_read_back(format: str, tmp_path: Path) -> None:
    folder = saved(tmp_path)
    out = tmp_path / f"out.{format}"
    assert run_command(partial(export.main, [str(folder), str(out), "--format", format])) == 0
    card = out.with_name(f"{out.name}.md").read_text()
    assert "`vit_tiny16` of pospre; timm has no such model" in card
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = open_model(str(folder)).model.encoder(images)
    if format == "onnx":
        import onnxruntime

        (found,) = onnxruntime.InferenceSession(out).run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)
        return
    said: dict[str, pospre.PretrainModel] = {}
    exec(card.partition("```python\n")[2].partition("```")[0], said)  # as the card says
    with torch.no_grad():
        torch.testing.assert_close(said["model"].eval().encoder(images), expected)
        torch.testing.assert_close(open_model(str(out)).model.encoder(images), expected)


@pytest.mark.parametrize("format", ["timm", "hf"])
def test_timm_lacks_it(format: str, tmp_path: Path) -> None:
    out = tmp_path / ("out.pth" if format == "timm" else "out")
    with pytest.raises(
        UserError, match=rf"{NAME} cannot be exported for timm.*safetensors or onnx"
    ):
        export.main([str(saved(tmp_path)), str(out), "--format", format])
    assert not out.exists()


def test_a_recorded_scheme_is_imported_only_if_it_is_trusted(
    recipe: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, out = saved(tmp_path), tmp_path / "out.safetensors"
    assert export.main([str(folder), str(out), "--format", "safetensors"]) == 0
    data = load_recipe(recipe).data.path
    monkeypatch.setattr(trust, "_trusted", set())
    forget()
    capsys.readouterr()
    for main, words in (
        (evaluate.main, ["knn", "--model", str(folder), "--data", data]),
        (evaluate.main, ["knn", "--model", str(out), "--data", data]),
        (export.main, [str(folder), str(tmp_path / "second.onnx"), "--format", "onnx"]),
        (plan.main, [str(recipe), "--gpus", "1", "--gpu", "h100"]),
    ):
        assert run_command(partial(main, words)) == 2
        said = capsys.readouterr().err
        assert f"'{NAME}' is a class of another package" in said and "--trust mylab.spiral" in said
    assert train.main([str(recipe), "--resolve"]) == 0  # as written
    assert "directions: 4" in capsys.readouterr().out
    assert "mylab" not in sys.modules
    monkeypatch.setenv(trust.VARIABLE, "mylab")
    assert pospre.load_run(folder)


def test_options_of_schemes_are_listed(spiral: str) -> None:  # noqa: F811
    assert "\n  base: number > 0 or null = null\n" in options_text("rotary")
    text = options_text(spiral)
    assert text.startswith(f"{spiral}: Waves in turning directions")
    assert "\n  directions: whole number > 0 = 8\n      Number of waves; each is" in text
    assert "dims" not in text and "positions: none, sincos, learned" in options_text(None)


def test_a_scheme_within_another_is_trusted_with_it() -> None:
    nested = {"learned_rotary": {"rotation": POSITIONS}}
    base = tiny_recipe(Path("runs"), "mae").dump()
    chosen = recipe_from_dict({**base, "encoder": {**base["encoder"], "positions": nested}})
    assert {"mae", NAME} <= {*chosen.class_names}
