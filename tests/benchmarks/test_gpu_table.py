"""Tables of GPU figures: what they say of measurements, what is kept, and what READMEs say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pospre.planning import figures
from pospre.planning.gpus import GPUS, Assumptions
from tests.benchmarks import gpu_count, gpu_kit, gpu_table

README = gpu_table.README.read_text(encoding="utf-8")
CARD = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a copy of the figures, which is read instead of them."""
    copy = tmp_path / "figures.json"
    copy.write_bytes(figures.FILE.read_bytes())
    monkeypatch.setattr(figures, "FILE", copy)
    clear()
    yield copy
    clear()


def clear() -> None:
    figures.content.cache_clear()
    figures.efficiency.cache_clear()


def line(method: str, rate: float, setting: str = "compiled", **more: Any) -> dict[str, Any]:
    asked = {"method": method, "size": "vitb16", "images": 256, "setting": setting}
    return {
        "item": f"{method} vitb16 {setting}",
        "kind": "train",
        "asked": {**asked, "loader": "synthetic"},
        **{"card": CARD, "gpu": "h100", "date": "2026-12-01", "revision": "abc", "code": "def"},
        **{"predicted": 4000.0, "world": 1, "algorithms": [method], "images_per_s": rate},
        **{"spread": [rate - 1, rate + 1], "first_step": 40.0, "peak_bytes": 2**34},
        **{"data_wait": 0.0, "losses": [1.0, 0.9]},
        **more,
    }


def test_the_readme_has_the_table_of_the_figures() -> None:
    assert gpu_table.rendered() in README
    assert gpu_table.replaced(README) == README
    assert f"It is {figures.efficiency()}, from" in README


def test_the_share_is_of_eager_steps_until_four_methods_are_measured_compiled(file: Path) -> None:
    assert figures.efficiency() == Assumptions().efficiency == 0.54
    assert figures.predicted("mae vitb16 256", "compiled", "h100") == pytest.approx(0.54 * 7710)
    assert figures.predicted("mae vitb16 256", "compiled", "l40s") is None
    rates = {"mae": 6168, "droppos": 6640, "mp3": 4114}
    gpu_table.add(gpu_table.kept([line(method, rate) for method, rate in rates.items()]))
    assert figures.efficiency() == 0.54
    gpu_table.add(gpu_table.kept([line("ijepa", 4554)]))
    assert figures.efficiency() == 0.8


def test_what_is_kept_is_the_newest_good_training_and_its_plain_loop(file: Path) -> None:
    lines = [
        line("mae", 100.0),
        line("mae", 5000.04, plain_images_per_s=5100.0, gap_ms=1.0),
        line("droppos", 1.0, failed="out of memory"),
        line("mp3", 1.0, gpu=None),
    ]
    before = figures.content()
    found = gpu_table.kept(lines)
    assert [(one.loop, one.images_per_s) for one in found] == [("trainer", 5000.0), ("plain", 5100)]
    assert found[0].gib == 16 and found[0].predicted == 4000
    for _ in range(2):  # the second time replaces
        gpu_table.add(found)
    after = json.loads(file.read_text())
    assert after["counted"] == before["counted"]
    assert after["measured"][: len(before["measured"])] == before["measured"]
    assert len(after["measured"]) == len(before["measured"]) + 2
    assert figures.of(["mae"], "vitb16", "h100")[0].images_per_s == 5100
    row = next(row for row in gpu_table.rendered().splitlines() if "2026-12-01" in row)
    assert "| 7710 | 4000 | 5000 | 0.65 | 16.00 | 40 |" in row


def test_counted_floors_are_kept_by_setting(file: Path) -> None:
    step = {"flops": 256e9, **{f"{kind} {gpu}": 0.1 for kind in ("eager", "fused") for gpu in GPUS}}
    gpu_count._keep("mae vits16 256", 256, step, half=False)
    gpu_count._keep("mae vits16 256", 256, {**step, "fused h200": 0.05}, half=True)
    found = figures.counted("mae vits16 256")
    assert found["gflops"] == 1.0
    assert {setting: one["h200"] for setting, one in found["floors"].items()} == {
        "eager": 2560,
        "compiled": 2560,
        "compiled, bf16 residual": 5120,
    }
    assert figures.floor("mae vits16 256", "compiled, bf16 residual, cuDNN", "h200") == 5120


def test_the_table_has_speeds_what_holds_and_what_failed() -> None:
    lines = [
        line("mae", 3000.0, "eager", losses=[1.0, 1.0]),
        line("mae", 5000.0, losses=[1.0, 1.05]),
        line("droppos", 1.0, losses=[float("nan")]),
        line("mp3", 1.0, failed="out of memory"),
    ]
    text = gpu_table.table(lines)
    assert "| mae vitb16 compiled | 256 | 5000 (4999 to 5001) | 4000 | 29.5% | 16.00 |" in text
    assert "| losses in bf16 are finite | FAIL | droppos vitb16 256, synthetic, compiled |" in text
    assert "FAIL | at most 5.00% (mae vitb16 256, synthetic, compiled); 1 pairs |" in text
    assert "mp3 vitb16 compiled: failed: out of memory" in text


def test_a_gpu_is_known_by_the_name_of_its_driver() -> None:
    assert gpu_kit.gpu_key(CARD, 85e9) == "h100"
    assert gpu_kit.gpu_key("NVIDIA A100-SXM4-40GB", 42e9) == "a100-40"
    assert gpu_kit.gpu_key("NVIDIA A100-SXM4-80GB", 85e9) == "a100-80"
    assert gpu_kit.gpu_key("NVIDIA Z9", 85e9) is None
