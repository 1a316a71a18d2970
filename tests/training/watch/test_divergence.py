"""A run that diverges stops after that step, and no checkpoint is spoilt."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Timestamp
from composer.devices import DeviceCPU
from torch import nn

from pospre.errors import UserError
from pospre.recipe.recipe import load_recipe
from pospre.report.page import write_report
from pospre.training.watch.divergence import Divergence
from tests.processes import finished
from tests.training.tiny_runs import command, environment

Run = Callable[..., tuple[int, str]]
MAE = "algorithms={mae: {decoder_dim: 32, decoder_depth: 1, decoder_heads: 2}}"
TOO_FAST = (MAE, "optimizer.base_lr=1.0e30", "trainer.save_interval=1ba")


def check(folder: Path, said: str) -> None:
    """Compare what is left of a run whose third step diverges."""
    assert "error: training diverged: after step 3 not finite: loss/total = nan, loss/mae" in said
    assert f"the last good one is {folder}/checkpoints/ep0-ba1.pt" in said
    assert "optimizer.base_lr (now 1e+30)" in said and "trainer.clip_grad" in said
    steps = sorted(path.name for path in (folder / "checkpoints").glob("*.pt"))
    assert steps == ["ep0-ba1.pt", "ep0-ba2.pt"]

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss/total"] is None for line in lines] == [False, False, True]


def test_nan_stops_the_run(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    code, said = run(tiny, *TOO_FAST, "trainer.log_interval=100")
    assert code == 2 and "Traceback" not in said
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
    # the same command meets it again, and says the same; a report can be made of what there is
    code, said = run(tiny, *TOO_FAST)
    assert code == 2 and "going on from" in said and "after step 3 not finite" in said
    assert "not finite" in write_report(folder).read_text()


@pytest.mark.parametrize("options", [(), ("trainer.fsdp={}",)], ids=["ddp", "fsdp2"])
def test_nan_stops_two_ranks(options: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    done = finished(command(tiny, *TOO_FAST, *options, ranks=2), env=environment())
    assert done.returncode == 2, done.stderr
    check(tmp_path / "runs" / "tiny", done.stderr)


class Spoiling(nn.Linear):
    """Stands for a model whose update was not finite though its loss was."""

    def __init__(self, value: float) -> None:
        super().__init__(2, 2)
        with torch.no_grad():
            self.weight[1, 0] = value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_weights_are_looked_at_before_a_save(value: float, tiny: Path) -> None:
    time = Timestamp(batch=7)
    state: Any = SimpleNamespace(model=Spoiling(value), timestamp=time, device=DeviceCPU())
    watch = Divergence(load_recipe(tiny))
    if value == 1.0:
        watch.before_save(state)
        return
    with pytest.raises(UserError, match=r"after step 7 not finite: tensor 'weight'.*no good one"):
        watch.before_save(state)


def test_a_metric_that_is_not_finite_is_no_reason(tiny: Path) -> None:
    losses = {"loss/train/total": 1.0, "loss/train/metric/mae_share": float("nan")}
    state: Any = SimpleNamespace(total_loss_dict=losses, timestamp=Timestamp(batch=7))
    Divergence(load_recipe(tiny)).batch_checkpoint(state, None)  # type: ignore[arg-type]
