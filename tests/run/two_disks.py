"""Run by ``composer -n 2``: each rank is a node; they look at one disk, then at two."""

import sys

from composer.utils import dist

from pospre.recipe.recipe import load_recipe
from pospre.run import run

RECIPE, DISKS = sys.argv[1:]


def look(disk: str) -> bool:
    """Let the nodes look at the disk of a run; tell whether it is one."""
    recipe = load_recipe(RECIPE, [f"trainer.run_folder={disk}"])
    is_one = run.is_one_place(recipe)
    dist.barrier()
    assert not list(recipe.local_checkpoints().glob("*"))
    return is_one


if __name__ == "__main__":
    dist.initialize_dist("cpu")
    dist.get_local_world_size = lambda: 1
    dist.get_local_rank = lambda: 0
    assert look(f"{DISKS}/shared")
    run._LATE = 0.1
    assert not look(f"{DISKS}/{dist.get_global_rank()}")
