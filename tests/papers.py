"""The table of yamls/PAPERS.md: its rows, their commands one by one, and data to check them on."""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from data_prep import convert as conversion
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.resolve import resolve
from tests.conftest import draw_image
from tests.data_prep.sample_clips import write_clips
from tests.evaluation.dense.pictures import coco_folder, davis_folder, mask_folder

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "yamls" / "PAPERS.md").read_text(encoding="utf-8")
_LOOP = re.compile(r"for (\w) in (.+?); do (.+); done")
CLASSES = {
    **{"cifar10": 10, "cifar100": 100, "tiny_imagenet": 200, "cars": 196},
    **{"imagenet": 1000, "imagenet_val": 1000},
}
"""Of data whose recipes tell the number; of the others two."""


@dataclass(frozen=True)
class Row:
    """A line of a paper's table."""

    paper: str
    name: str
    commands: tuple[str, ...]
    status: str
    published: str
    ours: str

    @property
    def runs(self) -> bool:
        """Whether its commands can be given; they may measure less than it quotes, or nothing."""
        return self.status.startswith(("runs", "trains"))

    def spelled(self) -> list[str]:
        """Return the commands, those of loops one by one."""
        return [command for given in self.commands for command in spelled(given)]


def rows() -> Iterator[Row]:
    """Yield all rows."""
    for section in re.split(r"^## ", TEXT, flags=re.M)[1:]:
        paper = section.partition("\n")[0]
        for line in re.findall(r"^\| (?!row )(.*)\|$", section, re.M):
            name, commands, *rest = (cell.strip() for cell in line.split("|"))
            yield Row(paper, name, tuple(re.findall(r"`([^`]+)`", commands)), *rest)


def spelled(command: str) -> list[str]:
    """Return the commands of a shell loop, perhaps of loops in it, or the command itself."""
    loop = _LOOP.fullmatch(command)
    if loop is None:
        return [command]
    name, values, body = loop.groups()
    bodies = [re.sub(rf"\${name}\b|\${{{name}}}", value, body) for value in values.split()]
    return [each for body in bodies for each in spelled(body)]


class Words(NamedTuple):
    """The module that a command runs with ``python -m``, and what it is given."""

    module: str
    given: list[str]


def words_of(command: str) -> Words:
    """Return what a command runs; of another than ``python -m …`` no module and all its words."""
    words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        return Words(words[2], words[3:])
    return Words("", words)


ROWS = list(rows())


@cache
def trained(command: str) -> Recipe:
    """Return the recipe that a command trains."""
    name, *overrides = words_of(command).given
    return resolve(load_recipe(ROOT / name, overrides))


@cache
def runs() -> Mapping[Path, Recipe]:
    """Return the recipes of all runs that the table's commands leave, by their folders.

    Commands that train different things under one name would meet in one folder.
    """
    found: dict[Path, Recipe] = {}
    for row in ROWS:
        for command in row.spelled():
            if " -m pospre.train " in command and row.runs:
                recipe = trained(command)
                assert found.setdefault(recipe.run_path(), recipe) == recipe, command
    return found


def write_data(folder: Path) -> None:
    """Write a small data set, or a list, wherever a command of the table or a recipe names one."""
    data = folder / "data"
    davis_folder(data / "davis", side=(480, 854))
    mask_folder(data / "ade20k", {"train": 8, "val": 4}, (64, 64))
    coco_folder(data / "coco", {"train": 8, "val": 4})
    for path in sorted(_folders() - {"data/davis", "data/ade20k", "data/coco"}):
        count = CLASSES.get(path.removeprefix("data/").partition("/")[0], 2)
        if path.startswith("words"):
            convert(write_clips(folder / f"{path}_clips", 6), folder / path, "--frames", "100")
        elif count == 1000:  # so many folders take long to list
            convert(write_classes(folder / f"{path}_images", count), folder / path)
        else:
            write_classes(folder / path, count)
    (folder / "classes.json").write_text(json.dumps({"c0000": ["c0000", "c0001"]}))
    (folder / "real.json").write_text(json.dumps([[0]] * 1000))
    (folder / "imagenet_1percent.txt").write_text("".join(f"{name(n)}\n" for n in range(20)))


def name(number: int) -> str:
    """Return what ImageNet calls an image."""
    return f"ILSVRC2012_val_{number + 1:08d}.jpg"


def write_classes(root: Path, count: int) -> Path:
    """Write an image for each of so many classes, twelve at least, and return the folder."""
    root.mkdir(parents=True)
    first = root / "first.jpg"
    draw_image(0, 40, 32).save(first)
    for number in range(max(count, 12)):
        file = root / f"c{number % count:04d}" / name(number)
        file.parent.mkdir(exist_ok=True)
        file.hardlink_to(first)
    first.unlink()
    return root


def convert(source: Path, target: Path, *options: str) -> None:
    """Convert a folder to MDS."""
    words = [str(source), str(target), "--format", "mds", "--workers", "1", *options]
    if conversion.main(words):
        raise RuntimeError(f"{source} was not converted")


def _folders() -> set[str]:
    """Return the data sets that commands read."""
    found = set()
    for row in ROWS:
        for command in row.spelled():
            if " -m data_prep.convert " not in command:
                found |= set(re.findall(r"(?<![\w/])(?:data/[\w/]+|words_\w+)", command))
    for recipe in runs().values():
        found.add(recipe.data.path)
        found |= {str(options["data"]) for options in recipe.evaluation.values() if options}
    return found
