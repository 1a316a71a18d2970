"""What a recipe may say, and what the user reads when it says something else."""

import math
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

from pospre.arguments import check_arguments
from pospre.errors import UserError
from pospre.recipe.recipe import load_recipe

MINIMAL: dict[str, Any] = {
    "data": {"path": "photos", "batch_size": 8},
    "encoder": {"name": "vits16"},
    "algorithms": {"mae": {"mask_ratio": 0.75}},
    "trainer": {"max_duration": "2ep"},
}


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "first.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def message(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return str(caught.value)


def test_the_file_names_the_run_and_defaults_are_filled_in(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.run_name == "first"
    assert recipe.optimizer.betas == (0.9, 0.95)
    assert recipe.checkpoint_folder() == "runs/first/checkpoints"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("data.views.view.scael=[0.1, 1]", ["'data.views.view.scael'", "Did you mean 'scale'"]),
        ("data.cache_limit=lots", ["'data.cache_limit'", "a size such as 200GB"]),
        ("data.order=shuffled", ["'data.order'", "'random' or 'windows'"]),
        ("data.tolerance=-1", ["'data.tolerance'", "greater than or equal to 0"]),
        ("trianer.max_duration=1ep", ["'trianer'", "Did you mean 'trainer'"]),
        ("trainer.fsdp={reshard: true}", ["'trainer.fsdp.reshard'", "reshard_after_forward"]),
        ("loggers.wanb={}", ["'loggers.wanb'", "Did you mean 'wandb'"]),
        ("callbacks.stals={}", ["'callbacks.stals'", "Did you mean 'stalls'"]),
        ("callbacks.collapse.share=1.0", ["'callbacks.collapse.share'", "less than 1"]),
        ("callbacks.stalls=5", ["'callbacks.stalls'", "a section with these keys", "loader_share"]),
        ("optimizer.betas=[.nan, 0.9]", ["'optimizer.betas.0' is nan", "a finite number"]),
        ("max_duration=10ep", ["unknown key 'max_duration'", "mean 'trainer.max_duration'"]),
        ("batch_size=8", ["unknown key 'batch_size'", "mean 'data.batch_size'"]),
        ("seed=-1", ["'seed' is -1", "greater than or equal to 0"]),
        ("optimizer.betas=[0.9, 1.5]", ["'optimizer.betas'", "0 to below 1"]),
        ("data.views.view.scale=[0.2, 2]", ["'data.views.view.scale'", "0 < low <= high <= 1"]),
        ("trainer.save_folder='s3://bucket/{run_name}'", ["'trainer.save_folder'", "'{'"]),
        ("trainer.run_folder='runs/{rank}'", ["'trainer.run_folder'", "'{'"]),
        ("run_name=_x", ["'run_name' is '_x'", "a letter or digit first"]),
        ("seed={{ SEED }}", ["a key must be plain text"]),
        ("seed=one", ["'seed' is 'one' (str)", "expected a whole number"]),
        ("run_name=", ["'run_name' is empty"]),
        ("run_name=2024", ["'run_name' is 2024 (int)", "in quotes", """run_name='"2024"'"""]),
        ("data.views.view.scale=0.2,1", ["'data.views.view.scale'", "a list, in brackets"]),
        ("trainer.clip_grad=1.0", ["'trainer.clip_grad' is 1.0", "with these keys: mode, thresh"]),
        ("evaluation=knn", ["'evaluation' is 'knn'", "such as {knn: {}}"]),
        ("encoder.image_size=[64]", ["'encoder.image_size' is [64]", "more entries"]),
        ("encoder.image_size=[1, 2, 3]", ["'encoder.image_size'", "at most 2 entries"]),
        ("data.batch_size=0", ["'data.batch_size' is 0", "greater than 0"]),
        ("data.views.view.scale=[0.1, x]", ["'data.views.view.scale.1' is 'x'", "number"]),
        ("data.num_workers=two", ["'data.num_workers' is 'two'", "whole number"]),
        ("trainer.max_duration=12", ["'trainer.max_duration' is 12 (int)", "12ep (epochs)"]),
        ("trainer.max_duration='12'", ["'trainer.max_duration'", "10ep (epochs)"]),
        ("schedule.warmup=0", ["'schedule.warmup' is 0", "0ep (epochs)"]),
        ("trainer.max_duration=0ep", ["longer than 0"]),
        ("trainer.precision=bf16", ["'auto', 'fp32', 'amp_bf16' or 'amp_fp16'"]),
        ("trainer.clip_grad={}", ["'trainer.clip_grad.threshold' is missing"]),
        ("trainer.save_folder=gs://bucket/x", ["'trainer.save_folder'", "s3://bucket/folder"]),
        ("trainer.keep_checkpoints=0", ["'trainer.keep_checkpoints' is 0", "1 or more, or -1"]),
        ("trainer.keep_checkpoints=-2", ["'trainer.keep_checkpoints' is -2", "1 or more, or -1"]),
        ("trainer.save_interval=auto", ["'trainer.save_interval'", "hours_between_failures: the"]),
        ("trainer.save_interval=often", ["'trainer.save_interval'", "10ep (epochs)"]),
        ("trainer.save_interval=0ba", ["'trainer.save_interval'", "longer than 0"]),
        ("trainer.hours_between_failures=0", ["'trainer.hours_between_failures'", "than 0"]),
        ("trainer=null", ["'trainer' is empty", "a section", "max_duration"]),
        ("algorithms={}", ["'algorithms'", "at least one"]),
        ("run_name=../elsewhere", ["'run_name'", "letters, digits"]),
        ("data.path.x=1", ["'path' is a value"]),
        ("no-equals-sign", ["is not an override"]),
        ("data.path=[", ["is not valid YAML"]),
        # habits from elsewhere
        (
            "encoder.positions={rotary:{rescale:2.0}}",
            ["needs a space after the colon: {rescale: 2.0}"],
        ),
        ("encoder={name:vits16}", ["'encoder.name:vits16'; a colon needs a space after it"]),
        ("optimizer.lr=1e-3", ["Did you mean 'base_lr'?"]),
        ("lr=1e-3", ["Did you mean 'optimizer.base_lr'?"]),
        ("+seed=1", ["keys are written without '+', as seed=1"]),
        ("~evaluation", ["keys are written without '~', as evaluation=null"]),
        ("seed=0..2", ["python -m pospre.sweep RECIPE seed=0,1,2 trains one run for each"]),
    ],
)
def test_a_mistake_names_key_value_and_remedy(
    recipe_file: Path, override: str, parts: list[str]
) -> None:
    said = message(recipe_file, override)
    for part in parts:
        assert part in said


def test_all_mistakes_are_said_at_once(recipe_file: Path) -> None:
    said = message(recipe_file, "seed=x", "data.batch_sizes=3")
    assert "data.batch_sizes" in said and "'seed'" in said


def test_overrides_are_yaml_and_reach_new_sections(recipe_file: Path) -> None:
    recipe = load_recipe(
        recipe_file,
        [
            "optimizer.base_lr=1e-3",
            "trainer.clip_grad.threshold=5",
            "algorithms.mae.mask_ratio=0.5",
        ],
    )
    assert recipe.optimizer.base_lr == 1e-3
    assert recipe.trainer.clip_grad is not None and recipe.trainer.clip_grad.threshold == 5
    assert recipe.algorithms["mae"]["mask_ratio"] == 0.5


def test_an_override_does_not_add_an_algorithm_by_accident(recipe_file: Path) -> None:
    assert "algorithms.droppos={}" in message(recipe_file, "algorithms.droppos.weight=2")
    recipe = load_recipe(recipe_file, ["algorithms.droppos={}", "algorithms.droppos.weight=2"])
    assert recipe.algorithms["droppos"] == {"weight": 2}


def test_null_takes_an_algorithm_away_and_turns_a_callback_off(recipe_file: Path) -> None:
    given = ["algorithms.droppos={weight: 2}", "callbacks.collapse={every: 7}"]
    recipe = load_recipe(recipe_file, given)
    assert set(recipe.algorithms) == {"mae", "droppos"}
    assert recipe.callbacks.collapse is not None and recipe.callbacks.collapse.every == 7
    taken = [*given, "algorithms.mae=null", "callbacks.collapse=null", "callbacks.stalls=null"]
    recipe = load_recipe(recipe_file, taken)
    assert recipe.algorithms == {"droppos": {"weight": 2}}
    assert recipe.callbacks.collapse is None and recipe.callbacks.stalls is None


def test_an_override_adds_an_evaluation(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["evaluation.knn.data=val", "evaluation.knn.k=5"])
    assert recipe.evaluation == {"knn": {"data": "val", "k": 5}}


@pytest.mark.parametrize("size", ["64.5", "64px", "0"])
def test_an_image_size_is_not_told_to_be_a_list(recipe_file: Path, size: str) -> None:
    said = message(recipe_file, f"encoder.image_size={size}")
    assert "'encoder.image_size'" in said and "list" not in said and "also" not in said


def test_sections_of_a_wrong_kind_are_said(recipe_file: Path) -> None:
    for value in ("3", "mae", "[mae]"):
        said = message(recipe_file, f"algorithms={value}", "algorithms=" + value)
        assert "'algorithms' is" in said and "expected a section with keys" in said
    recipe_file.write_text("algorithms: 3\n")
    assert "'algorithms' is 3" in message(recipe_file, "data.batch_size=2")


def aliases_of_aliases(first: str, layer: str) -> str:
    """Return a text of ten lines that stands for 10⁹ values."""
    lines = [f"a0: &a0 {first}"]
    for number in range(1, 10):
        repeated = ", ".join([f"*a{number - 1}"] * 10)
        lines.append(f"a{number}: &a{number} {layer.format(repeated)}")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (aliases_of_aliases("[x]", "[{}]"), "more than 100000 values"),
        (aliases_of_aliases("{x: 1}", "{{<<: [{}]}}"), "more than 100000 values"),
        ("data: &d {path: *d}", "an alias of itself"),
        ("[" * 5000, "nested too deeply"),
        ("a: " + "{a: " * 5000, "nested too deeply"),
        ("a: " + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ("a: [" + "xyz, " * 60_000 + "]", "has more than 256 KiB"),
        ('seed: "' + "${A:" * 50_000 + '"', "'seed' is '${A:"),  # each would look for its end
    ],
    ids=["aliases", "merged", "itself", "lists", "mappings", "deep", "long", "variables"],
)
def test_texts_that_would_never_end(recipe_file: Path, text: str, said: str) -> None:
    recipe_file.write_text(text)
    start = time.process_time()
    assert said in message(recipe_file)
    assert time.process_time() - start < 60


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("9" * 5000, "line 1: 9999999999999999999999999999999999999999… is not a valid int"),
        ("1" + "_0" * 5000, "is not a valid int"),
        ("0x" + "f" * 5000, "more than 63 bits"),
        ("1" + ":59" * 3000, "more than 63 bits"),
        ("1" + ":59" * 3000 + ".5", "is not a valid float"),
        ("2024-13-45", "line 1: 2024-13-45 is not a valid timestamp; put text in quotes"),
        ("!!int ''", "line 1:  is not a valid int"),
        ("!!bool maybe", "maybe is not a valid bool"),
        ("!!timestamp x", "x is not a valid timestamp"),
        (r'"\UFFFFFFFF"', "is not valid YAML"),
        (r'"a\0b"', "line 1: a text with a NUL character"),
        (r'"\ud800"', "half of a UTF-16 pair"),
    ],
)
def test_values_that_no_text_stands_for(recipe_file: Path, value: str, said: str) -> None:
    own = recipe_file.read_text()
    recipe_file.write_text(f"seed: {value}\n{own}")
    assert f"recipe {recipe_file}" in message(recipe_file) and said in message(recipe_file)
    recipe_file.write_text(own)
    given = message(recipe_file, f"seed={value}")
    assert given.startswith(f"override seed={value[:9]}") and said in given and len(given) < 5000


def test_an_empty_section_has_its_defaults(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "loggers:\nevaluation: {knn: {}}\n")
    found = load_recipe(recipe_file, ["evaluation=null"])
    assert found.evaluation == {} and found.loggers == load_recipe(recipe_file).loggers


def test_anchors_in_ordinary_use(recipe_file: Path) -> None:
    recipe_file.write_text(
        "data: {path: &photos photos, batch_size: 8, views: {a: &v {flip_rate: 0.1},"
        " b: &w {<<: *v, count: 2}}}\n"
        "encoder: {name: vits16}\nalgorithms: {mae: {}}\ntrainer: {max_duration: 2ep}\n"
        "evaluation: {knn: {<<: *w, data: *photos}}\n"
    )
    recipe = load_recipe(recipe_file)
    assert (recipe.data.views["b"].flip_rate, recipe.data.views["b"].count) == (0.1, 2)
    assert recipe.evaluation["knn"] == {"flip_rate": 0.1, "count": 2, "data": "photos"}


def test_environment_variables(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override = "trainer.max_duration=${POSPRE_TEST_EPOCHS:3}ep"
    assert load_recipe(recipe_file, [override]).trainer.max_duration == "3ep"
    monkeypatch.setenv("POSPRE_TEST_EPOCHS", "5")
    assert load_recipe(recipe_file, [override]).trainer.max_duration == "5ep"
    assert load_recipe(recipe_file, ["seed=${POSPRE_TEST_EPOCHS}"]).seed == 5
    assert "POSPRE_TEST_MISSING is not set" in message(
        recipe_file, "data.path=${POSPRE_TEST_MISSING}/a"
    )


def test_numbers_without_a_dot_and_repeated_keys(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "optimizer: {base_lr: 1e-4}\n")
    assert load_recipe(recipe_file).optimizer.base_lr == 1e-4
    recipe_file.write_text(recipe_file.read_text() + "seed: 1\nseed: 2\n")
    assert "'seed' is given twice" in message(recipe_file)


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    assert "does not exist" in message(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    assert "sections" in message(tmp_path / "list.yaml")
    (tmp_path / "broken.yaml").write_text("a: [1\n")
    assert "not valid YAML" in message(tmp_path / "broken.yaml")


class Example:
    """Stands for an algorithm."""

    def __init__(
        self,
        *,
        count: int,
        ratio: float = 0.5,
        mode: Literal["a", "b"] = "a",
        pair: tuple[float, float] = (0.0, 1.0),
        limit: float | None = 0.1,
        span: tuple[float, float] | None = None,
    ) -> None: ...


def test_arguments_are_checked_against_the_constructor() -> None:
    given = {"count": 2, "pair": [1, 2], "span": [0, 1]}
    assert check_arguments("algorithms.example", Example, given) == {
        "count": 2,
        "ratio": 0.5,
        "mode": "a",
        "pair": (1.0, 2.0),
        "limit": 0.1,
        "span": (0.0, 1.0),
    }
    assert check_arguments("algorithms.example", Example, {"count": 2})["span"] is None


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"count": 1, "ration": 1}, ["'algorithms.example.ration'", "Did you mean 'ratio'"]),
        ({"count": "1"}, ["'algorithms.example.count' is '1' (str)", "whole number"]),
        ({"count": 1, "mode": "c"}, ["'algorithms.example.mode' is 'c'", "'a' or 'b'"]),
        ({}, ["'algorithms.example.count' is missing"]),
        ({"count": 1, "limit": "x"}, ["'algorithms.example.limit' is 'x'", "number"]),
        ({"count": 1, "limit": math.nan}, ["'algorithms.example.limit' is nan", "finite number"]),
        ({"count": 1, "span": [0, math.inf]}, ["'algorithms.example.span.1' is inf", "finite"]),
    ],
)
def test_arguments_mistakes(given: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check_arguments("algorithms.example", Example, given)
    for part in parts:
        assert part in str(caught.value)


def test_sizes_may_have_units(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["data.cache_limit=1.5GiB"]).data.cache_limit == 3 << 29
    assert load_recipe(recipe_file, ["data.cache_limit=1000"]).data.cache_limit == 1000
