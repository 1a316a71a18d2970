"""The figure at the head of README.md: what `make learn` measured, as a small SVG.

``python -m tests.benchmarks.learn_figure`` draws ``results/<method>.json`` again.
"""

import statistics
import sys
from pathlib import Path

from tests.benchmarks.learn import YAMLS, kept

FIGURE = Path(__file__).parents[2] / ".github" / "learn.svg"
NAMES = {
    "droppos": "DropPos",
    "mae": "MAE",
    "mp3": "MP3",
    "dinov2": "DINOv2",
    "intertwined": "Intertwined",
    "lut": "LUT",
    "ijepa": "I-JEPA",
    "stop": "StoP",
    "simmim": "SimMIM",
    "lejepa": "LeJEPA",
    "loca": "LOCA",
    "part": "PART",
    "sp": "SP",
}
WIDTH, LEFT, RIGHT, TOP, ROW = 640, 110, 60, 12, 26
CHANCE, MOST = 10, 50
TRAINED, UNTRAINED = "#0072b2", "#b8b8b8"  # told apart by the colour-blind, too


def accuracies(method: str) -> tuple[float, float]:
    """Return the mean kNN accuracy over the seeds in %, trained and untrained."""
    seeds = list(kept(method).values())
    trained, untrained = (
        statistics.fmean(100 * figures[key] for figures in seeds) for key in ("knn", "initial_knn")
    )
    return round(trained, 1), round(untrained, 1)


def draw() -> str:
    """Return the SVG: a bar for each method, from the untrained encoder's accuracy on."""
    figures = {
        method: accuracies(method) for method in sorted(p.stem for p in YAMLS.glob("*.yaml"))
    }
    methods = sorted(figures, key=lambda method: -figures[method][0])
    bottom = TOP + ROW * len(methods)
    parts = []
    for share in range(CHANCE, MOST + 1, 10):
        parts.append(f'<path d="M{_x(share):g} {TOP}V{bottom}" stroke="#dddddd"/>')
        words = f"{share} %" + (" (chance)" if share == CHANCE else "")
        parts.append(_text(_x(share), bottom + 16, words, "middle"))
    for row, method in enumerate(methods):
        (trained, untrained), y = figures[method], TOP + ROW * row + 4
        middle = y + ROW / 2
        parts.append(_text(LEFT - 8, middle, NAMES[method], "end"))
        parts.append(_bar(CHANCE, untrained, y, UNTRAINED))
        parts.append(_bar(untrained, trained, y, TRAINED))
        parts.append(_text(_x(trained) + 6, middle, f"{trained:.1f} %", "start"))
    size = f'viewBox="0 0 {WIDTH} {bottom + 28}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">\n'
        f'<rect width="{WIDTH}" height="{bottom + 28}" fill="#ffffff"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _x(share: float) -> float:
    return round(LEFT + (WIDTH - LEFT - RIGHT) * (share - CHANCE) / (MOST - CHANCE), 1)


def _bar(start: float, end: float, y: float, colour: str) -> str:
    wide = round(_x(end) - _x(start), 1)
    return (
        f'<rect x="{_x(start):g}" y="{y:g}" width="{wide:g}" height="{ROW - 8}" fill="{colour}"/>'
    )


def _text(x: float, y: float, words: str, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="#333333">{words}</text>'


if __name__ == "__main__":
    FIGURE.write_text(draw(), encoding="utf-8")
    sys.exit()
