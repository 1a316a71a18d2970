"""What watches a run, as its recipe says."""

from collections.abc import Callable
from typing import Any

from composer.core import Callback

from pospre.arguments import Section
from pospre.recipe.recipe import Recipe
from pospre.training.callbacks.collapse import Collapse
from pospre.training.callbacks.position_shortcut import PositionShortcut
from pospre.training.callbacks.spikes import LossSpikes
from pospre.training.callbacks.stalls import Stalls
from pospre.training.callbacks.watcher import WARNINGS


def build_watchers(recipe: Recipe) -> list[Callback]:
    """Return the callbacks of the recipe; their warnings go into the run's folder."""
    options, log = recipe.callbacks, recipe.run_path() / WARNINGS
    regularly = {"interval": recipe.trainer.log_interval}
    found: list[tuple[Callable[..., Callback], Section | None, dict[str, Any]]] = [
        (Stalls, options.stalls, regularly),
        (LossSpikes, options.loss_spikes, {"recipe": recipe}),
        (Collapse, options.collapse, regularly),
        (PositionShortcut, options.position_shortcut, regularly),
    ]
    return [kind(log=log, **more, **own.model_dump()) for kind, own, more in found if own]
