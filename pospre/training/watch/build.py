"""What watches a run, as its recipe says."""

from composer.core import Callback

from pospre.recipe.recipe import Recipe
from pospre.training.watch.collapse import Collapse
from pospre.training.watch.shortcut import PositionShortcut
from pospre.training.watch.spikes import LossSpikes
from pospre.training.watch.stalls import Stalls
from pospre.training.watch.watcher import WARNINGS


def build_watchers(recipe: Recipe) -> list[Callback]:
    """Return the callbacks of the recipe; their warnings go into the run's folder."""
    options, interval = recipe.callbacks, recipe.trainer.log_interval
    log = recipe.run_path() / WARNINGS
    watchers: list[Callback] = []
    if options.stalls is not None:
        watchers.append(Stalls(interval=interval, log=log, **options.stalls.model_dump()))
    if options.loss_spikes is not None:
        watchers.append(LossSpikes(recipe=recipe, log=log, **options.loss_spikes.model_dump()))
    if options.collapse is not None:
        watchers.append(Collapse(interval=interval, log=log, **options.collapse.model_dump()))
    if options.position_shortcut is not None:
        given = options.position_shortcut.model_dump()
        watchers.append(PositionShortcut(interval=interval, log=log, **given))
    return watchers
