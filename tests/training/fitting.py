"""Training the components of a recipe to the end, without a run's folder."""

from composer import Trainer
from composer.core import Callback

from pospre.training.build import Components
from pospre.training.callbacks.stop_signals import StopSignals
from pospre.training.train import build_trainer


def fit(parts: Components, *callbacks: Callback) -> Trainer:
    """Train and return the trainer, closed."""
    signals = StopSignals()
    trainer = build_trainer(parts, signals=signals, callbacks=callbacks)
    try:
        trainer.fit()
    finally:
        signals.give_back()
        trainer.engine.close()
    return trainer
