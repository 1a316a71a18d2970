"""Every host with every algorithm: trains, or is refused with the reason. Writes the table.

``python -m tests.algorithms.composition`` prints what ``pospre/algorithms/README.md`` holds.
"""

from pathlib import Path
from typing import NamedTuple

from pospre.errors import UserError
from pospre.model.algorithm import algorithm_names
from pospre.output import markdown_table
from tests.algorithms.cases import ALONE, HOSTS, Case, Options, train_and_resume

README = Path(__file__).parents[2] / "pospre" / "algorithms" / "README.md"
STEPS = 3
START, END = "<!-- composition -->", "<!-- /composition -->"

NEEDED: dict[tuple[str, ...], Options] = {
    ("supervised", "droppos"): {"supervised": {"mask_ratio": 0.75}},
    ("supervised", "lut"): {"supervised": {"mask_ratio": 0.75}},
    ("simmim", "distill"): {"distill": {"on": "all"}},
    ("simmim", "gram"): {"gram": {"on": "all"}},
    ("simmim", "paka"): {"paka": {"on": "all"}},
}
"""Options without which a pair is refused: supervised hides no patches by default,
and simmim masks some of every view."""


class Outcome(NamedTuple):
    """What became of a pair.

    Attributes:
        refusal: why it is refused without options; None when it trains, saves and resumes.
        needed: the options of ``NEEDED`` with which it does.
    """

    refusal: str | None
    needed: Options | None = None


def pairs() -> list[tuple[str, ...]]:
    """Return every host alone, every algorithm alone, and every host with every algorithm."""
    others = [name for name in algorithm_names() if name not in HOSTS]
    alone: list[tuple[str, ...]] = [(name,) for name in (*HOSTS, *others)]
    beside = [(host, name) for host in (*HOSTS, *ALONE) for name in others if host != name]
    return [*alone, *beside]


def outcomes() -> dict[tuple[str, ...], Outcome]:
    """Return what becomes of every pair.

    Raises:
        AssertionError: a pair trains without the options that it is said to need, or not with them.
    """
    found = {}
    for names in pairs():
        refusal, needed = refusal_of(Case(names)), NEEDED.get(names)
        if needed is not None:
            assert refusal is not None, f"{names} train without {needed}"
            assert refusal_of(Case(names, options=needed)) is None, f"{names} with {needed}"
        found[names] = Outcome(refusal, needed)
    return found


def refusal_of(case: Case) -> str | None:
    """Return why the case is refused, or None when it trains, saves and resumes.

    Raises:
        AssertionError: it was built, but its loss does not fall or a resumed run differs.
    """
    case = case.of_one_block()
    try:
        _, losses = train_and_resume(case.build, case.batch(), 1, STEPS)
    except UserError as error:
        return str(error)
    assert min(losses[-2:]) < losses[0], f"{case.title}: the loss does not fall: {losses}"
    return None


def table(found: dict[tuple[str, ...], Outcome]) -> str:
    """Return the outcomes as a Markdown table with the reasons below it."""
    others = [name for name in algorithm_names() if name not in HOSTS]
    rows: list[list[str]] = []
    reasons: list[str] = []

    def cell(names: tuple[str, ...]) -> str:
        if names not in found:
            return "–"
        reason, needed = found[names]
        if reason is None:
            return "yes"
        verdict = "no"
        if needed is not None:
            keys, values = spelled(needed)
            verdict, reason = f"yes, with {keys}", f"Trains with {values}. Without: {reason}"
        if reason not in reasons:
            reasons.append(reason)
        return f"{verdict} ({reasons.index(reason) + 1})"

    for host in (*HOSTS, *ALONE):
        rows.append([f"**{host}**", cell((host,)), *(cell((host, name)) for name in others)])
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([markdown_table(["", "alone", *others], rows), "", *notes])


def spelled(options: Options) -> tuple[str, str]:
    """Return the options' names, and the options as a recipe has them."""
    each = [(owner, *option) for owner, given in options.items() for option in given.items()]
    keys = ", ".join(f"`{key}`" for _, key, _ in each)
    return keys, ", ".join(f"`{owner}.{key}: {value}`" for owner, key, value in each)


def written_table() -> str:
    """Return the table that the README holds."""
    text = README.read_text(encoding="utf-8")
    return text.partition(START)[2].partition(END)[0].strip()


if __name__ == "__main__":
    print(table(outcomes()))
