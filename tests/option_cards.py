"""Options in the READMEs as they are declared: ``python -m tests.option_cards`` writes them."""

import re
import sys
import textwrap
from pathlib import Path

from pospre.evaluation import common_settings
from pospre.evaluation.registry import evaluation_names, settings_class, summary
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.option_texts import Option, options_of
from pospre.output import markdown_table

ROOT = Path(__file__).parents[1]
METHODS, RECIPES = ROOT / "pospre" / "algorithms" / "README.md", ROOT / "yamls" / "README.md"
GROUPS = ("classification", "position", "dense", "analysis")
SHARED = {
    name
    for kind in vars(common_settings).values()
    if isinstance(kind, type) and issubclass(kind, common_settings.Settings)
    for name in kind.names()
}
"""Settings that many evaluations have."""


def card(name: str) -> str:
    """Return the line of a method's card with its options and their defaults."""
    kind = algorithm_class(name)
    path = Path(str(sys.modules[kind.__module__].__file__)).relative_to(METHODS.parent)
    options = ", ".join(spelled(*each) for each in options_of(kind).items())
    line = f"- **Options** ([meanings]({path})) {options}.\n"
    return textwrap.fill(line, 128, subsequent_indent="  ", break_on_hyphens=False) + "\n"


def spelled(name: str, option: Option) -> str:
    """Return ``name`` and default, and the other values if these are a few words."""
    words = option.takes.removesuffix(" or null").split(" | ")
    others = [f"`{word}`" for word in words if word != option.default]
    shown = f"`{name}` {option.default}"
    is_choice = len(words) > 1 and words != ["true", "false"]
    return f"{shown} (or {', '.join(others)})" if is_choice else shown


def evaluations() -> str:
    """Return the table of evaluations with their own settings."""
    rows: list[list[str]] = []
    for group in GROUPS:
        rows.append([f"**{group}**", "", ""])
        for name in evaluation_names():
            kind = settings_class(name)
            if kind.__module__.split(".")[-2] == group:
                own = [f"`{key}`" for key in kind.names() if key not in SHARED]
                rows.append([f"`{name}`", summary(name), ", ".join(own)])
    assert len(rows) == len(evaluation_names()) + len(GROUPS)
    return markdown_table(("evaluation", "what it measures", "settings of its own"), rows) + "\n"


def pages() -> dict[Path, str]:
    """Return the text that each page should have."""
    methods, recipes = (path.read_text(encoding="utf-8") for path in (METHODS, RECIPES))
    for name in algorithm_names():
        line = rf"(?ms)(^## {name}\n(?:(?!^## ).)*?)^- \*\*Options\*\*.*?(?=^- |^$)"
        found = re.search(line, methods)
        assert found is not None, f"the card of {name} has no line of options: {METHODS}"
        methods = methods[: found.end(1)] + card(name) + methods[found.end() :]
    table = re.compile(r"^\| evaluation \| what it measures .*?(?=^$)", re.M | re.S)
    return {METHODS: methods, RECIPES: table.sub(evaluations(), recipes)}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
