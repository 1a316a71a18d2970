"""The pure parts of the loaders' benchmark: ratios, tables, jobs; and one worker at work."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.bench_loader import CASES, main
from tests.benchmarks.loader_cases import MULTI_CROP, ONE_VIEW, seconds_alone
from tests.benchmarks.loader_tables import Row, Table, markdown, median_ratio, rate_rows
from tests.benchmarks.loader_worker import PEERS_FOLDER, Job, Views, take_turns

RATES = {"ours": [200.0, 100.0, 300.0], "slow": [50.0, 50.0, 50.0], "fast": [100.0, 50.0, 200.0]}


def test_ratios_are_medians_of_the_ratios_of_each_run() -> None:
    assert median_ratio([10.0, 20.0, 90.0], [10.0, 10.0, 30.0]) == 2.0  # the medians' is also 2
    assert median_ratio([10.0, 20.0, 90.0], [5.0, 20.0, 30.0]) == 2.0  # the medians' is 1
    assert median_ratio([10.0], []) is None


def test_the_reference_is_the_best_of_its_loaders() -> None:
    columns = {"× peers": ["slow", "fast"], "× absent": ["nobody"]}
    rows = rate_rows({**RATES, "died": []}, columns, {"first": {"ours": "3"}})
    assert [row.name for row in rows] == ["ours", "slow", "fast"]
    assert rows[0].value == 200.0 and rows[0].ratios == {"× peers": 2.0, "× absent": None}
    assert rows[1].more == {"first": "–"}


def test_a_table_in_markdown() -> None:
    rows = [
        Row("ours", 200.4, {"× a": 2.0, "× b": None}, {"first": "3.1"}),
        Row("a", 100.0, {"× a": 1.0, "× b": None}, {"first": "–"}),
    ]
    table = Table("one view", "images/s", rows)
    assert markdown(table).splitlines() == [
        "**one view**",
        "",
        "| loader | images/s | × a | × b | first |",
        "|---|---|---|---|---|",
        "| ours | 200 | 2.00 | – | 3.1 |",
        "| a | 100 | 1.00 | – | – |",
    ]


def test_seconds_of_writing_from_what_conversions_print() -> None:
    ours = "wrote x\n  images          814\n    bytes kept    814\n  time   0.4 s (2035 images/s)\n"
    assert seconds_alone(ours) == pytest.approx(0.4)
    assert seconds_alone('noise\n{"seconds": 1.5}\n') == 1.5


def test_a_worker_runs_epochs(image_folder: Callable[..., Path], tmp_path: Path) -> None:
    job = Job("ours", str(image_folder(num_images=6)), ONE_VIEW, 4, 1)
    epochs = take_turns({"ours": job}, 1, tmp_path)["ours"]
    assert [epoch.num_images for epoch in epochs] == [6, 6]
    first, second = epochs
    assert first.first_batch is not None and first.first_batch > 0 and second.first_batch is None
    assert first.peak >= first.before > 0 and first.estimate


@pytest.mark.parametrize("views", [ONE_VIEW, MULTI_CROP], ids=["one view", "ten"])
def test_dali_gives_every_image(
    views: tuple[Views, ...], image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    if not (PEERS_FOLDER / "nvidia/dali").exists():
        pytest.skip("needs the peers of the benchmark: make bench-setup")
    job = Job("dali", str(image_folder(num_images=6)), views, 4, 1)
    epochs = take_turns({"DALI": job}, 1, tmp_path)["DALI"]
    assert [epoch.num_images for epoch in epochs] == [6, 6]


def test_a_worker_that_dies_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = Job("torchvision", str(tmp_path / "nowhere"), ONE_VIEW, 4, 1)
    assert take_turns({"a peer": job}, 1, tmp_path) == {}
    said = capfd.readouterr().err
    assert "left out: a peer: FileNotFoundError" in said and "nowhere" in said


def test_every_case_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--cases", "nonsense"])
    said = capsys.readouterr().err
    assert all(case in said for case in CASES)
