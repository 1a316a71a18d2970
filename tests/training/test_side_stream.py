"""The side stream: what runs on it, who waits for whom, and that a run's step uses it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.algorithms.mae import MAE
from pospre.batch import Batch
from pospre.recipe.recipe import load_recipe
from pospre.training.build import build_components
from pospre.training.side_stream import SideStream
from tests.training import tiny_runs
from tests.training.fitting import fit


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
        load_recipe(tiny, [tiny_runs.MAE, "trainer.max_duration=3ba", "data.batch_size=8"])
    )
    for name in ("schedule", "write", "after_step"):
        monkeypatch.setattr(MAE, name, noted(streams, name, getattr(MAE, name)))
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
