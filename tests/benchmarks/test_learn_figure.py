"""The README's figure is drawn from the results of `make learn`, and from nothing else."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.benchmarks import learn_figure


def test_the_figure_is_that_of_the_results() -> None:
    drawn = learn_figure.draw()
    assert learn_figure.FIGURE.read_text("utf-8") == drawn
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    assert f"(.github/{learn_figure.FIGURE.name})" in readme


def test_every_method_has_a_bar_and_better_ones_stand_above() -> None:
    root = ET.fromstring(learn_figure.draw())
    words = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {*learn_figure.NAMES.values()} <= {*words}
    shown = [float(text[:-2]) for text in words if re.fullmatch(r"\d+\.\d %", text)]
    assert len(shown) == len(learn_figure.NAMES) and shown == sorted(shown, reverse=True)
    bars = root.findall("{http://www.w3.org/2000/svg}rect")[1:]
    assert len(bars) == 2 * len(shown) and all(float(bar.attrib["width"]) > 0 for bar in bars)
