"""The card of an export: method, data, licence, figures, and lines that load what it describes."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml

from pospre.evaluation.estimates import compared
from pospre.evaluation.models import open_model
from pospre.evaluation.registry import START
from pospre.evaluation.run import encoder_hash, write_json
from pospre.exporting.export import export
from pospre.recipe.recipe import recipe_from_dict
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.weight_records import Weights
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.run.checkpoints.checkpoint_files import write_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    plain = tiny_recipe(tmp_path / "runs", "mae").dump()
    plain["algorithms"]["ema_teacher"] = {}
    return save_checkpoint(recipe_from_dict(plain))


def measured(
    checkpoint: Path, name: str, results: dict[str, Any], weights: Weights, step: int = 2
) -> None:
    """Write what an evaluation of these weights has found."""
    sha256 = encoder_hash(open_model(str(checkpoint), weights=weights).model)
    document = {"name": name, "weights": weights, "step": step, "encoder_sha256": sha256}
    document |= {"data": "photos|val", "results": results}
    write_json(checkpoint.parents[1] / "evaluation" / f"{name}.json", document)


def card(checkpoint: Path, **options: Any) -> str:
    out = checkpoint.parents[3] / "encoder.pth"
    export(str(checkpoint), out, format="timm", overwrite=True, **options)
    return out.with_name("encoder.pth.md").read_text(encoding="utf-8")


def test_a_file_has_no_figures_of_a_run_that_is_called_as_models_are(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    card(checkpoint)
    shutil.copytree(checkpoint.parents[1], tmp_path / "runs" / "model")
    (tmp_path / "runs" / "model" / "evaluation").mkdir()
    write_json(tmp_path / "runs/model/evaluation/knn.json", {"weights": "student", "results": {}})
    out = tmp_path / "again.pth"
    export("encoder.pth", out, format="timm")
    assert "`knn`" not in out.with_name("again.pth.md").read_text()


def test_it_says_what_the_weights_are(checkpoint: Path) -> None:
    text = card(checkpoint, license="cc-by-4.0")
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["license"] == "cc-by-4.0" and header["library_name"] == "timm"
    assert header["tags"] == ["pospre", "vision-transformer", "mae", "ema_teacher"]
    assert "- `mae`: MAE: masked autoencoders (He et al. 2022, arXiv 2111.06377)." in text
    assert "- weights: cc-by-4.0" in text and "the terms of `unused` apply" in text
    assert "Images of 64 × 64 pixels and 3 channels" in text
    recipe = re.findall("```yaml\n(.*?)```", text, re.DOTALL)[0]
    assert yaml.safe_load(recipe)["run_name"] == "tiny"


def test_its_lines_load_the_weights(checkpoint: Path) -> None:
    scope: dict[str, Any] = {}
    exec(re.findall("```python\n(.*?)```", card(checkpoint), re.DOTALL)[0], scope)
    assert isinstance(scope["model"], timm.models.VisionTransformer)


def test_it_has_the_figures_of_these_weights(checkpoint: Path) -> None:
    assert "None was measured" in card(checkpoint)
    measured(checkpoint, "knn", {"top1": 0.713, "top1_se": 0.0101, "initial_top1": 0.4}, "student")
    measured(checkpoint, "accuracy", {"top1": 0.5, "top5": None}, "teacher")
    measured(checkpoint, "gone", {"top1": 0.9}, "student")
    text = card(checkpoint, license=None)
    assert r"| knn | top1 | 0.713 ± 0.01 | – | 0.4 | `photos\|val` |" in text
    assert "accuracy" not in text.split("## Recipe")[0] and "gone" not in text
    assert "not stated in the export" in text and "\nlicense:" not in text
    teacher = card(checkpoint, weights="teacher")
    assert (
        r"| accuracy | top1 | 0.5 | – | – | `photos\|val` |" in teacher and "0.713" not in teacher
    )


def test_figures_of_other_weights_of_the_run_are_not_shown(checkpoint: Path) -> None:
    measured(checkpoint, "knn", {"top1": 0.713}, "student")
    measured(checkpoint, "accuracy", {"top1": 0.625}, "student", step=1)
    text = card(checkpoint)
    assert "0.713" in text and "0.625" not in text
    assert "Not shown, because other weights of this run gave them: `accuracy` (step 1)." in text
    content = read_checkpoint(str(checkpoint)).content  # as if it was trained again
    content["state"]["model"]["encoder.norm.bias"] += 1
    write_checkpoint(content, checkpoint)
    text = card(checkpoint)
    assert "0.713" not in text and "None was measured of these weights" in text
    assert "of this run gave them: `accuracy` (step 1), `knn` (step 2)." in text


def test_an_existing_card_is_kept(checkpoint: Path) -> None:
    out = checkpoint.parents[3] / "encoder.pth"
    (out.parent / "encoder.pth.md").write_text("precious")
    with pytest.raises(ValueError, match=r"encoder\.pth\.md exists; --overwrite"):
        export(str(checkpoint), out, format="timm")
    assert not out.exists()


def test_exports_into_a_checkout_are_not_linted(checkpoint: Path) -> None:
    checkout = checkpoint.parents[3]
    shutil.copy(ROOT / "pyproject.toml", checkout)
    card(checkpoint)
    for command in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache"]
        assert subprocess.run([*ruff, "."], cwd=checkout).returncode == 0
        ours = checkout / "pospre" / "wrong.py"
        ours.parent.mkdir(exist_ok=True)
        ours.write_text("import os\nx=1\n")
        assert subprocess.run([*ruff, "."], cwd=checkout).returncode == 1
        ours.unlink()


def test_it_has_the_verdict_and_a_worse_run_is_exported_with_a_warning(tmp_path: Path) -> None:
    plain = tiny_recipe(tmp_path / "runs", "mae").dump()
    plain["encoder"]["weights"], plain["verdict"] = "dino.pth", {"figure": "knn/top1"}
    checkpoint = save_checkpoint(recipe_from_dict(plain))
    assert "whether it helped: knn/top1 was not measured beside it." in card(checkpoint)
    right = torch.arange(200) < 100
    results = compared("top1", {"": right[:150], START: right[50:]})
    measured(checkpoint, "knn", results, "student")
    path = checkpoint.parents[1] / "evaluation" / "knn.json"
    document = {**json.loads(path.read_text()), "settings": {"half": "judge"}}
    write_json(path, document)
    assert "## Verdict\n\nAdapted is better." in card(checkpoint)
    worse = compared("top1", {"": right[50:], START: right[:150]})
    write_json(path, {**document, "results": worse})
    out = tmp_path / "worse.pth"
    lines = export(str(checkpoint), out, format="timm")
    assert any(line.startswith("warning: verdict: Worse than the frozen start.") for line in lines)
    text = out.with_name("worse.pth.md").read_text(encoding="utf-8")
    assert "Keep the frozen start: dino.pth." in text and "| knn | top1 | 0.3333 | 0.6667 |" in text
