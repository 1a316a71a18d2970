"""Recipes by path and by name, which are those of a checkout and those of a wheel."""

from pathlib import Path

import pytest

from pospre import plan, sweep, train
from pospre.errors import UserError
from pospre.recipe.find import SHIPPED, find_recipe
from pospre.recipe.recipe import load_recipe

YAMLS = Path(__file__).parents[2] / "yamls"


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
        ("..", ["is a folder"]),
        ("zzz", ["zzz does not exist", "has this name. `ls"]),
    ],
)
def test_what_has_no_name_or_several_is_said(given: str, parts: list[str]) -> None:
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
    assert plan.main(["mae_vits16", "--gpus", "8", "--gpu", "h100"]) == 0
    assert capsys.readouterr().out.startswith("mae_vits16: vits16 with mae")
    with pytest.raises(UserError, match="the recipe's evaluations, but it has none"):
        sweep.main(["demo/droppos", "seed=1,2"])
