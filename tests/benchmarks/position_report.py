"""What the position table declares before anything is measured, and how its figures are told."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from pospre.output import markdown_table
from tests.benchmarks.contrasts import (
    Contrast,
    Spread,
    adjusted,
    detectable,
    measured,
    pooled,
    sentence,
)

FIGURES = {
    "knn/top1": "kNN",
    "logistic/top1": "linear",
    "shifted_positions/x1": "kNN of 1,000, ×1",
    "shifted_positions/x2": "kNN of 1,000, ×2",
    "shifted_positions/x4": "kNN of 1,000, ×4",
    "shifted_positions/mosaic2": "of 2 × 2 images",
    "shifted_positions/mosaic4": "of 4 × 4 images",
    "segmentation/mIoU": "CamVid mIoU",
    "position_probe/top1": "position",
}
HOSTS = ["mae", "supervised", "dinov2", "ijepa"]
RESOLVED = "shifted_positions/x4"
OWN, BLANK = "training/own", "training/blank"
"""What a task that predicts places reaches at the end of training, and on blank images."""
PAPERS = ["learned", "plain rotary", "DINOv3's rotary", "with jitter"]
OTHERS = ["none", "sin-cos", "mixed rotary", "ALiBi", "torus", "LookHere", "four directions"]

Lines = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""The measured lines by (row, host, seed)."""


@dataclass(frozen=True)
class Block:
    """Rows by host, and the pairs of rows whose difference is asked, over some of the hosts.

    Each family of figures is tested for itself: Holm's p is over its figures and all pairs.
    """

    rows: Mapping[str, Sequence[str]]
    pairs: Sequence[tuple[str, str, tuple[str, ...]]] = ()
    families: Sequence[Sequence[str]] = ()

    @property
    def cells(self) -> list[tuple[str, str]]:
        """All pairs of row and host."""
        return [(row, host) for host, rows in self.rows.items() for row in rows]


_A = ("mae", "supervised")
_ROTARY = "DINOv3's rotary"
_TASKS = {
    "mae": ["DropPos", "SP", "LUT"],
    "dinov2": ["masked position", "cyclic masks", "SIGReg"],
    "ijepa": ["context"],
}
BLOCKS = {
    "A": Block(
        dict.fromkeys(_A, PAPERS),
        [(row, other, _A) for other, row in pairwise(PAPERS)],
        [["knn/top1", "logistic/top1", RESOLVED]],
    ),
    "A+": Block({"dinov2": PAPERS}),
    "B": Block(
        {host: [_ROTARY, *tasks] for host, tasks in _TASKS.items()},
        [(task, _ROTARY, (host,)) for host, tasks in _TASKS.items() for task in tasks],
        [["knn/top1", "logistic/top1"], ["segmentation/mIoU"]],
    ),
    "C": Block(
        {"mae": ["learned", *OTHERS]},
        [(row, "learned", ("mae",)) for row in OTHERS],
        [[RESOLVED]],
    ),
}
"""A and A+ ask what issue 17 of facebookresearch/dinov3 asks; B, what a task adds to its host; C,
what a larger image does."""


def report(blocks: Sequence[str], lines: Lines, seeds: Sequence[int]) -> str:
    """Return figures, spreads, missing cells of ``seeds`` and sentences of blocks as Markdown."""
    spreads = {figure: pooled(cells_of(figure, lines)) for figure in FIGURES}
    parts = [_spread_line(FIGURES[key], spread) for key, spread in spreads.items() if spread]
    for name in blocks:
        block = BLOCKS[name]
        parts += [f"### Block {name}", _grid(block, lines), *_missing(block, lines, seeds)]
        learned = gate(block, lines)
        parts += [_gate_line(cell, lines, passed) for cell, passed in learned.items()]
        out = {cell for cell, passed in learned.items() if not passed}
        asked = [
            pair for pair in block.pairs if not any((pair[0], each) in out for each in pair[2])
        ]
        for figures in block.families:
            family = [Contrast(figure, *pair) for figure in figures for pair in asked]
            parts += _sentences(family, lines, spreads)
    return "\n\n".join(parts)


def gate(block: Block, lines: Lines) -> dict[tuple[str, str], bool]:
    """Return whether tasks that predict places have learned here, by (row, host).

    In every seed, the task's own measure at the end of training must be above that on blank images,
    and above 0, the R² of guessing; chance passes one in 32 if there are five. Of a task that has
    not learned no difference is read: it leaves its families. Tasks that predict content have no
    such measure, and stay.
    """
    own, blank = cells_of(OWN, lines), cells_of(BLANK, lines)
    return {
        cell: all(o > max(b, 0.0) for o, b in zip(own[cell], blank[cell], strict=True))
        for cell in block.cells
        if cell in own
    }


def _gate_line(cell: tuple[str, str], lines: Lines, passed: bool) -> str:
    own, blank = (_cell(cells_of(figure, lines)[cell]) for figure in (OWN, BLANK))
    verdict = "learned" if passed else "not learned here, so no difference is read"
    return f"{' × '.join(cell)}: its own measure is {own}, on blank images {blank}: {verdict}."


def cells_of(figure: str, lines: Lines) -> dict[tuple[str, str], list[float]]:
    """Return one figure of all seeds, by row and host."""
    values: dict[tuple[str, str], list[float]] = {}
    for (row, host, _), line in sorted(lines.items()):
        if figure in line.get("figures", {}):
            values.setdefault((row, host), []).append(line["figures"][figure])
    return values


def _grid(block: Block, lines: Lines) -> str:
    rows = []
    for row, host in block.cells:
        own = {key: line for key, line in lines.items() if key[:2] == (row, host)}
        if own:
            cells = [_cell(cells_of(figure, own).get((row, host))) for figure in FIGURES]
            untrained = cells_of("position_probe/untrained", own).get((row, host))
            rows.append([host, row, str(len(own)), *cells, _cell(untrained)])
    titles = ["host", "row", "seeds", *FIGURES.values(), "position, untrained"]
    return markdown_table(titles, rows)


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return ""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


def _spread_line(title: str, spread: Spread) -> str:
    equal = "" if spread.equal is None else f", Bartlett's p {spread.equal:.2f}"
    return f"{title}: sd {100 * spread.deviation:.2f} points (df {spread.freedom}{equal})."


def _missing(block: Block, lines: Lines, seeds: Sequence[int]) -> list[str]:
    """Name the cells of a block that have no line, and say why others cannot be."""
    refused = {key[:2]: line["refused"] for key, line in lines.items() if "refused" in line}
    left = []
    for pair in block.cells:
        lacking = [str(seed) for seed in seeds if (*pair, seed) not in lines]
        if lacking and pair not in refused:
            some = f" (seed {', '.join(lacking)})" if len(lacking) < len(seeds) else ""
            left.append(f"{' × '.join(pair)}{some}")
    parts = [f"Missing: {', '.join(left)}."] if left else []
    return parts + [f"{row} × {host}: {why}" for (row, host), why in refused.items()]


def _sentences(
    contrasts: Sequence[Contrast], lines: Lines, spreads: Mapping[str, Spread | None]
) -> list[str]:
    """Return the sentences of a family of contrasts, and what its runs can show."""
    results, alone = [], 0
    for contrast in contrasts:
        spread, cells = spreads[contrast.figure], cells_of(contrast.figure, lines)
        if contrast.missing(cells):
            continue
        if spread is None:
            alone += 1
        else:
            results.append(measured(contrast, cells, spread))
    family, parts = len(contrasts), []
    for figure in dict.fromkeys(each.figure for each in contrasts):
        runs = [min(each.runs) for each in results if each.contrast.figure == figure]
        spread = spreads[figure]
        if spread and runs:
            points = 100 * detectable(spread, min(runs), family)
            parts.append(
                f"{FIGURES[figure]}: with {min(runs)} runs a side, four of five true differences "
                f"of {points:.1f} points are found."
            )
    told = [f"- {sentence(result, FIGURES)}" for result in adjusted(results, family)]
    left = family - len(results) - alone
    rest = [f"{left} of {family} declared contrasts are not measured yet."] if left else []
    if alone:
        rest.append(
            f"Of {alone} of {family} declared contrasts nothing can be said: no row has two seeds "
            "that differ."
        )
    return [*parts, "\n".join(told), *rest] if told else [*parts, *rest]
