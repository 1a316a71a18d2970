"""Composer's Engine, but a step's events reach only the callbacks that have a method for them.

It is made for Composer 0.32.1; a test fails if Composer changes what this relies on.
"""

import os

from composer.core import Callback, Engine, Event
from composer.core.engine import Traces
from composer.loggers import LoggerDestination

OVERRIDDEN = ("run_event", "_run_algorithms", "_run_callbacks", "_compile", "_debug_log")
"""What this module relies on: methods of Composer's Engine."""
_OF_A_STEP = frozenset(
    event
    for event in Event
    if event.value.startswith(("batch_", "before_", "after_"))
    and not event.is_eval
    and not event.is_predict
    and event not in (Event.BEFORE_LOAD, Event.AFTER_LOAD)
)


class StepEngine(Engine):
    """Composer's Engine without calls of empty methods.

    Composer calls every callback for each event of a step, and sorts the algorithms. The order is
    the same here: algorithms, callbacks, loggers.
    """

    _callbacks: list[Callback]
    _listening: dict[Event, list[Callback]]

    @classmethod
    def take_over(cls, engine: Engine) -> None:
        """Make a Composer's Engine one of these."""
        engine.__class__ = cls
        engine._callbacks, engine._listening = [], {}  # type: ignore[attr-defined]

    def run_event(self, event: Event | str) -> Traces:
        """Run an event; all but those of a training step as Composer does."""
        state = self.state
        if event not in _OF_A_STEP or state.profiler is not None or self._is_closed:
            return super().run_event(event)
        assert isinstance(event, Event)
        running = [each for each in state.algorithms if each.match(event, state)]
        for algorithm in self._compile(running, event) if len(running) > 1 else running:
            algorithm.apply(event, state, self.logger)
        for callback in self._listeners(event):
            callback.run_event(event, state, self.logger)
        return {}

    def _listeners(self, event: Event) -> list[Callback]:
        """Return the callbacks with a method for an event, loggers last; found once."""
        if self._callbacks != self.state.callbacks:
            self._callbacks, self._listening = list(self.state.callbacks), {}
        if event not in self._listening:
            heard = [each for each in self._callbacks if _listens(each, event)]
            heard.sort(key=lambda each: isinstance(each, LoggerDestination))
            self._listening[event] = heard
        return self._listening[event]

    def _debug_log(self, event: Event, msg: str) -> None:
        """Format lines only if they are asked for: Composer formats one for each callback."""
        if os.environ.get("ENGINE_DEBUG"):
            super()._debug_log(event, msg)


def _listens(callback: Callback, event: Event) -> bool:
    """Tell whether a callback has a method of its own for an event, or one for all."""
    kind, own = type(callback), vars(callback)
    return any(
        name in own or getattr(kind, name) is not getattr(Callback, name)
        for name in ("run_event", event.value)
    )
