"""Run by ``composer -n 2``: each rank is a node; they look at one disk, then at two."""

import re
import sys
from pathlib import Path

import pytest
from composer.utils import dist

from pospre.errors import UserError
from pospre.recipe.recipe import load_recipe
from pospre.run import run

RECIPE, DISKS = sys.argv[1:]


def look(disk: str) -> list[Path]:
    """Let the nodes look at the disk of a run; return what is left there."""
    recipe = load_recipe(RECIPE, ["trainer.checkpoint=sharded", f"trainer.run_folder={disk}"])
    run.check_visibility(recipe)
    dist.barrier()
    return list(recipe.local_checkpoints().glob("*"))


if __name__ == "__main__":
    dist.initialize_dist("cpu")
    dist.get_local_world_size = lambda: 1
    dist.get_local_rank = lambda: 0
    assert look(f"{DISKS}/shared") == []
    run._LATE = 0.1
    with pytest.raises(UserError, match=f"cannot see what .* writes into {re.escape(DISKS)}/"):
        look(f"{DISKS}/{dist.get_global_rank()}")
