"""A run that diverges stops, and spoils no checkpoint; loss spikes are found by a robust rule."""

import json
import math
import random
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.core import Callback, Timestamp

from pospre.errors import UserError
from pospre.recipe.recipe import load_recipe
from pospre.reporting.page import write_report
from pospre.run.checkpoints.content import callback_states
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.callbacks.bad_steps import Divergence, LossSpikes
from pospre.training.replay import Replay, replay
from tests.algorithms.cases import Case
from tests.disk import snapshot
from tests.processes import finished
from tests.training.callbacks.plain import fit
from tests.training.tiny_runs import MAE, Run, command, environment, look_late, metrics

TOO_FAST = (MAE, "optimizer.base_lr=1.0e30", "trainer.save_interval=1ba")
CURVES: dict[str, list[float]] = json.loads(
    (Path(__file__).with_name("demo_losses.json")).read_text()
)


def check(folder: Path, said: str, ranks: int) -> None:
    """Compare what is left of a run whose third step diverges."""
    assert "error: training diverged: after step 3 not finite: loss/total = nan, loss/mae" in said
    assert f"the last good one is {folder}/checkpoints/ep0-ba1" in said
    assert "optimizer.base_lr (now 1e+30)" in said and "trainer.clip_grad" in said
    steps = sorted(path.name for path in (folder / "checkpoints").glob("*"))
    assert steps == ["ep0-ba1", "ep0-ba2"]

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    text = (folder / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["loss/total"] is None for line in lines] == [False, False, True]

    path = folder / "bad_steps" / "ba3.json"
    noted = json.loads(path.read_text(), parse_constant=refuse)
    assert str(path) in said
    assert (noted["step"], noted["seed"], noted["recipe"]["run_name"]) == (3, 0, "tiny")
    assert noted["losses"]["loss/total"] == "nan"
    assert [len(rank["index"]) for rank in noted["ranks"]] == [8 // ranks] * ranks
    assert {epoch for rank in noted["ranks"] for epoch in rank["epoch"]} == {0}
    assert len({index for rank in noted["ranks"] for index in rank["index"]}) == 8


def test_nan_stops_the_run(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    code, said = run(tiny, *TOO_FAST, "trainer.log_interval=100")
    assert code == 2 and "Traceback" not in said
    assert [line["step"] for line in metrics(folder)] == [1, 3]
    # the same command meets it again, and says the same; a report can be made of what there is
    code, said = run(tiny, *TOO_FAST)
    assert code == 2 and "resuming from" in said and "after step 3 not finite" in said
    assert "not finite" in write_report(folder).read_text()


@pytest.mark.parametrize("interval", [1, 100])
def test_what_is_judged_one_step_late_is_not_saved(
    interval: int, tiny: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where the next step runs meanwhile; a save and a logged step wait."""
    look_late(monkeypatch)
    folder = tmp_path / "runs" / "tiny"
    saves = f"trainer.save_interval={interval}ba"
    code, said = run(tiny, *TOO_FAST, "trainer.log_interval=100", saves)
    assert code == 2 and "after step 3 not finite" in said
    assert [line["step"] for line in metrics(folder)] == [1, 3]
    saved = [path.name for path in (folder / "checkpoints").glob("*")]
    assert sorted(saved) == (["ep0-ba1", "ep0-ba2"] if interval == 1 else [])
    noted = json.loads((folder / "bad_steps" / "ba3.json").read_text())
    again = None if interval == 100 else replay(folder / "bad_steps" / "ba3.json")
    assert noted["step"] == 3 and noted["losses"]["loss/total"] == "nan"
    assert again is None or again.batch["index"].tolist() == noted["ranks"][0]["index"]


def sample_losses(step: Replay) -> dict[str, float]:
    """Return the means of the losses that every sample has by itself."""
    found: dict[str, float] = {}
    for row in range(len(step.batch["index"])):
        one = {key: value[row : row + 1] for key, value in step.batch.items()}
        one = step.model.prepare(one, step.progress)
        for name, loss in step.model.loss(step.model(one), one).items():
            name = name if name.startswith("metric/") else f"loss/{name}"
            found[name] = found.get(name, 0.0) + loss.item() / len(step.batch["index"])
    return found


@pytest.mark.parametrize("options", [(), ("trainer.fsdp={}",)], ids=["ddp", "fsdp2"])
def test_nan_stops_two_ranks(options: tuple[str, ...], tiny: Path, tmp_path: Path) -> None:
    done = finished(command(tiny, *TOO_FAST, *options, ranks=2), env=environment())
    assert done.returncode == 2, done.stderr
    folder = tmp_path / "runs" / "tiny"
    check(folder, done.stderr, ranks=2)
    # one process makes it again, from the checkpoint before
    again = replay(folder / "bad_steps" / "ba3.json")
    assert math.isnan(again.losses["loss/total"]) and len(again.batch["index"]) == 8
    finite = [value.isfinite().all() for value in again.model.state_dict().values()]
    assert all(finite) and again.model.training
    # of every sample alone, as the documentation has it
    assert again.losses == pytest.approx(sample_losses(again), nan_ok=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_weights_are_looked_at_before_a_save(value: float, tiny: Path, tmp_path: Path) -> None:
    """An update that was not finite though the loss was."""
    model = Case(("mae",)).build()
    torch.nn.init.constant_(dict(model.named_parameters())["encoder.norm.weight"], value)
    time, batch = Timestamp(batch=7), {"index": torch.tensor([3, 5])}
    state: Any = SimpleNamespace(
        model=model, timestamp=time, batch=batch, total_loss_dict={}, callbacks=[]
    )
    watch = Divergence(load_recipe(tiny))
    if value == 1.0:
        watch.before_save(state)
        return
    with pytest.raises(UserError, match=r"after step 7 .* tensor 'encoder\.norm\.weight'.*no good"):
        watch.before_save(state)
    noted = json.loads((tmp_path / "runs/tiny/bad_steps/ba7.json").read_text())
    assert noted["ranks"] == [{"index": [3, 5]}]


def test_it_needs_no_recipe(tmp_path: Path) -> None:
    batch = {**Case(("mae",)).batch(16), "view/image": torch.zeros(16, 1, 3, 32, 32).byte()}

    class Spoils(Callback):
        def batch_start(self, state: Any, logger: Any) -> None:
            if state.timestamp.batch.value == 2:
                with torch.no_grad():
                    next(state.model.parameters()).fill_(float("nan"))

    watch = Divergence(folder=tmp_path / "bad")
    with pytest.raises(UserError, match=r"after step 3 not finite: .*ba3\.json.*learning rate"):
        fit(Case(("mae",)), steps=5, batch=batch, callbacks=[Spoils(), watch])


def test_a_metric_that_is_not_finite_is_no_reason(tiny: Path) -> None:
    losses = {"loss/train/total": 1.0, "loss/train/metric/mae_share": float("nan")}
    state: Any = SimpleNamespace(total_loss_dict=losses, timestamp=Timestamp(batch=7), batch={})
    Divergence(load_recipe(tiny)).batch_checkpoint(state, None)  # type: ignore[arg-type]


def spikes(losses: list[float], **options: float) -> list[int]:
    """Return the steps of a curve that are called a spike."""
    watch = LossSpikes(**options)  # type: ignore[arg-type]
    return [step for step, loss in enumerate(losses, 1) if watch.spike(step, loss)]


@pytest.mark.parametrize("name", CURVES)
def test_the_curves_of_the_demo_recipes_have_none(name: str) -> None:
    losses = CURVES[name]
    assert len(losses) >= 100 and spikes(losses) == []
    middle = len(losses) // 2
    away = max(losses) - min(losses)
    assert spikes([*losses[:middle], losses[middle] + 3 * away, *losses[middle:]]) == [middle + 1]


def test_a_jump_is_one_spike_and_noise_is_none() -> None:
    draw = random.Random(0)
    flat = [1 + draw.gauss(0, 0.02) for _ in range(1000)]
    assert spikes(flat) == []
    assert spikes([*flat[:500], *(loss + 1 for loss in flat[500:])]) == [501]
    assert spikes([1.0] * 200 + [1.05] + [1.0] * 50) == []  # no deviation at all, and little more
    assert spikes([*flat[:20], 9.0, *flat[20:]]) == []  # too early to say
    assert spikes([*flat[:500], float("nan"), float("inf"), *flat[500:]]) == []


SENSITIVE = ("callbacks.loss_spikes={window: 10, factor: 1.0e-6}", "optimizer.base_lr=3.0")


@pytest.mark.parametrize(("precision", "late"), [("fp32", True), ("amp_bf16", False)])
def test_a_spike_is_noted_and_made_again(
    precision: str,
    late: bool,
    tiny: Path,
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if late:
        look_late(monkeypatch)
    options = (*SENSITIVE, "trainer.save_interval=3ba", f"trainer.precision={precision}")
    code, said = run(tiny, *options)
    folder = tmp_path / "runs" / "tiny"
    assert code == 0 and "warning: step " in said and "is a spike" in said
    (warning,) = [json.loads(line) for line in (folder / "watch.jsonl").read_text().splitlines()]
    step = warning["step"]
    path = folder / "bad_steps" / f"ba{step}.json"
    assert warning["watch"] == "LossSpikes" and str(path) in warning["warning"]
    noted = json.loads(path.read_text())
    assert [line["step"] for line in metrics(folder) if line["time/save"] > 0] == [4, 7, 10]
    assert len(noted["ranks"]) == 1 and len(noted["ranks"][0]["index"]) == 8
    before = snapshot(folder)
    again = replay(path)
    assert again.losses == noted["losses"]
    assert again.batch["index"].tolist() == noted["ranks"][0]["index"]
    assert snapshot(folder) == before


def test_the_start_is_kept_and_an_older_checkpoint_has_none(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    off = "callbacks={loss_spikes: null, collapse: null, stalls: null, gradient_norms: false}"
    assert run(tiny, off, "trainer.max_duration=1ep")[0] == 0
    for length in ("2ep", "3ep"):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*not in the state_dict")
            assert run(tiny, "callbacks.collapse.every=2", f"trainer.max_duration={length}")[0] == 0
    lines = metrics(tmp_path / "runs/tiny")
    looks = [line for line in lines if "features/student_std" in line]
    assert [line["step"] for line in looks] == [4, 6, 8]
    assert not any("gradient/encoder" in line for line in lines[:3])
    newest = read_checkpoint(f"{tmp_path}/runs/tiny/checkpoints/ep3-ba9")
    names = ("features/student_std", "features/student_rank")
    start = callback_states(newest.content)["Collapse"]["start"]
    assert start == {name: looks[0][name] for name in names}


def test_a_spike_stops_before_it_is_saved(tiny: Path, run: Run, tmp_path: Path) -> None:
    options = (*SENSITIVE, "callbacks.loss_spikes.action=stop", "trainer.save_interval=1ba")
    code, said = run(tiny, *options)
    assert code == 2 and "Traceback" not in said and "is a spike" in said
    step = metrics(tmp_path / "runs/tiny")[-1]["step"]
    newest = max(int(p.name.split("-ba")[1]) for p in tmp_path.rglob("ep*-ba*"))
    assert newest == step - 1 and f"the last good one is {tmp_path}" in said
    assert "callbacks.loss_spikes.action=warn" in said


def test_what_is_no_record_of_a_step(tmp_path: Path) -> None:
    path = tmp_path / "ba3.json"
    path.write_text("{}")
    with pytest.raises(UserError, match=r"ba3\.json is not the record of a bad step"):
        replay(path)
