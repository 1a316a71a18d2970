"""What the README prints is what runs: its recipes, and the line that loads an export."""

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pospre.evaluation.run import check_evaluation
from pospre.exchange.export import export
from pospre.recipe.recipe import load_recipe
from pospre.train import main
from tests.evaluation.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECIPES = re.findall(r"^```yaml\n(.*?)^```", README, re.M | re.S)
# a smaller model and fewer steps, nothing that the block would lack
SHRINK = [
    "encoder.name=vit_tiny16",
    "encoder.depth=1",
    "encoder.image_size=64",
    "data.batch_size=4",
    "trainer.precision=fp32",
    "schedule.warmup=1ba",
    "trainer.max_duration=2ba",
    "trainer.device=cpu",
    "trainer.progress_bar=false",
]


@pytest.mark.parametrize("text", RECIPES, ids=["first", "second"])
def test_the_recipes_run_as_printed(
    text: str, image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("data/photos", "data/photos_val"):
        image_folder(num_images=8, classes=(), name=name)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "first.yaml"
    path.write_text(text)
    recipe = load_recipe(path)
    for name, settings in recipe.evaluation.items():
        check_evaluation(name, recipe, settings["data"], {}, None)
    assert main([str(path), *SHRINK]) == 0
    measured = {found.stem for found in (tmp_path / "runs/first/evaluation").glob("*.json")}
    assert measured == {*recipe.evaluation}


def test_the_line_for_timm_is_the_one_that_the_export_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(ROOT / "yamls/demo/droppos.yaml", [f"trainer.run_folder={tmp_path}"])
    checkpoint = save_checkpoint(recipe)
    monkeypatch.chdir(tmp_path)
    lines = export(str(checkpoint), Path("droppos.pth"), format="timm")
    (shown,) = re.findall(r"^```python\n(model = .*?)^```", README, re.M | re.S)
    printed = next(line for line in lines if line.startswith("model = "))
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(printed))
