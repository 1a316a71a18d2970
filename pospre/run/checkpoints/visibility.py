"""Whether all nodes of a run see the folder into which each of them writes its shards."""

import socket
import uuid
from functools import partial
from pathlib import Path

from composer.utils import dist

from pospre.collectives import (
    from_rank_zero,
    however_long,
    on_every_rank,
    wait_until,
)
from pospre.errors import UserError
from pospre.object_store import is_remote
from pospre.recipe.recipe import Recipe

_LATE = 60.0  # seconds after which NFS shows a new file at the latest
_PAUSE = 0.5


def check_visibility(recipe: Recipe) -> None:
    """Refuse shards on disks that the nodes do not share, of which no start could read all.

    Raises:
        UserError: on all ranks, before anything is trained.
    """
    on_one_node = dist.get_world_size() == dist.get_local_world_size()
    whole = recipe.trainer.checkpoint != "sharded"
    if whole or on_one_node or is_remote(recipe.checkpoint_folder()):
        return
    folder = recipe.local_checkpoints()
    sign = folder / from_rank_zero(lambda: _leave_sign(folder))
    looked = partial(wait_until, sign.exists, _LATE, _PAUSE)
    seen = on_every_rank(lambda: (socket.gethostname(), however_long(looked)))
    if dist.get_global_rank() == 0:
        sign.unlink()
    blind = sorted({host for host, is_seen in seen if not is_seen})
    if blind:
        raise UserError(
            f"trainer.checkpoint = sharded: {', '.join(blind)} cannot see what {seen[0][0]} writes "
            f"into {folder}, so no checkpoint would ever be in one place. Set trainer.save_folder "
            "to a bucket or to a folder that all nodes share, or trainer.checkpoint=whole"
        )


def _leave_sign(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".sign-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name
