"""What watches a run, under a plain Trainer: each sees its trouble, and is quiet without it."""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from composer.core import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pospre.algorithms.dinov2.losses import Center
from pospre.batch import Batch
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.passes import ForgottenPlaces
from pospre.model.position_task import PositionObjective
from pospre.model.uses import Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder
from pospre.recipe.sections import ClipGrad
from pospre.training.callbacks.bad_steps import Divergence, LossSpikes
from pospre.training.callbacks.sleeping_heads import SleepingHeads
from pospre.training.callbacks.stalls import Stalls
from pospre.training.callbacks.watchers import (
    Collapse,
    PositionShortcut,
    effective_rank,
    feature_std,
)
from pospre.training.optimizer.gradients import GradientNorms, build_clipping
from tests.algorithms.cases import Case, written
from tests.training.callbacks.plain import Rows, fit

BOTH = Case(("mae", "droppos"), options={"droppos": {"temperature": None}})
Capture = pytest.CaptureFixture[str]


def every_callback() -> list[Callback]:
    looking: list[Callback] = [Collapse(every=2, interval=1), PositionShortcut(every=2, interval=1)]
    return [Stalls(interval=1), LossSpikes(), Divergence(), *looking]


def test_all_together_change_nothing_and_say_nothing(capsys: Capture) -> None:
    alone = fit(BOTH, steps=5)
    logged = fit(BOTH, steps=5, callbacks=every_callback(), algorithms=[GradientNorms(1)])
    for name in ("loss/train/total", "loss/train/metric/droppos_accuracy"):
        assert logged[name] == alone[name]  # to the last bit
    assert "warning" not in capsys.readouterr().err
    for name in ("gradient/encoder", "gradient/mae", "gradient/droppos", "time/data"):
        assert len(logged[name]) == 5
    assert set(logged) - set(alone) == {
        *(f"gradient/{name}" for name in ("encoder", "mae", "droppos")),
        *(f"time/{name}" for name in ("data", "step", "save", "evaluation")),
        *("features/student_std", "features/student_rank"),
        "metric/droppos_blank_accuracy",
    }
    assert len(logged["features/student_std"]) == 3  # steps 1, 2 and 4
    assert len(logged["metric/droppos_blank_accuracy"]) == 2  # steps 2 and 4
    shares = [logged[f"time/{name}"] for name in ("data", "step", "save", "evaluation")]
    for line in zip(*shares, strict=True):
        assert sum(line) == pytest.approx(1, abs=1e-3)


def test_gradient_norms_are_those_before_clipping() -> None:
    model = BOTH.build()
    batch = {**BOTH.batch(8), "epoch": torch.ones(8, dtype=torch.int64)}
    inputs = written(model, batch)
    model.loss(model(inputs), inputs)["total"].backward()
    parts = {"encoder": 0.0, "mae": 0.0, "droppos": 0.0}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            part = next((part for part in ("mae", "droppos") if f".{part}." in name), "encoder")
            part = part if name.startswith("objectives.") else "encoder"
            parts[part] += parameter.grad.square().sum().item()
    clipping = build_clipping(ClipGrad(threshold=1e-3))
    logged = fit(BOTH, steps=1, algorithms=[*clipping, GradientNorms(1)])
    for part, square in parts.items():
        # half way through training, DropPos's labels are another's: only MAE's head is as here
        if part == "mae":
            assert logged[f"gradient/{part}"][0] == pytest.approx(square**0.5, rel=1e-4)
        assert logged[f"gradient/{part}"][0] > 1e-3


class Alike(Objective):
    """The trivial solution of matching two views without anything that keeps them apart.

    Each of its targets is a share of four prototypes, and all shares are the same.
    """

    def __init__(self, encoder: PatchEncoder, options: "AllAlike") -> None:
        super().__init__()
        self.options = options

    def forward(self, passes: dict[str, Tensor], batch: dict[str, Tensor]) -> Outputs:
        """Return the tokens' mean over the patches."""
        return {"features": passes["student"][:, 1:].mean(1)}

    def loss(self, outputs: Outputs, batch: dict[str, Tensor]) -> Tensor:
        """Return how far the images are from one another."""
        features = torch.nn.functional.normalize(outputs["features"], dim=1)
        return (features - features.mean(0)).square().sum(1).mean()

    def metrics(self, outputs: Outputs, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the entropy of the targets, and how well they are matched."""
        own = self.options
        values = {"agreement": own.agreement, "cross_entropy": own.cross_entropy}
        return {key: torch.tensor(v) for key, v in {"entropy": math.log(4), **values}.items()}


@dataclass(kw_only=True, eq=False)
class AllAlike(PretrainAlgorithm):
    """The method of this objective."""

    objective = Alike

    agreement: float = 0.25
    cross_entropy: float = math.log(4)

    def uses(self, encoder: PatchEncoder) -> Uses:
        return Uses(
            passes={"student": Pass()},
            entropies={"entropy": math.log(4)},
            agreements={"agreement": ("cross_entropy", math.log(4))},
        )


def test_a_collapse_is_seen(capsys: Capture, tmp_path: Path) -> None:
    case = Case((), encoder={"patch_size": 8, "depth": 1})
    model = PretrainModel(case.encoder_of(), [AllAlike()], seed=7, views=case.views)
    log = tmp_path / "watch.jsonl"
    watch = Collapse(every=5, interval=1, log=log)
    logged = fit(case, steps=40, lr=2e-3, built=model, callbacks=[watch])
    said = capsys.readouterr().err
    assert said.count("training is collapsing: features/student_std is") == 1, logged
    assert said.count("training is collapsing: metric/AllAlike_entropy is") == 1
    (entropy, first, *_) = [json.loads(line) for line in log.read_text().splitlines()]
    assert (
        entropy["step"] == 5  # the first measurement is only what later ones are compared with
        and first["watch"] == "Collapse"
        and first["step"] % 5 == 0
        and "at the start" in said
    )
    start = watch.state_dict()["start"]
    assert start["features/student_std"] == logged["features/student_std"][0]
    other = Collapse()
    other.load_state_dict({})
    other.load_state_dict(watch.state_dict())
    assert other.state_dict()["start"] == start


@pytest.mark.parametrize(
    ("agreement", "below", "step", "sleeps"),
    [(0.19, 0.09, 2, True), (0.21, 0.09, 2, False), (0.19, 0.11, 2, False), (0.19, 0.09, 3, False)],
)
def test_heads_that_sleep_are_seen_at_the_end_of_their_stage(
    agreement: float, below: float, step: int, sleeps: bool, capsys: Capture
) -> None:
    case = Case((), encoder={"patch_size": 8, "depth": 1})
    method = AllAlike(agreement=agreement, cross_entropy=math.log(4) - below)
    model = PretrainModel(case.encoder_of(), [method], seed=7, views=case.views)
    fit(case, steps=2, built=model, callbacks=[SleepingHeads(step, 8)])
    line = (
        "warning: step 2: the heads of AllAlike sleep after their stage: agreement 0.190 (awake "
        "above 0.2), cross_entropy 1.296, ln K 1.386, batch 8, K 4. Give fewer prototypes"
    )
    assert (line in capsys.readouterr().err) == sleeps


@pytest.mark.parametrize("centers", [True, False])
def test_targets_that_name_one_prototype_are_seen(centers: bool, capsys: Capture) -> None:
    head = {"centering": "centering", "mask_crop_rate": 0.0, "koleo_weight": 0.0}
    options = {"dinov2": {"momentum_start": 0.5, "freeze_epochs": 0, **head}}
    case = Case(("dinov2",), options, {"patch_size": 8, "depth": 1})
    model = case.build()
    for module in model.modules():
        if isinstance(module, Center) and not centers:
            module.momentum = 1.0  # it stays at 0
    watch = Collapse(every=20, interval=1)
    fit(case, steps=20, built=model, batch=case.batch(64), callbacks=[watch])
    said = capsys.readouterr().err
    assert said.count("training is collapsing: metric/dinov2_entropy is") == (not centers)


def test_spread_and_rank() -> None:
    rows = torch.randn(256, 32)
    assert feature_std(rows) == pytest.approx(1, abs=0.01) and 30 < effective_rank(rows) <= 32
    line = torch.randn(256, 1) * torch.randn(1, 32)
    assert effective_rank(line) == pytest.approx(1, abs=1e-3)
    values = torch.linalg.svdvals(rows.double())
    shares = values / values.sum()
    expected = torch.exp(-(shares * shares.log()).sum()).item()
    assert effective_rank(rows) == pytest.approx(expected)
    assert effective_rank(rows.T) == pytest.approx(expected)
    same = torch.ones(8, 4)
    assert feature_std(same) == pytest.approx(0, abs=1e-6)
    assert effective_rank(same) == pytest.approx(1, abs=1e-3)


def test_a_position_that_is_not_dropped_is_seen(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"mask_ratio": 0.0, "temperature": None, "sigma_start": 0.0}
    case = Case(("droppos",), {"droppos": options}, {"patch_size": 8, "depth": 1})
    batch = case.batch(640)  # each sample is seen once: what they show helps no other

    def accuracies(steps: int) -> list[float]:
        watch = PositionShortcut(every=20, interval=1)
        logged = fit(case, steps=steps, lr=3e-3, batch=batch, callbacks=[watch])
        return logged["metric/droppos_blank_accuracy"]

    assert max(accuracies(60)) < 0.2
    assert "warning" not in capsys.readouterr().err
    monkeypatch.setattr(ForgottenPlaces, "forward", lambda self, places, *_: places)
    assert max(accuracies(100)) > 0.4
    assert "droppos knows places without looking" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("droppos", {"mask_ratio": 0.0}, 1 / 12),
        ("droppos", {"mask_ratio": 0.5}, 1 / 14),
        ("mp3", {}, 1 / 16),
        ("mp3", {"position_rate": 0.25}, 1 / 12),
        ("mp3", {"position_rate": 0.25, "count_shown": True}, 5 / 16),
    ],
)
def test_chance_is_what_those_reach_who_see_no_image(
    name: str, options: dict[str, Any], expected: float
) -> None:
    """Who knows the positions that are told, and else guesses among the others."""
    batch, head = asked(name, options, 256)
    _, places, told, _ = head.answers({"logits": torch.empty(256, 16, 16)}, batch)
    torch.manual_seed(0)
    taken = torch.zeros(256, 16).scatter_add(1, places, told.float())
    logits = torch.rand(*places.shape, 16) - 9 * taken.unsqueeze(1)
    right = torch.nn.functional.one_hot(places, 16) * told.unsqueeze(-1)
    answers = head.answers({"logits": logits + 99 * right}, batch)
    assert answers.score().item() == pytest.approx(expected, abs=0.02)
    assert answers.chance()[0].item() == pytest.approx(expected, abs=0.01)


def asked(name: str, options: dict[str, Any], size: int) -> tuple[Batch, PositionObjective]:
    encoder = {"patch_size": 8, "depth": 1, "positions": "sincos"}
    case = Case((name,), {name: {"temperature": None, **options}}, encoder)
    model = case.build()
    head = model.objectives[name]
    assert isinstance(head, PositionObjective)
    return written(model, case.batch(size)), head


@pytest.mark.parametrize(
    ("name", "options"), [("droppos", {"mask_ratio": 0.5}), ("mp3", {"position_rate": 0.5})]
)
def test_hidden_places_are_drawn_anew_among_each_other(name: str, options: dict[str, Any]) -> None:
    batch, head = asked(name, options, 8)
    answers = head.answers({"logits": torch.rand(8, 16, 16)}, batch)
    _, places, told, _ = answers
    drawn = torch.stack([answers.redraw(number).places for number in range(2000)])
    assert torch.equal(drawn[:, told], places[told].expand(2000, -1))
    assert torch.equal(drawn.sort(dim=2).values, places.sort(dim=1).values.expand_as(drawn))
    count = int((~told)[0].sum())
    at_home = (drawn == places)[:, ~told].float().mean(0)
    assert ((at_home - 1 / count).abs() < 5 * (1 / count / 2000) ** 0.5).all()


@pytest.mark.parametrize(("name", "measure"), [("sp", "r2"), ("loca", "accuracy")])
def test_heads_that_place_whole_views_are_asked_too(
    name: str, measure: str, capsys: Capture
) -> None:
    case = Case((name,), encoder={"depth": 1})
    watch = PositionShortcut(every=2, interval=1)
    logged = fit(case, steps=2, batch=case.batch(64), callbacks=[watch])
    assert len(logged[f"metric/{name}_blank_{measure}"]) == 1
    assert "warning" not in capsys.readouterr().err


class Slow(Dataset[dict[str, Tensor]]):
    """Rows of which each takes its time."""

    def __init__(self, rows: Rows, seconds: float) -> None:
        self.rows, self.seconds = rows, seconds

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        time.sleep(self.seconds)
        return self.rows[row]


@pytest.fixture
def mae() -> Iterator[Case]:
    yield Case(("mae",))


def test_a_slow_loader_is_named(mae: Case, capsys: Capture, tmp_path: Path) -> None:
    slow = DataLoader(Slow(Rows(mae.batch(16)), 0.02), batch_size=8)
    log = tmp_path / "watch.jsonl"
    watch = Stalls(interval=1, patience=0.3, log=log)
    logged = fit(mae, steps=8, loader=slow, callbacks=[watch])
    assert min(logged["time/data"][1:]) > 0.3
    said = capsys.readouterr().err
    assert said.count("went to waiting for the loader") == 1
    assert f"python -m pospre.loader_report {tmp_path}/recipe.yaml" in said
    assert [json.loads(line)["watch"] for line in log.read_text().splitlines()] == ["Stalls"]


def test_a_training_that_stands_is_told_where(mae: Case, capsys: Capture) -> None:
    slow = DataLoader(Slow(Rows(mae.batch(32)), 0.0), batch_size=8)

    class Hangs(Callback):
        """Stands for a file system that does not answer."""

        def batch_checkpoint(self, state: Any, logger: Any) -> None:
            if state.timestamp.batch.value == 3:
                time.sleep(1.5)  # a third word would come after 2 s, on a slow machine too

    fit(mae, steps=4, loader=slow, callbacks=[Stalls(interval=1, silence=0.5), Hangs()])
    said = capsys.readouterr().err.splitlines()
    told = [line for line in said if "no step has ended" in line]
    assert 1 <= len(told) <= 2  # after 0.5 s, and at most once more after 1 s
    assert told[0].startswith("warning: step 3: ") and "the training is in save:" in told[0]
    assert "batch_checkpoint (callbacks/test_watchers.py:" in told[0]
