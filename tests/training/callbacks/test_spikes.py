"""Loss spikes: a robust rule, quiet on what every method's loss does, and a step made again."""

import json
import random
import warnings
from pathlib import Path

import pytest

from pospre.errors import UserError
from pospre.run.checkpoints.content import callback_states
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.callbacks.replay import replay
from pospre.training.callbacks.spikes import LossSpikes
from tests.training.tiny_runs import Run, contents, look_late, metrics

CURVES: dict[str, list[float]] = json.loads(
    (Path(__file__).with_name("demo_losses.json")).read_text()
)


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


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "amp_bf16"])
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
    before = contents(folder)
    again = replay(path)
    assert again.losses == noted["losses"]
    assert again.batch["index"].tolist() == noted["ranks"][0]["index"]
    assert contents(folder) == before


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
    with pytest.raises(UserError, match=r"ba3\.json is not what a run wrote"):
        replay(path)
