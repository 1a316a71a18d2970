"""Options are declared once: fields with a docstring below, from which every text is made."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from pydantic import PositiveInt

from pospre.data.loader_options import LoaderOptions
from pospre.docstrings import docstrings, meanings, option_names
from pospre.embedding.settings import Embed
from pospre.evaluation.registry import evaluation_names, settings_class
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.nn.positions import SCHEMES, scheme_class
from pospre.option_texts import option_lines, options_of
from pospre.planning.gpus import Assumptions
from pospre.training.options_text import recipe_sections
from tests.option_cards import pages

KINDS: dict[str, type] = {
    "embed": Embed,
    "plan": Assumptions,
    "build_loader": LoaderOptions,
    **recipe_sections(),
    **{name: scheme_class(name) for name in SCHEMES},
    **{name: settings_class(name) for name in evaluation_names()},
    **{name: algorithm_class(name) for name in algorithm_names()},
}


@dataclass
class Base:
    count: PositiveInt = 1
    """Number of parts,
    as a whole; ``None``: all.
    """
    share: float | None = None
    """Share of the base."""


@dataclass
class Derived(Base):
    path: str = ""
    count: PositiveInt = 4
    bare: bool = False


@pytest.mark.parametrize("name", KINDS)
def test_every_option_says_what_it_means(name: str) -> None:
    told = meanings(KINDS[name])
    assert [*told] == [option for option in option_names(KINDS[name]) if option != "dims"]


def test_a_docstring_counts_for_derived_classes_until_one_of_them_has_its_own() -> None:
    assert option_names(Derived) == ["path", "count", "bare", "share"]
    count, share = "Number of parts, as a whole; ``None``: all.", "Share of the base."
    assert meanings(Base) == meanings(Derived) == {"count": count, "share": share}

    @dataclass
    class Local(Derived):
        share: float | None = 0.5
        """Share of its own."""

    assert meanings(Local) == {"count": count, "share": "Share of its own."}
    assert list(option_lines(Local))[:4] == [
        "\n  share: number or null = 0.5",
        "      Share of its own.",
        "\n  path: text = ''",
        "\n  count: whole number > 0 = 4",
    ]
    assert "      Number of parts, as a whole; null: all." in option_lines(Local)


def test_the_pages_list_the_options_as_declared() -> None:
    for page, text in pages().items():
        assert page.read_text("utf-8") == text, f"python -m tests.option_cards writes {page}"


def test_a_class_without_a_file_has_no_meanings() -> None:
    made: type = dataclass(
        type("Made", (), {"__annotations__": {"size": int}, "__module__": "nowhere"})
    )
    assert meanings(made) == {} and options_of(made)["size"].default is None


def test_a_file_is_read_without_running_it(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""What.\n\nMore.\n"""\nimport nothing\n\n\ndef run():\n    """Run."""\n')
    assert docstrings(path) == {"": "What.\n\nMore.", "run": "Run."}
