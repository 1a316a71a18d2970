"""What a life does: it trains, observed."""

import sys

from pospre.certificate.lives import Order
from pospre.errors import run_command


def live(order: Order) -> None:
    """Train as ``python -m pospre.train`` does, with an observer; leave with the exit code."""
    sys.exit(run_command(lambda: _train(order)))


def _train(order: Order) -> int:
    import torch
    from composer.utils import dist

    from pospre.certificate.observer import Observer
    from pospre.recipe.recipe import load_recipe
    from pospre.training.distributed.peers import joined
    from pospre.training.run import train
    from pospre.training.run_folder import hold_run

    torch.set_num_threads(1)
    recipe = load_recipe(order.recipe, order.overrides)
    observer = Observer(
        order.records[dist.get_global_rank()],
        every_weight=order.every_weight,
        values=order.values,
    )
    with joined(recipe), hold_run(recipe):
        train(recipe, [observer])
    return 0
