"""Recipes by path and by name, recipes that extend another, and the origins of values."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from pospre import plan, sweep, train
from pospre.errors import UserError
from pospre.recipe.files import SHIPPED, find_recipe, read_parts
from pospre.recipe.provenance import annotate, origins, values
from pospre.recipe.recipe import load_recipe
from pospre.train import main
from tests.test_recipes import RECIPES, title

YAMLS = Path(__file__).parents[2] / "yamls"
BASE: dict[str, Any] = {
    "run_name": "base",
    "data": {"path": "${POSPRE_TEST_PHOTOS:photos}", "batch_size": 8},
    "encoder": {"name": "vits16", "image_size": [64, 32]},
    "algorithms": {"mae": {"mask_ratio": 0.6}, "droppos": {}},
    "optimizer": {"betas": [0.9, 0.99], "base_lr": 1.0, "layer_decay": 0.7},
    "trainer": {"max_duration": "2ep", "clip_grad": {"threshold": 3.0}},
}
OWN: dict[str, Any] = {
    "extends": "base.yaml",
    "data": {"batch_size": 16},
    "encoder": {"image_size": [32, 32]},
    "algorithms": {"droppos": None, "mae": {"weight": 2.0}},
    "optimizer": {"layer_decay": None},
    "trainer": {"clip_grad": None},
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("mae_vitb16", "pretrain/mae_vitb16.yaml"),  # finetune/ has one, too
        ("finetune/mae_vitb16", "finetune/mae_vitb16.yaml"),
        ("yamls/finetune/mae_vitb16.yaml", "finetune/mae_vitb16.yaml"),
        ("demo_mp3", "speech/demo_mp3.yaml"),
    ],
)
def test_a_name_is_found_anywhere(given: str, found: str) -> None:
    assert find_recipe(given) == SHIPPED / found
    assert (SHIPPED / found).samefile(YAMLS / found)


def test_every_recipe_has_a_name() -> None:
    recipes = sorted(YAMLS.glob("*/*.yaml"))
    names = [path.relative_to(YAMLS).with_suffix("").as_posix() for path in recipes]
    assert [find_recipe(name).resolve() for name in names] == recipes and len(names) > 90


def test_a_file_comes_first(elsewhere: Path) -> None:
    (elsewhere / "mae_vitb16").write_text("own")
    assert find_recipe("mae_vitb16") == Path("mae_vitb16")
    (elsewhere / "demo").mkdir()
    assert find_recipe("demo/mae") == SHIPPED / "demo/mae.yaml"
    assert find_recipe("mae_vitb16", beside=elsewhere) == elsewhere / "mae_vitb16"


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("mae_vitb61", ["mae_vitb61 does not exist", "mean mae_vitb16 or", f"`ls {SHIPPED}/*`"]),
        ("pretrain/mea_vitb16", ["Did you mean pretrain/mae_vitb16"]),
        ("mae_vitb16.yaml", ["mae_vitb16.yaml does not exist", "mean mae_vitb16"]),  # a file's name
        ("droppos", ["3 recipes", "demo/droppos, first_light/droppos, learn/droppos"]),
        ("tiny.yml", ["Did you mean tiny.yaml?"]),
        ("tiny", ["Did you mean tiny.yaml?"]),
        ("..", ["is a folder"]),
        ("zzz", ["zzz does not exist", "has this name. `ls"]),
    ],
)
def test_what_has_no_name_or_several_is_said(given: str, parts: list[str], elsewhere: Path) -> None:
    (elsewhere / "tiny.yaml").touch()
    with pytest.raises(UserError) as caught:
        find_recipe(given)
    for part in parts:
        assert part in str(caught.value)


def test_a_recipe_extends_one_by_its_name(elsewhere: Path) -> None:
    own = elsewhere / "own.yaml"
    own.write_text("extends: finetune/mae_vitb16\nseed: 7\n")
    found, base = load_recipe(own), load_recipe("finetune/mae_vitb16")
    assert found == base.model_copy(update={"run_name": "own", "seed": 7})
    assert base.run_name == "finetune_mae_vitb16" and load_recipe("mae_vitb16").seed == 0


def test_commands_take_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert train.main(["demo/droppos", "--resolve", "seed=3"]) == 0
    assert f"{SHIPPED}/demo/droppos.yaml, complete" in capsys.readouterr().out
    small = "data.path=nowhere", "encoder.depth=1"
    assert plan.main(["demo/ijepa", *small, "--gpus", "1", "--gpu", "h100"]) == 0
    assert capsys.readouterr().out.startswith("ijepa: vit")
    with pytest.raises(UserError, match="the recipe's evaluations, but it has none"):
        sweep.main(["demo/droppos", "seed=1,2"])


def write(folder: Path, **recipes: dict[str, Any]) -> Path:
    """Write recipes by name and return the path of the last."""
    for name, content in recipes.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder / f"{name}.yaml"


def test_sections_are_merged_values_replaced_and_null_takes_a_section_away(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, base=BASE, own=OWN), ["optimizer.base_lr=2.0"])
    assert recipe.run_name == "own"  # the base's would be the base's run folder
    assert (recipe.data.path, recipe.data.batch_size) == ("photos", 16)
    assert recipe.encoder.image_size == (32, 32)
    assert recipe.algorithms == {"mae": {"mask_ratio": 0.6, "weight": 2.0}}
    assert recipe.optimizer.betas == (0.9, 0.99) and recipe.optimizer.base_lr == 2.0
    assert recipe.optimizer.layer_decay is None  # a value like any other
    assert recipe.trainer.clip_grad is None


def test_null_turns_a_callback_of_the_base_off(tmp_path: Path) -> None:
    base = {**BASE, "callbacks": {"collapse": {"every": 7}}}
    own = {**OWN, "callbacks": {"collapse": None}}
    assert load_recipe(write(tmp_path, base=base, own=own)).callbacks.collapse is None


@pytest.mark.parametrize(
    ("files", "parts"),
    [
        ({"own": OWN}, ["own.yaml: extends: base.yaml: recipe ", "base.yaml does not exist"]),
        ({"base": BASE | {"extends": "x.yaml"}, "own": OWN}, ["itself extends x.yaml", "one"]),
        ({"own": OWN | {"extends": "own.yaml"}}, ["own.yaml itself extends own.yaml"]),
        ({"own": OWN | {"extends": ["base.yaml"]}}, ["extends: ['base.yaml'] must be", "path"]),
        ({"base": {"data": 3}, "own": {**OWN, "data": {"x": 1}}}, ["'data.x'"]),
    ],
)  # fmt: skip
def test_mistakes_name_file_and_key(
    files: dict[str, dict[str, Any]], parts: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, **files)
    with pytest.raises(UserError) as caught:
        load_recipe(path)
    assert str(path) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_every_value_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, overrides = write(tmp_path, base=BASE, own=OWN), ["seed=3", "loggers={wandb: {}}"]
    found, base = origins(path, overrides), tmp_path / "base.yaml"
    assert found["data.path"] == f"{base}, default of $POSPRE_TEST_PHOTOS"
    monkeypatch.setenv("POSPRE_TEST_PHOTOS", "mine")
    assert origins(path)["data.path"] == f"{base}, environment $POSPRE_TEST_PHOTOS"
    assert found["data.batch_size"] == found["encoder.image_size"] == str(path)
    assert found["seed"] == found["loggers.wandb"] == "command line"
    assert found["optimizer.layer_decay"] == str(path)
    assert not {"algorithms.droppos", "trainer.clip_grad.threshold"} & {*found}
    recipe = load_recipe(path, overrides).dump()
    lines = annotate(recipe, found).splitlines()
    assert any(line.split() == ["seed:", "3", "#", "command", "line"] for line in lines)
    assert yaml.safe_load("\n".join(lines)) == recipe


def test_resolve_prints_a_recipe_that_is_the_same_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, again = write(tmp_path, base=BASE, own=OWN), tmp_path / "again.yaml"
    assert main([str(path), "--resolve", "seed=5"]) == 0
    text = capsys.readouterr().out
    assert "# null may stand for what the data decide" in text and "photos does not exist" in text
    again.write_text(text)
    first, second = load_recipe(path, ["seed=5"]), load_recipe(again)
    assert second.algorithms["mae"]["decoder_depth"] == 8  # written out
    assert second.model_copy(update={"algorithms": first.algorithms}) == first
    assert main([str(again), "--resolve"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(text)


@pytest.mark.parametrize("path", RECIPES, ids=title)
def test_a_shipped_recipe_repeats_nothing_of_its_base(path: Path) -> None:
    base, own = read_parts(path)
    if base is not None:
        before, said = dict(values(base[1])), dict(values(own))
        assert [key for key, value in said.items() if key in before and before[key] == value] == []


def test_a_reader_of_the_resolved_recipe_may_stop_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, mine=BASE)
    read, written = os.pipe()
    os.close(read)
    with open(written, "w") as pipe:  # what is left over at the end would be an error, too
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main([str(path), "--resolve"]) == 0
    assert not capsys.readouterr().err
