"""Events of a step reach those whom they concern, in Composer's order; no others are called."""

import hashlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from composer.core import Callback, Engine, Event
from composer.loggers import LoggerDestination

from pospre.recipe.recipe import load_recipe
from pospre.training.build import build_components
from pospre.training.step_trainer import StepEngine
from tests.training.fitting import fit
from tests.training.tiny_runs import MAE

MADE_FOR = {
    "run_event": "7a6db86fd366",
    "_run_algorithms": "7b3abe1ac482",
    "_run_callbacks": "041f89c2886d",
    "_compile": "7fb43791daab",
    "_debug_log": "be0c38869719",
}
"""Of Composer 0.32.1; if one differs, compare ``training/step_trainer.py`` with the new one."""

Seen = list[tuple[str, str]]


def test_composers_engine_is_the_one_that_is_overridden() -> None:
    found = {
        name: hashlib.sha256(inspect.getsource(getattr(Engine, name)).encode()).hexdigest()[:12]
        for name in MADE_FOR
    }
    assert found == MADE_FOR


class Some(Callback):
    """Has methods for three events of a step."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def before_forward(self, state: Any, logger: Any) -> None:
        self.seen.append(("some", "before_forward"))

    def batch_end(self, state: Any, logger: Any) -> None:
        self.seen.append(("some", "batch_end"))

    def epoch_end(self, state: Any, logger: Any) -> None:
        self.seen.append(("some", "epoch_end"))


class Every(LoggerDestination):
    """A logger that hears all; those come last."""

    def __init__(self, seen: Seen) -> None:
        self.seen = seen

    def run_event(self, event: Event, state: Any, logger: Any) -> None:
        self.seen.append(("every", event.value))


def steps(recipe: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Seen, int]:
    """Train four steps; return what was heard, and the calls of callbacks in the last one."""
    seen: Seen = []
    options = MAE, "trainer.max_duration=4ba", "trainer.log_interval=100", f"run_name={name}"
    calls = 0

    def counted(callback: Callback, event: Event, state: Any, logger: Any) -> None:
        nonlocal calls
        calls += state.timestamp.batch.value == 3
        getattr(callback, event.value)(state, logger)

    monkeypatch.setattr(Callback, "run_event", counted)
    # the logger is given first
    fit(build_components(load_recipe(recipe, options)), Every(seen), Some(seen))
    return seen, calls


def test_the_order_is_composers_with_a_fraction_of_its_calls(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, few = steps(tiny, monkeypatch, "ours")
    monkeypatch.setattr(StepEngine, "take_over", lambda engine: None)
    composers, many = steps(tiny, monkeypatch, "composers")
    assert ours == composers
    assert ours.index(("some", "before_forward")) + 1 == ours.index(("every", "before_forward"))
    assert few <= 64 < 150 < many


def test_a_callback_that_is_added_later_hears_events() -> None:
    class State:
        profiler = None
        algorithms: tuple[()] = ()
        callbacks: list[Callback]

    seen: Seen = []
    engine: Any = StepEngine.__new__(StepEngine)
    engine.state, engine.logger, engine._is_closed = State(), None, True
    engine.state.callbacks = []
    StepEngine.take_over(engine)
    assert engine._listeners(Event.BATCH_END) == []
    engine.state.callbacks.append(late := Some(seen))
    assert engine._listeners(Event.BATCH_END) == [late]
    assert engine._listeners(Event.BATCH_START) == []
