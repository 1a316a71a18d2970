"""The step of our Trainer and its side stream: without parts of Composer's, but the same step."""

import hashlib
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import composer.trainer.trainer as composer_trainer
import pytest
import torch
from composer import Trainer
from composer.core import Callback, State
from composer.core.types import TrainerMode
from composer.utils import dist
from torch import Tensor

from pospre import train
from pospre.algorithms import mae
from pospre.batch import Batch
from pospre.recipe.recipe import load_recipe
from pospre.training import train as ours
from pospre.training.build import build_components
from pospre.training.callbacks.metrics import StepLosses
from pospre.training.step_trainer import SideStream, StepTrainer
from tests.operators import CountedOperators
from tests.training.fitting import fit
from tests.training.tiny_runs import MAE, look_late

MADE_FOR = {
    "_train_loop": "1dffbf6b9c51",  # not overridden; takes None from _train_batch for no losses
    "_train_batch": "787aff3a7f53",
    "_train_microbatches": "3ee43a3fb726",
    "_train_microbatch": "4b840744cb17",
    "_iter_dataloader": "970ae649c7dc",
    "_accumulate_time_across_ranks": "a7a8ddb3e21b",
    "_use_closures": "f8e8d08988ae",
}
"""Of Composer 0.32.1; if one differs, compare ``training/step_trainer.py`` with the new one."""


def test_composer_is_the_one_that_is_overridden() -> None:
    found = {
        name: hashlib.sha256(inspect.getsource(getattr(Trainer, name)).encode()).hexdigest()[:12]
        for name in MADE_FOR
    }
    assert found == MADE_FOR


def test_ranks_do_not_ask_each_other_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any, **__: Any) -> None:
        raise AssertionError("a GPU would be waited for")

    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    for name in ("all_reduce", "broadcast"):
        monkeypatch.setattr(dist, name, asked)
    trainer: Any = StepTrainer.__new__(StepTrainer)
    trainer.state = SimpleNamespace(dataloader=[4, 5], dataloader_len=None)
    trainer.engine = SimpleNamespace(run_event=str, run_marker_only_event=str)
    assert list(trainer._iter_dataloader(TrainerMode.TRAIN)) == [4, 5]
    second = timedelta(seconds=1)
    assert trainer._accumulate_time_across_ranks(8, 0, second) == (16, 0, second)


class Counts(Callback):
    """Counts what steps 2 and 3 do, and keeps the losses of all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self.losses: list[dict[str, float]] = []
        self.operators = CountedOperators()
        monkeypatch.setattr(composer_trainer, "deepcopy", self._counted("copies"))
        looks = self._counted("looks")  # through all modules
        monkeypatch.setattr(State, "fsdp_enabled", property(lambda _: looks(False)))

    def _counted(self, what: str) -> Callable[[Any], Any]:
        def same(value: Any) -> Any:
            self.found[what] += 1
            return value

        return same

    def batch_end(self, state: Any, logger: Any) -> None:
        self.losses.append(dict(state.total_loss_dict))
        if len(self.losses) == 1:
            self.found.clear()
            self.operators.__enter__()
        elif len(self.losses) == 3:
            self.operators.__exit__(None, None, None)
            self.seen = Counter(self.found)
            self.seen["items"] = self.operators.counts["_local_scalar_dense"]


def trained(
    recipe: Path, counts: Counts, *overrides: str
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Train three steps; return losses and weights."""
    options = (MAE, "trainer.max_duration=3ba", "trainer.log_interval=100", *overrides)
    run = build_components(load_recipe(recipe, options))
    fit(run, counts)
    return counts.losses, {name: each.clone() for name, each in run.model.state_dict().items()}


def test_a_step_has_no_item_and_copies_nothing(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counts(monkeypatch)
    trained(tiny, counts)
    assert counts.seen == {"items": 0}


def test_losses_are_fetched_while_the_next_step_runs(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for step 1, which is logged, and the last."""
    look_late(monkeypatch)
    fetched: list[tuple[int, int]] = []
    made: list[StepLosses] = []  # themselves: their id may be that of one deleted before
    begin, fetch = StepLosses.__init__, StepLosses.fetch

    def init(self: StepLosses, losses: Any) -> None:
        begin(self, losses)
        made.append(self)

    def wait(self: StepLosses) -> Any:
        if self._losses is None:
            step = next(step for step, each in enumerate(made, 1) if each is self)
            fetched.append((step, len(made)))
        return fetch(self)

    monkeypatch.setattr(StepLosses, "__init__", init)
    monkeypatch.setattr(StepLosses, "fetch", wait)
    options = MAE, "trainer.max_duration=5ba", "trainer.log_interval=100"
    assert train.main([str(tiny), *options, "trainer.save_interval=100ba"]) == 0
    assert fetched == [(1, 1), (2, 3), (3, 3), (4, 5), (5, 5)]


@pytest.mark.parametrize("size", [8, 4, 3])
def test_it_is_the_step_of_composer(size: int, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = f"trainer.microbatch_size={size}", "trainer.save_interval=100ba"
    losses, weights = trained(tiny, Counts(monkeypatch), *options, "run_name=ours")
    monkeypatch.setattr(ours, "StepTrainer", lambda cudnn, casting, **options: Trainer(**options))
    counts = Counts(monkeypatch)
    others, theirs = trained(tiny, counts, *options, "run_name=composer")
    assert counts.seen["items"] > 10  # that is, they are counted
    assert counts.seen["copies"] and counts.seen["looks"]
    assert losses == others and len(losses) == 3
    assert all(torch.equal(value, theirs[name]) for name, value in weights.items())


class Streams:
    """A device whose streams note what happens on them, in order."""

    def __init__(self) -> None:
        self.main, self.notes = Queue(self, "main"), list[str]()
        self.current = self.main

    def Stream(self) -> "Queue":
        return Queue(self, "side")

    def current_stream(self) -> "Queue":
        return self.current

    def stream(self, stream: "Queue") -> AbstractContextManager[None]:
        @contextmanager
        def within() -> Any:
            before, self.current = self.current, stream
            yield
            self.current = before

        return within()

    def is_available(self) -> bool:  # what newer versions of torch ask before a pinned copy
        return False

    def note(self, what: str) -> None:
        self.notes.append(f"{what} on {self.current.name}")


class Queue:
    def __init__(self, device: Streams, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: "Queue") -> None:
        self.device.notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()
    monkeypatch.setattr(torch, "get_device_module", lambda device: streams)
    return streams


def test_the_main_stream_waits_for_what_the_side_stream_makes(streams: Streams) -> None:
    def make() -> Batch:
        streams.note("made")
        return {"index": torch.arange(2)}

    assert SideStream("cuda")(make)["index"].tolist() == [0, 1]
    assert streams.notes == ["made on side", "main waits for side"]
    assert streams.current is streams.main


def test_on_a_cpu_it_is_a_call() -> None:
    batch = {"index": torch.arange(2)}
    assert SideStream("cpu")(lambda: batch) is batch


def noted(streams: Streams, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        streams.note(what)
        return function(*arguments, **named)

    return call


def test_a_step_copies_and_draws_beside_the_one_before(
    tiny: Path, streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step computes with, such as schedules and weights, only the main stream touches."""
    run = build_components(
        load_recipe(tiny, [MAE, "trainer.max_duration=3ba", "data.batch_size=8"])
    )
    for name in ("schedule", "write"):
        monkeypatch.setattr(mae.MAE, name, noted(streams, name, getattr(mae.MAE, name)))
    monkeypatch.setattr(run.model, "after_step", noted(streams, "after_step", run.model.after_step))
    monkeypatch.setattr(run.model, "run_step", noted(streams, "forward", run.model.run_step))
    run.model.is_one_graph = True
    copy = noted(streams, "copy", run.device.batch_to_device)
    monkeypatch.setattr(run.device, "batch_to_device", copy)
    fit(run)
    one = ["copy on side", "main waits for side", "schedule on main", "write on side"]
    one += ["main waits for side", "forward on main", "after_step on main"]
    notes = [note for note in streams.notes if note != "copy on main"]  # Composer's
    assert notes == 3 * one


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_what_was_copied_beside_is_whole() -> None:
    beside, host = SideStream("cuda"), torch.arange(1 << 24).pin_memory()
    sums: list[Tensor] = []
    for factor in range(4):
        batch = beside(lambda: {"x": host.to("cuda", non_blocking=True) * factor})  # noqa: B023
        sums.append(batch["x"].sum())
        del batch
    assert [int(each) for each in sums] == [factor * int(host.sum()) for factor in range(4)]
