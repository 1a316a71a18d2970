"""Every host with every algorithm: trains, or is refused with the reason. Writes the table.

``python -m tests.algorithms.composition`` prints what ``pospre/algorithms/README.md`` holds.
"""

import copy
from pathlib import Path

from pospre.errors import UserError
from pospre.pretrain.algorithm import algorithm_names
from tests.algorithms.cases import ALONE, HOSTS, Case, make_optimizer, train

README = Path(__file__).parents[2] / "pospre" / "algorithms" / "README.md"
STEPS = 10
START, END = "<!-- composition -->", "<!-- /composition -->"


def pairs() -> list[tuple[str, ...]]:
    """Return every host alone, every algorithm alone, and every host with every algorithm."""
    others = [name for name in algorithm_names() if name not in HOSTS]
    alone: list[tuple[str, ...]] = [(name,) for name in (*HOSTS, *others)]
    beside = [(host, name) for host in (*HOSTS, *ALONE) for name in others if host != name]
    return [*alone, *beside]


def outcome(names: tuple[str, ...]) -> str | None:
    """Return why the pair is refused, or None when it trains, saves and resumes.

    Raises:
        AssertionError: it was built, but its loss does not fall or a resumed run differs.
    """
    case = Case(names)
    try:
        model, algorithms = case.build()
    except UserError as error:
        return str(error)
    batch = case.batch()
    optimizer = make_optimizer(model)
    losses = train(model, algorithms, optimizer, batch, range(STEPS // 2))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses += train(model, algorithms, optimizer, batch, range(STEPS // 2, STEPS))
    assert min(losses[-3:]) < losses[0], f"{case.title}: the loss does not fall: {losses}"
    resumed, algorithms = case.build()
    optimizer = make_optimizer(resumed)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = train(resumed, algorithms, optimizer, batch, range(STEPS // 2, STEPS))
    assert again == losses[STEPS // 2 :], f"{case.title}: a resumed run differs"
    return None


def table(outcomes: dict[tuple[str, ...], str | None]) -> str:
    """Return the outcomes as a Markdown table with the reasons below it."""
    others = [name for name in algorithm_names() if name not in HOSTS]
    columns = ["alone", *others]
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    reasons: list[str] = []

    def cell(names: tuple[str, ...]) -> str:
        if names not in outcomes:
            return "–"
        reason = outcomes[names]
        if reason is None:
            return "yes"
        if reason not in reasons:
            reasons.append(reason)
        return f"no ({reasons.index(reason) + 1})"

    for host in (*HOSTS, *ALONE):
        row = [cell((host,)), *(cell((host, name)) for name in others)]
        lines.append(f"| **{host}** | {' | '.join(row)} |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, start=1)]
    return "\n".join([*lines, "", *notes])


def written_table() -> str:
    """Return the table that the README holds."""
    text = README.read_text(encoding="utf-8")
    return text.partition(START)[2].partition(END)[0].strip()


if __name__ == "__main__":
    print(table({names: outcome(names) for names in pairs()}))
