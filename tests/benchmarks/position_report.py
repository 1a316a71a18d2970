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
    "segmentation/mIoU": "CamVid mIoU",
    "position_probe/top1": "position",
}
HOSTS = ["mae", "supervised", "dinov2"]
RESOLVED = "shifted_positions/x4"
PAPERS = ["learned", "plain rotary", "DINOv3's rotary", "with jitter"]
OTHERS = ["none", "sin-cos", "mixed rotary", "ALiBi", "torus", "LookHere", "four directions"]

Lines = Mapping[tuple[str, str, int], Mapping[str, Any]]
"""The measured lines by (row, host, seed)."""


@dataclass(frozen=True)
class Block:
    """Rows under hosts, and the pairs of rows whose difference is asked, at which figures."""

    rows: Sequence[str]
    hosts: tuple[str, ...]
    pairs: Sequence[tuple[str, str]] = ()
    figures: Sequence[str] = ()

    @property
    def contrasts(self) -> list[Contrast]:
        """All tests of the family, whatever is measured yet."""
        return [
            Contrast(figure, *pair, self.hosts) for figure in self.figures for pair in self.pairs
        ]


BLOCKS = {
    "A": Block(
        PAPERS,
        ("mae", "supervised"),
        [(row, other) for other, row in pairwise(PAPERS)],
        ["knn/top1", "logistic/top1", RESOLVED],
    ),
    "A+": Block(PAPERS, ("dinov2",)),
    "C": Block(["learned", *OTHERS], ("mae",), [(row, "learned") for row in OTHERS], [RESOLVED]),
}
"""A and A+ ask what issue 17 of facebookresearch/dinov3 asks; C, what a larger image does."""


def report(blocks: Sequence[str], lines: Lines) -> str:
    """Return figures, spreads, missing cells and sentences of some blocks as Markdown."""
    spreads = {figure: pooled(cells_of(figure, lines)) for figure in FIGURES}
    parts = [_spread_line(FIGURES[key], spread) for key, spread in spreads.items() if spread]
    for name in blocks:
        block = BLOCKS[name]
        parts += [f"### Block {name}", _grid(block, lines), *_missing(block, lines)]
        parts += _sentences(block, lines, spreads)
    return "\n\n".join(parts)


def cells_of(figure: str, lines: Lines) -> dict[tuple[str, str], list[float]]:
    """Return one figure of all seeds, by row and host."""
    values: dict[tuple[str, str], list[float]] = {}
    for (row, host, _), line in sorted(lines.items()):
        if figure in line.get("figures", {}):
            values.setdefault((row, host), []).append(line["figures"][figure])
    return values


def _grid(block: Block, lines: Lines) -> str:
    rows = []
    for host in block.hosts:
        for row in block.rows:
            own = {key: line for key, line in lines.items() if key[:2] == (row, host)}
            if own:
                cells = [_cell(cells_of(figure, own).get((row, host))) for figure in FIGURES]
                untrained = cells_of("position_probe/untrained", own).get((row, host))
                rows.append([host, row, str(len(own)), *cells, _cell(untrained)])
    titles = ["host", "positions", "seeds", *FIGURES.values(), "position, untrained"]
    return markdown_table(titles, rows)


def _cell(values: Sequence[float] | None) -> str:
    if not values:
        return ""
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


def _spread_line(title: str, spread: Spread) -> str:
    equal = "" if spread.equal is None else f", Bartlett's p {spread.equal:.2f}"
    return f"{title}: sd {100 * spread.deviation:.2f} points (df {spread.freedom}{equal})."


def _missing(block: Block, lines: Lines) -> list[str]:
    """Name the cells of a block that have no line, and say why others cannot be."""
    pairs = [(row, host) for host in block.hosts for row in block.rows]
    known = {key[:2]: line for key, line in lines.items()}
    left = [f"{row} × {host}" for row, host in pairs if (row, host) not in known]
    parts = [f"Missing: {', '.join(left)}."] if left else []
    refused = {pair: line["refused"] for pair, line in known.items() if "refused" in line}
    return parts + [f"{row} × {host}: {why}" for (row, host), why in refused.items()]


def _sentences(block: Block, lines: Lines, spreads: Mapping[str, Spread | None]) -> list[str]:
    results = []
    for contrast in block.contrasts:
        spread, cells = spreads[contrast.figure], cells_of(contrast.figure, lines)
        if spread is not None and not contrast.missing(cells):
            results.append(measured(contrast, cells, spread))
    family = len(block.contrasts)
    parts = []
    for figure in block.figures:
        spread, runs = (
            spreads[figure],
            [min(r.runs) for r in results if r.contrast.figure == figure],
        )
        if spread and runs:
            points = 100 * detectable(spread, min(runs), family)
            parts.append(
                f"{FIGURES[figure]}: with {min(runs)} runs a side, four of five true differences "
                f"of {points:.1f} points are found."
            )
    told = [f"- {sentence(result, FIGURES)}" for result in adjusted(results, family)]
    left = family - len(results)
    rest = [f"{left} of {family} declared contrasts are not measured yet."] if left else []
    return [*parts, "\n".join(told), *rest] if told else [*parts, *rest]
