import itertools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep import statistics
from tests.data_prep.reading import FORMATS, Says, destination, run
from tests.data_prep.sample_clips import write_clips
from tests.data_prep.sample_images import encoded, picture, write_files


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three images of one class, one of another, of known sizes."""
    sizes = {"a/1.jpg": (100, 50), "a/2.jpg": (60, 60), "a/3.png": (20, 40), "b/1.jpg": (200, 100)}
    files = {
        name: encoded(picture(1, *size), "PNG" if name.endswith("png") else "JPEG")
        for name, size in sizes.items()
    }
    return write_files(tmp_path / "source", files)


def rows(text: str) -> dict[str, list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("  ")]
    return {line[2:22].strip(): line[22:].split() for line in lines}


def look(*arguments: object) -> int:
    return statistics.main([str(argument) for argument in arguments])


@pytest.mark.parametrize("data_format", FORMATS)
def test_the_table(tmp_path: Path, source: Path, data_format: str, printed: Says) -> None:
    target, drawn = destination(tmp_path, data_format), tmp_path / "drawn.png"
    table = rows(printed(run, source, target))
    assert table["width"] == ["95", "20", "26", "80", "185", "200"]
    assert table["height"][0] == "62" and table["width / height"][1::4] == ["0.50", "2.00"]
    assert table["classes"] == ["2"] and table["unlabelled"] == ["0"]
    assert table["smallest"] == ["b", "(1)"] and table["largest"] == ["a", "(3)"]
    found = rows(printed(look, target, "--picture", drawn))
    assert found.items() <= table.items() and "bytes" in found
    assert Image.open(drawn).size[0] > 1000


def test_a_folder_and_no_classes(tmp_path: Path, printed: Says) -> None:
    write_files(tmp_path, {"1.jpg": encoded(picture()), "2.jpg": encoded(picture())[:300]})
    table = rows(printed(look, tmp_path))
    assert table["classes"] == ["none"] and table["width"][1] == "48"


def test_clips(tmp_path: Path, printed: Says) -> None:
    source, target = write_clips(tmp_path / "words"), tmp_path / "out"
    table = rows(printed(run, source, target))
    assert table["seconds"][1] == "0.40" and "width" not in table
    found = rows(printed(look, target, "--picture", tmp_path / "drawn.svg"))
    assert found["samples in a class"][0] == "6.0"


def test_classes_without_samples_and_samples_without_classes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    counted = statistics.Statistics(
        sides=np.array([[3, 4], [5, 6]]),
        num_bytes=np.array([10, 20]),
        labels=np.array([-1, 2]),
        seconds=np.zeros(0),
        classes=["x", "y", "z"],
        num_unreadable=1,
    )
    statistics.print_table(counted)
    printed = rows(capsys.readouterr().out)
    assert printed["without samples"] == ["2"] and printed["unlabelled"] == ["1"]
    assert printed["unreadable"] == ["1"]


def test_labels_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    numbers = np.random.default_rng(0).integers(100_000, 450_000, 2000)
    classes = [f"a rather long name of the class {number}" for number in range(40)]
    counted = statistics.Statistics(
        np.stack([numbers // 1000, numbers // 900], 1), numbers, numbers % 40, np.zeros(0), classes
    )
    statistics.draw(counted, tmp_path / "drawn.png", "photos")
    canvas = FigureCanvasAgg(drawn[0])
    canvas.draw()
    renderer = canvas.get_renderer()
    for axes in drawn[0].axes:
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label for label in axis.get_ticklabels() if label.get_text()]
            boxes = [label.get_window_extent(renderer) for label in labels]
            assert len(boxes) > 1
            assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))
