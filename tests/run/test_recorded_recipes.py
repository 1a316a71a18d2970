"""Recipes that runs have recorded: no secret is in them, and nothing in them is obeyed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from pospre import evaluate
from pospre.errors import run_command
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.replay import replay
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.refusals import refuses
from tests.training.tiny_runs import Run, curve

SECRET = "hunter2-geheim"


@pytest.fixture(autouse=True)
def no_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a bucket is asked."""

    def refuse(uri: str, **_: Any) -> None:
        pytest.fail(f"{uri} was asked")

    for module in ("folders", "reading"):
        monkeypatch.setattr(f"pospre.run.checkpoints.{module}.Bucket", refuse)


def test_a_recorded_recipe_is_never_filled_in(
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("POSPRE_TEST_SECRET", SECRET)
    recipe = tiny_recipe(tmp_path / "runs", "mae").dump()
    recipe["trainer"]["save_folder"] = "s3://foreign/${POSPRE_TEST_SECRET}"
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def said() -> str:
        argv = ["knn", "--model", str(folder), "--data", str(image_folder())]
        assert run_command(lambda: evaluate.main(argv)) == 2
        return capsys.readouterr().err

    first = said()
    assert SECRET not in first and first.count("\n") == 1 and "does not open by itself" in first
    assert "--model 's3://foreign/${POSPRE_TEST_SECRET}'" in first
    recipe["trainer"]["save_folder"] = "s3://foreign/runs"
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert "encoder.weights=s3://foreign/runs" in said()
    (folder / "recipe.yaml").write_text("seed: ${POSPRE_TEST_SECRET}\nextends: ../own.yaml\n")
    assert "unknown key 'extends'" in said()
    # beside checkpoints of its own nothing else is looked at
    whole = save_checkpoint(tiny_recipe(tmp_path / "whole", "mae")).parents[1]
    recipe["trainer"]["save_folder"] = "s3://foreign/${POSPRE_TEST_SECRET}"
    (whole / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    argv = ["position_probe", "--model", str(whole), "--data", str(tmp_path / "none")]
    assert run_command(lambda: evaluate.main(argv)) == 2
    assert "none does not exist" in capsys.readouterr().err


def test_a_run_writes_no_value_of_the_environment(
    tiny: Path,
    run: Run,
    tmp_path: Path,
    image_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither into its recipe, nor its checkpoints, evaluations and report; and it goes on."""
    start = save_checkpoint(tiny_recipe(tmp_path / "before", "mae", depth=1))
    images = {name: image_folder(24, name=name) for name in (SECRET, "plain")}
    for name in (SECRET, "plain"):
        shutil.copytree(start, start.with_name(name))
    keys = (
        "data.path=${POSPRE_TEST_DATA_AT}",
        f"encoder.weights={start.parent}/${{POSPRE_TEST_WEIGHTS}}",
        "evaluation={knn: {data: '${POSPRE_TEST_DATA_AT}', k: 3, baseline: false, every: 1ep}}",
        "optimizer.base_lr=${POSPRE_TEST_LR:1}",
    )
    monkeypatch.setenv("POSPRE_TEST_DATA_AT", str(images[SECRET]))
    monkeypatch.setenv("POSPRE_TEST_WEIGHTS", SECRET)
    monkeypatch.setenv("POSPRE_TEST_LR", "0.03")
    code, said = run(tiny, *keys, "trainer.max_duration=1ep")
    assert code == 0, said
    folder = tmp_path / "runs/tiny"
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path  # nothing in it is compressed
    text = (folder / "recipe.yaml").read_text()
    assert "# data.path: from the environment, $POSPRE_TEST_DATA_AT\n" in text
    assert "# optimizer.base_lr: from the environment, $POSPRE_TEST_LR\n" in text
    record = yaml.safe_load(text)
    assert record["data"]["path"] == "${POSPRE_TEST_DATA_AT}"
    assert record["optimizer"]["base_lr"] == 0.03
    newest = read_checkpoint(str(folder / "checkpoints/ep1-ba3"))
    assert newest.content["state"]["callbacks"]["RecipeRecord"]["recipe"] == record

    monkeypatch.setenv("POSPRE_TEST_WEIGHTS", "plain")  # by which the run is another
    code, said = run(tiny, *keys, "trainer.max_duration=2ep")
    assert code == 2 and "another value of " in said and "POSPRE_TEST_WEIGHTS}" in said
    assert "Traceback" not in said and SECRET not in said
    monkeypatch.setenv("POSPRE_TEST_WEIGHTS", SECRET)
    monkeypatch.setenv("POSPRE_TEST_DATA_AT", str(images["plain"]))  # which may have moved
    code, said = run(tiny, *keys, "trainer.max_duration=2ep")
    assert code == 0 and "resuming from" in said, said
    plain = f"encoder.weights={start.parent}/{SECRET}", f"data.path={images['plain']}"
    code, said = run(tiny, *plain, "optimizer.base_lr=0.03", "trainer.max_duration=3ep")
    assert code == 0 and "resuming from" in said, said
    assert [step for step, *_ in curve(folder)] == [*range(1, 10)]


def test_a_step_is_made_again_from_places_that_are_named(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path / "runs", "mae").dump()
    recipe["data"]["path"] = "s3://foreign/images"
    recipe["trainer"]["save_folder"] = "s3://foreign/runs"
    path = tmp_path / "run/bad_steps/ba3.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"step": 3, "recipe": recipe, "ranks": [{"index": [0]}]}))
    refuses(r"data\.path is recorded as 's3://foreign/images'", lambda: replay(path))
    refuses("none does not exist", lambda: replay(path, f"data.path={tmp_path}/none"))
