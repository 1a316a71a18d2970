"""What a recipe takes from the environment: used, and written down by name alone."""

from typing import Any

import pytest
import yaml

from pospre.recipe.recipe import recipe_from_dict, recorded_recipe

SECRET = "hunter2-geheim"
WRITTEN = {
    "data": {"path": "${POSPRE_TEST_DATA_AT}", "batch_size": "${POSPRE_TEST_BATCH:4}"},
    "encoder": {"name": "vits16", "weights": "${POSPRE_TEST_WEIGHTS:runs/mae}"},
    "algorithms": {"mae": {}},
    "trainer": {"max_duration": "1ep", "save_folder": "s3://b/${POSPRE_TEST_BUCKET:x}/runs"},
    "loggers": {"tensorboard": {"log_dir": "logs/${POSPRE_TEST_BUCKET:x}"}},
    "evaluation": {"knn": {"bank": "${POSPRE_TEST_DATA_AT}", "k": "${POSPRE_TEST_BATCH:4}"}},
    "run_name": "secret",
}
HERE: dict[str, Any] = {"data": {"path": "photos", "batch_size": 4}, "loggers": {}}


def test_the_record_has_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA_AT", "BUCKET"):
        monkeypatch.setenv(f"POSPRE_TEST_{name}", SECRET)
    monkeypatch.setenv("POSPRE_TEST_BATCH", "16")
    recipe = recipe_from_dict(WRITTEN)
    assert (recipe.data.path, recipe.data.batch_size) == (SECRET, 16)
    assert recipe.trainer.save_folder == f"s3://b/{SECRET}/runs"
    record = recipe.record()
    assert SECRET not in yaml.safe_dump(record)
    assert record["data"]["path"] == "${POSPRE_TEST_DATA_AT}"
    assert record["data"]["batch_size"] == 16  # no model could be built without it
    assert record["encoder"]["weights"] == "runs/mae"  # the recipe's own default
    assert record["evaluation"]["knn"]["bank"] == "${POSPRE_TEST_DATA_AT}"
    assert record["loggers"]["tensorboard"] == {"log_dir": "logs/${POSPRE_TEST_BUCKET:x}"}
    # what code has changed since is no longer the environment's
    moved = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": "here"})})
    assert moved.record()["data"]["path"] == "here"

    again = recorded_recipe(record)
    assert again.dump() == record and again.data.path == "${POSPRE_TEST_DATA_AT}"
    monkeypatch.setenv("POSPRE_TEST_DATA_AT", "elsewhere")
    assert recipe_from_dict(record).data.path == "elsewhere"  # as a recipe of the user's own


def test_a_whole_section_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POSPRE_TEST_KNN", f"{{bank: {SECRET}, k: 3}}")
    recipe = recipe_from_dict({**WRITTEN, "evaluation": {"knn": "${POSPRE_TEST_KNN}"}} | HERE)
    assert recipe.evaluation == {"knn": {"bank": SECRET, "k": 3}}
    record = recipe.record()
    assert record["evaluation"]["knn"]["bank"] == "${POSPRE_TEST_KNN}"
    assert recorded_recipe(record).dump() == record
