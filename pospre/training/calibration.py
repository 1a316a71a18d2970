"""Fits new heads to the published weights of a run, before its first step."""

from itertools import islice

from composer.devices import Device

from pospre.arguments import declared
from pospre.data.loader import build_loader
from pospre.data.reading import Reading
from pospre.model.calibration import NUM_VIEWS, calibrate, calibrated
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe
from pospre.training.data import build_views, storage

_BATCH = 32


def fit_heads(model: PretrainModel, recipe: Recipe, device: Device) -> str | None:
    """Fit the heads to the first views of the run's data; return a line, or None without such.

    All ranks read the same samples: the weights are a function of the seed.
    """
    wanted = calibrated(model)
    if not wanted:
        return None
    count = max(model.views[model.layout.passes[name].group].count for name in wanted.values())
    loader = build_loader(
        recipe.data.path,
        views=list(build_views(recipe).values()),
        batch_size=_BATCH,
        seed=recipe.seed,
        drop_last=False,
        **{**declared(recipe.data, Reading), **storage(recipe)},
    )
    before = next(model.parameters()).device
    device.module_to_device(model)
    batches = islice(loader, -(-NUM_VIEWS // (count * _BATCH)))
    views = calibrate(model, map(device.batch_to_device, batches))
    model.to(before)
    return f"heads of {' and '.join(wanted)} fitted to {views} views of the start"
