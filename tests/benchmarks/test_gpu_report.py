"""``make gpu-report`` at the size of a CPU: the whole command, and what it makes of failures."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.data.views.options import ViewGroup
from tests.benchmarks import gpu_cell, gpu_facts, gpu_report

SMALL = [
    "encoder.image_size=32",
    "encoder.depth=1",
    "algorithms.mae.decoder_depth=1",
    "algorithms.mae.decoder_dim=64",
    "data.num_workers=1",
]


def test_the_command_measures_resumes_and_writes_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = gpu_report._run

    def run_cells(module: str, asked: Path, ranks: int, limit: float) -> Any:
        if module != gpu_report.TRIALS:
            return run(module, asked, ranks, limit)
        gpu_facts.main(asked)  # a second process would start torch once more
        return json.loads(asked.with_suffix(".out").read_text())

    monkeypatch.setattr(gpu_report, "_run", run_cells)
    given = ["--methods", "mae", "--sizes", "vit_tiny16", "--settings", "DDP", "--device", "cpu"]
    given += ["--steps", "2", "--batch", "2", "--output", str(tmp_path), "--set", *SMALL]
    assert gpu_report.main(given) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    (cell,) = report["cells"]
    assert len(cell["losses"]) == 4 and cell["images_per_s"] > 0 and cell["flops_per_image"] > 1e6
    assert 0 <= cell["data_wait"] < 1 and cell["peak_bytes"] > 1e8
    assert cell["first_step"] > 0
    facts = {one["fact"]: one["holds"] for one in report["facts"]}
    assert facts["losses in bf16 are finite"] is True
    assert facts["no host sync in a step of mae"] is None  # no GPU: not seen
    text = (tmp_path / "report.md").read_text()
    assert "| mae | vit_tiny16 | DDP | synthetic | 2 |" in text and "not seen" in text

    monkeypatch.setattr(gpu_report, "_run", None)  # nothing is measured again
    assert gpu_report.main(given) == 0
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_cells_that_are_compared_see_the_same_images() -> None:
    views = {"view": ViewGroup(size=32)}
    one, other = (gpu_cell.Synthetic(views, 2, 3, pinned=False).batch for _ in range(2))
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def outcome(setting: str, *losses: float, **more: Any) -> dict[str, Any]:
    cell = {"method": "mae", "size": "vits16", "setting": setting, "real": False}
    return {
        "cell": {**cell, "device_batch": 2},
        "losses": list(losses),
        "world": 2,
        **more,
    }


def test_losses_that_differ_or_are_not_finite_fail() -> None:
    good = [outcome("DDP", 1.0, 0.9), outcome("DDP, compiled", 1.0, 0.901), outcome("FSDP2", 1, 1)]
    finite, compiled, sharded = gpu_facts.from_cells(good)
    assert (finite["holds"], compiled["holds"], sharded["holds"]) == (True, True, False)
    assert "11.11% (mae vits16, FSDP2)" in sharded["why"]
    bad = gpu_facts.from_cells([outcome("DDP", 1.0, float("nan"))])
    assert [one["holds"] for one in bad] == [False, None, None]
    alone = [{**one, "world": 1} for one in good]
    assert gpu_facts.from_cells(alone)[2]["why"] == "needs two GPUs"


def test_a_cell_without_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(gpu_cell, "measure", full)
    asked = tmp_path / "one.cell"
    recipe = str(gpu_report.ROOT / "yamls/pretrain/mae_vitb16.yaml")
    asked.write_text(
        json.dumps(
            {"recipe": recipe, "overrides": [], "device_batch": 2, "real": False, "warm_up": 1}
        )
    )
    assert gpu_cell.main(asked) == 0
    found = json.loads((tmp_path / "one.out").read_text())
    assert found == {"failed": "out of memory"}
    assert "| 2 | out of memory |" in gpu_report.table([{**outcome("DDP"), **found}])


def test_utilisation_is_of_the_gpu_that_was_found() -> None:
    named = {"device": "NVIDIA A100-SXM4-80GB", "device_bytes": 85e9}
    found = {**named, "images_per_s": 1000.0, "flops_per_image": 312e9, "world": 2}
    assert gpu_report.utilisation(found) == pytest.approx(0.5)
    assert gpu_report.gpu_of("NVIDIA A100-SXM4-40GB", 42e9).memory < 45e9  # type: ignore
    assert gpu_report.utilisation({**found, "device": "cpu"}) is None


def test_a_cell_that_takes_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    asked = tmp_path / "one.cell"
    asked.write_text("{}")
    found = gpu_report._run(gpu_report.CELL, asked, 1, 0.1)
    assert found == {"failed": "took longer than 0.1 s"}
