"""What the READMEs print is what runs, what they name is there, and their figures are measured."""

import argparse
import ast
import importlib.util
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_prep.convert import _parser
from data_prep.sources import KINDS
from pospre.evaluation.run import check_evaluation
from pospre.exporting.export import export
from pospre.planning.estimate import plan
from pospre.planning.gpus import Assumptions, Machine, gpu_named
from pospre.recipe.recipe import load_recipe
from pospre.run.same_recipe import FREE_KEYS
from pospre.train import main
from tests.benchmarks import learn
from tests.evaluation.checkpoints import save_checkpoint

ROOT = Path(__file__).parents[1]
NAMES = (
    "README.md",
    "data_prep/README.md",
    "data_prep/sources/README.md",
    "pospre/README.md",
    "pospre/algorithms/README.md",
    ".github/CONTRIBUTING.md",
    ".github/CHANGELOG.md",
    "yamls/ADAPT.md",
    "yamls/README.md",
    "tests/benchmarks/README.md",
)
TEXTS = [(ROOT / name).read_text(encoding="utf-8") for name in NAMES]
README, RECIPE, FIGURES = TEXTS[0], TEXTS[-2], TEXTS[-1]
CONTRIBUTING = TEXTS[NAMES.index(".github/CONTRIBUTING.md")]
RECIPES = re.findall(r"^```yaml\n(data:.*?)^```", RECIPE, re.M | re.S)
ROOMS = ("pospre", "data_prep", "tests", "yamls", ".setup", ".ci", ".github")
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
SMALL_HEADS = {
    "mae": "algorithms.mae.decoder_depth=1",
    "droppos": "algorithms.droppos.decoder_depth=1",
    "dinov2": "algorithms.dinov2.num_prototypes=64",
}


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
    heads = [given for name, given in SMALL_HEADS.items() if name in recipe.algorithms]
    assert main([str(path), *SHRINK, *heads]) == 0
    measured = {found.stem for found in (tmp_path / "runs/first/evaluation").glob("*.json")}
    assert measured == {*recipe.evaluation}


def test_the_line_for_timm_is_the_one_that_the_export_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(ROOT / "yamls/demo/droppos.yaml", [f"trainer.run_folder={tmp_path}"])
    checkpoint = save_checkpoint(recipe)
    monkeypatch.chdir(tmp_path)
    lines = export(str(checkpoint), Path("droppos.pth"), format="timm")
    (shown,) = re.findall(r"^```python\n(model = .*?)^```", RECIPE, re.M | re.S)
    printed = next(line for line in lines if line.startswith("model = "))
    assert ast.dump(ast.parse(shown)) == ast.dump(ast.parse(printed))


def anchors(text: str) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_and_names_lead_somewhere(name: str) -> None:
    page, text = ROOT / name, (ROOT / name).read_text("utf-8")
    for link in re.findall(r"\]\((?!http)([^)]+)\)", text):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text("utf-8")), link
    rooms = "|".join(map(re.escape, ROOMS))
    for path in re.findall(rf"`((?:{rooms})/[\w./*-]+)`", text):
        assert path == "pospre/algorithms/rows_apart.py" or list(ROOT.glob(path)), path


def test_the_map_names_what_is_there_and_nothing_else() -> None:
    (text,) = re.findall(r"^```\n(yamls/ .*?)^```", CONTRIBUTING, re.M | re.S)
    below = {path.name for room in ROOMS for path in (ROOT / room).rglob("*")} | {*ROOMS}
    assert {*re.findall(r"[\w.]+(?=/)|\w+\.py\b", text)} <= below
    for room in ("pospre", "data_prep"):
        paths = [path for path in (ROOT / room).iterdir() if "__" not in path.name]
        for path in paths:
            assert path.is_file() or f"{path.name}/" in text, path
        assert room == "data_prep" or all(path.name in text for path in paths)


def imported(path: Path, room: str) -> set[str]:
    """Return what a file imports directly below a room."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{each.name}" for each in node.names}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return {name.split(".")[1] for name in found if name.startswith(f"{room}.")}


@pytest.mark.parametrize(
    ("room", "text"),
    re.findall(r"^(pospre|data_prep)/ (.*?)(?=^\w|^\.)", CONTRIBUTING, re.M | re.S),
)
def test_imports_go_up_the_map_only(room: str, text: str) -> None:
    named = re.findall(r"(?<![/\w])(\w+)(?:\.py\b|/)", text)
    order = [name for name in dict.fromkeys(named) if (ROOT / room / name).is_dir()]
    if room == "pospre":  # its single files are named in order, too
        known = {path.stem for path in (ROOT / room).iterdir() if "__" not in path.name}
        order = [name for name in dict.fromkeys(named) if name in known]
        assert {*order} == known - {"README", "py"}
    assert {path.name for path in (ROOT / room).glob("*/") if "__" not in path.name} <= {*order}
    for path in (ROOT / room).rglob("*.py"):
        own = path.relative_to(ROOT / room).parts[0].removesuffix(".py")
        if own in order:
            later = imported(path, room) & {*order[order.index(own) + 1 :]}
            # methods are found by their names from there, each imported when it is asked for
            assert later <= ({"algorithms"} if path.name == "algorithm.py" else set()), path


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_commands_exist(text: str) -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    targets = {*re.findall(r"^([a-z-]+):", makefile, re.M)}
    for words in re.findall(r"(?:^|`)make ((?:[a-z-]+(?: |`|$))+)", text, re.M):
        assert {*words.replace("`", "").split()} <= targets, words
    for module in re.findall(r"python -m ((?:pospre|data_prep)[\w.]*)", text):
        assert importlib.util.find_spec(module), module


class Read(Exception):
    """The arguments of a command were read."""


@pytest.mark.parametrize("text", TEXTS, ids=NAMES)
def test_printed_commands_have_what_they_need(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_known_args

    def parsed(self: argparse.ArgumentParser, *given: Any, **more: Any) -> Any:
        parse(self, *given, **more)
        raise Read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
    blocks = "\n".join(re.findall(r"^```(?:bash|sh)?\n(.*?)^```", text, re.M | re.S))
    line = r"^python -m ((?:pospre|data_prep)\.\w+) (.*)"
    for module, words in re.findall(line, blocks.replace("\\\n", " "), re.M):
        given = shlex.split(words, comments=True)
        if not {"…", "NAME"} & {*given}:
            with pytest.raises(Read):
                importlib.import_module(module).main(given)


def test_the_callbacks_and_what_may_change_in_a_run_are_those_of_the_code() -> None:
    table = RECIPE.partition("| `callbacks.…` |")[2].partition("\n\n")[0]
    named = re.findall(r"^\| .*? \| `([\w.]+)\.(\w+)`", table, re.M)
    assert len(named) == 6
    for module, name in named:
        assert hasattr(importlib.import_module(f"pospre.training.{module}"), name)
    table = RECIPE.partition("| key of `trainer` | does |")[2].partition("\n\n")[0]
    keys = {f"trainer.{key}" for key in re.findall(r"^\| `(\w+): ", table, re.M)}
    kept = {"trainer.precision", "trainer.residual", "trainer.float8"}
    assert keys - {*FREE_KEYS} == kept


def test_the_kinds_of_data_sets_are_counted() -> None:
    (word,) = re.findall(r"\[(\w+) kinds\]\(sources/README.md\)", TEXTS[1])
    assert word == {12: "twelve", 13: "thirteen", 14: "fourteen"}[len(KINDS)]


def test_headline_figures_are_among_the_measured_ones() -> None:
    (table,) = re.findall(r"^\| what \| result \| compared with \|\n(.*?)\n\n", README, re.M | re.S)
    measured = {*re.findall(r"\d[\d.,]*\d|\d", FIGURES.replace("×", " "))}
    for number in re.findall(r"\d[\d.]*\d|\d", re.sub(r"1e-\d", "", table)):
        assert {number, f"{int(number):,}" if number.isdecimal() else number} & measured, number


def test_the_table_of_what_was_learned_is_that_of_the_results() -> None:
    methods = sorted(path.stem for path in learn.YAMLS.glob("*.yaml"))
    assert learn.table(methods) in FIGURES


def test_a_newcomer_reads_first_how_to_begin_and_whose_methods_these_are() -> None:
    clone, first, said = map(README.index, ("git clone", "\nmake demo", "`python` is `.venv/bin/"))
    assert clone < first < said < README.index("python -m")
    papers = re.findall(r"^## (\w+)$", (ROOT / "yamls/PAPERS.md").read_text("utf-8"), re.M)
    table = README.partition("| paper |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| \[?(\w+)", table, re.M) == papers
    for method in re.findall(r"`(\w+)`", table):
        assert f"\n## {method}\n" in TEXTS[NAMES.index("pospre/algorithms/README.md")]
    pictures = [ROOT / name for name in re.findall(r"!\[.*?\]\((.*?)\)", README)]
    assert pictures and all(path.stat().st_size < 150_000 for path in pictures)


def piece(heading: str) -> str:
    """Return the first block of commands below a heading of the README."""
    return README.partition(f"\n### {heading}\n")[2].split("```\n")[1]


def test_the_five_commands_for_own_images_run(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_folder(num_images=24, name="photos")
    monkeypatch.chdir(tmp_path)
    lines = piece("Your own images in five commands").splitlines()
    assert len(lines) == 5
    for line in lines:
        python, option, module, *arguments = shlex.split(line)
        assert (python, option) == ("python", "-m")
        arguments += SHRINK if module == "pospre.train" else []
        assert importlib.import_module(module).main(arguments) == 0, line
    assert (tmp_path / "photos.pth").is_file() and (tmp_path / "runs/photos/report.html").is_file()
    assert (tmp_path / "runs/photos/evaluation/position_grid.json").is_file()


def test_the_commands_for_imagenet_are_read_and_their_hours_are_those_of_the_plan() -> None:
    lines = piece("ImageNet, from end to end").splitlines()
    *converting, pretraining, finetuning = map(shlex.split, lines)
    data, wanted = load_recipe(finetuning[-1]).data.path, {"train": "", "val": "_val"}
    for words, (split, ending) in zip(converting, wanted.items(), strict=True):
        given = _parser().parse_args(words[3:])
        assert (given.destination, given.split) == (data + ending, split)
    row = r"^\| `(\S+)` \| (\d+) \| (\S+) \| (\d+) \| (\d+) \| (\S+) \((\d+) cores\) \|$"
    rows = {name: numbers for name, *numbers in re.findall(row, README, re.M)}
    assert pretraining[-1] == "mae_vitb16" and {pretraining[-1], finetuning[-1]} < {*rows}
    for name, (epochs, hours, gpu_hours, cost, rate, _) in rows.items():
        recipe = load_recipe(name)
        assert recipe.trainer.max_duration == f"{epochs}ep"
        batch = recipe.data.batch_size
        samples = int(epochs) * (1_281_167 // batch) * batch
        took = samples / int(rate.replace(",", "")) / 3600
        assert (hours, gpu_hours, cost) == (f"{took:.1f}", f"{8 * took:.0f}", f"{24 * took:.0f}")
    planned = plan(load_recipe(finetuning[-1]), Machine(gpu_named("h100"), 8, 1), Assumptions())
    feed, (rate, cores) = planned.feed(), rows[finetuning[-1]][-2:]
    assert (f"{feed['images_per_s']:,.0f}", f"{feed['cores']:.0f}") == (rate, cores)
