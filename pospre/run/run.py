"""One door for a run: it holds the folder, the ranks and the checkpoints while it trains."""

import socket
import uuid
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from composer.core import Callback
from composer.utils import dist

from pospre.collectives import from_rank_zero, however_long, on_every_rank, print_once, wait_until
from pospre.errors import UserError
from pospre.model.stages import Stages
from pospre.object_store import check_writable, is_remote
from pospre.recipe.recipe import Recipe
from pospre.recipe.sections import Trainer
from pospre.run.checkpoints.folders import checkpoint_folders, checkpoints_in, checkpoints_of
from pospre.run.checkpoints.intervals import AutoInterval
from pospre.run.checkpoints.reading import Checkpoint, open_newest, read_on_every_rank
from pospre.run.checkpoints.saver import CheckpointSaver
from pospre.run.checkpoints.uploads import Uploads, lacks
from pospre.run.device import build_device
from pospre.run.folder import check_folder, clear, hold_run, restore_run, starts_over, write_recipe
from pospre.run.peers.peers import joined
from pospre.run.peers.ranks import check_data
from pospre.run.resume import (
    RecipeRecord,
    Resume,
    Training,
    check_checkpoint,
    reference_hash,
)

_LATE = 60.0  # seconds after which NFS shows a new file at the latest
_PAUSE = 0.5


class Run:
    """A run that holds its folders on all of its ranks; no other start can enter them.

    ``with Run(recipe) as run`` joins the other ranks and locks the folder (a bucket by a lease).
    ``find`` looks for the newest complete checkpoint. ``begin`` returns the callbacks that resume
    from it, save, and upload during training. Leaving the block releases everything.

    Attributes:
        device: to train on.
        start: on rank 0 the checkpoint that ``find`` has found, if there is one.

    Raises:
        UserError: another run is in the folder, or the ranks do not come together.
        Lost: another rank has ended before its time, or answers no more.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.device = build_device(recipe)
        self.start: Checkpoint | None = None
        self._training: Training | None = None
        self._uploads: Uploads | None = None
        self._held, self._sending = ExitStack(), ExitStack()

    def __enter__(self) -> "Run":
        with ExitStack() as stack:
            stack.enter_context(joined(self.recipe, self.device))
            stack.enter_context(hold_run(self.recipe))
            if is_remote(self.recipe.checkpoint_folder()) and dist.get_global_rank() == 0:
                check_writable(self.recipe.checkpoint_folder())  # before anything slow
            stack.enter_context(self._sending)
            self._held = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._held.__exit__(kind, error, trace)

    def is_new(self) -> bool:
        """Return on every rank whether the run starts anew: no checkpoint exists or is wanted."""
        recipe = self.recipe
        return from_rank_zero(lambda: starts_over(recipe) or not checkpoints_of(recipe))

    def find(self, training: Training) -> int:
        """Return on every rank the step from which the run resumes; 0: from the beginning.

        Nothing is written before everything is checked.

        Raises:
            UserError: the ranks have other data, the bucket does not work, or the folder or its
                checkpoints are of another run.
        """
        recipe, leads = training.recipe, dist.get_global_rank() == 0
        check_data(recipe, training.loader.num_samples, training.loader.identity)
        start = however_long(lambda: _open(training) if leads else None)
        folder = recipe.checkpoint_folder()
        if is_remote(folder) and (leads or has_shards(recipe)):
            uploads = Uploads(recipe.run_path(), folder, keep=recipe.trainer.keep_remote)
            self._uploads = self._sending.enter_context(uploads)
        self._training = training
        self.start = however_long(lambda: in_bucket(start, self._uploads))
        return from_rank_zero(lambda: 0 if self.start is None else self.start.batch)

    def find_again(self, step: int) -> None:
        """Look on all ranks for the checkpoint that this start has just saved, at ``step``.

        ``UserError`` if it cannot be read.
        """
        recipe, folders = self.recipe, checkpoint_folders(self.recipe)
        if dist.get_world_size() > dist.get_local_world_size():  # where all nodes see it
            folders = [recipe.checkpoint_folder()]
            on_every_rank(lambda: however_long(self._wait_for_uploads))
        leads = dist.get_global_rank() == 0
        self.start = however_long(lambda: open_newest(folders) if leads else None)
        newest = from_rank_zero(lambda: self.start and self.start.batch)
        assert newest == step, f"the newest checkpoint is of step {newest}, not {step}"

    def _wait_for_uploads(self) -> None:
        missing = None if self._uploads is None else self._uploads.finish()
        if missing is not None:
            raise missing

    def begin(self, stages: Stages | None = None) -> list[Callback]:
        """Return the callbacks that load the checkpoint that was found, save and upload.

        All ranks call it together, after ``find``. ``stages`` are those of the training, at this
        step.
        """
        assert self._training is not None
        recipe, loader = self._training.recipe, self._training.loader
        start, options = self.start, recipe.trainer
        saver = CheckpointSaver(
            recipe.local_checkpoints(),
            interval=save_interval(options),
            keep=options.keep_checkpoints,
            earlier=from_rank_zero(lambda: [] if start is None else _earlier(recipe, start)),
            together=has_shards(recipe) and is_one_place(recipe),
        )
        if self._uploads is not None and saver.together:
            saver.after_parts.append(self._uploads.offer_together)
        elif self._uploads is not None:
            saver.after_save.append(self._uploads.offer)
        step = from_rank_zero(lambda: 0 if start is None else start.batch)
        reference = reference_hash(self._training.model)
        record = RecipeRecord(recipe, loader, reference, stages, step)
        content = read_on_every_rank(start)
        if content is None:
            return [record, saver]
        print_once(f"resuming from {start and start.uri}")
        entering = () if stages is None else stages.entering(step)
        return [record, saver, Resume(content, entering)]

    def finish_uploads(self) -> None:
        """Wait until the last checkpoint is in the bucket; ``UserError`` after long silence."""
        self._sending.close()


def save_interval(options: Trainer) -> str | AutoInterval:
    """Return the recipe's interval between saves, or what measures it."""
    if options.save_interval != "auto":
        return options.save_interval
    assert options.hours_between_failures is not None
    nodes = -(-dist.get_world_size() // dist.get_local_world_size())
    if options.keep_remote < 0 and is_remote(options.save_folder or ""):
        print_once(
            f"trainer.keep_remote = -1 keeps every checkpoint in {options.save_folder}; "
            "save_interval: auto may save every few minutes"
        )
    return AutoInterval(options.hours_between_failures * 3600, nodes)


def in_bucket(start: Checkpoint | None, uploads: Uploads | None) -> Checkpoint | None:
    """Upload a local checkpoint that the bucket lacks; wait if other nodes must read it."""
    if start is None or uploads is None or is_remote(start.uri):
        return start
    path = Path(start.uri)
    if lacks(uploads.remote, path):
        uploads.offer(path)
    if dist.get_world_size() == dist.get_local_world_size():
        return start
    missing = uploads.finish()
    if missing is not None:
        raise missing
    return start._replace(uri=f"{uploads.remote.rstrip('/')}/{path.name}")


def _open(training: Training) -> Checkpoint | None:
    """Make or check the run's folder and return the checkpoint to resume from, if any."""
    recipe = training.recipe
    if starts_over(recipe):
        clear(recipe)
    check_folder(recipe)
    start = open_newest(checkpoint_folders(recipe))
    if start is not None:
        check_checkpoint(start, training)
    write_recipe(recipe, training.model.algorithms)
    if start is not None and is_remote(start.uri):
        restore_run(recipe.run_path(), recipe.checkpoint_folder())
    return start


def _earlier(recipe: Recipe, start: Checkpoint) -> list[Path]:
    """Return the local checkpoints up to ``start``, oldest first."""
    local = checkpoints_in(str(recipe.local_checkpoints()))
    return [Path(each.uri) for each in reversed(local) if each.batch <= start.batch]


def has_shards(recipe: Recipe) -> bool:
    """Return whether each rank holds only a part of the state."""
    return recipe.trainer.fsdp is not None and dist.get_world_size() > 1


def is_one_place(recipe: Recipe) -> bool:
    """Return on every rank whether the files of all ranks end up in one place.

    They do not if the nodes share neither a disk nor a bucket. The first rank then gathers the
    whole state and writes it.
    """
    on_one_node = dist.get_world_size() == dist.get_local_world_size()
    if on_one_node or is_remote(recipe.checkpoint_folder()):
        return True
    folder = recipe.local_checkpoints()
    marker = folder / from_rank_zero(lambda: _leave_marker(folder))
    looked = partial(wait_until, marker.exists, _LATE, _PAUSE)
    seen = on_every_rank(lambda: (socket.gethostname(), however_long(looked)))
    if dist.get_global_rank() == 0:
        marker.unlink()
    blind = sorted({host for host, is_seen in seen if not is_seen})
    if blind:
        print_once(
            f"{', '.join(blind)} cannot see what {seen[0][0]} writes into {folder}, so the first "
            "rank gathers the whole state and writes it. To resume, all nodes must see it: set "
            "trainer.save_folder to a bucket or to a folder that they share"
        )
    return not blind


def check_one_place(recipe: Recipe) -> None:
    """Raise ``UserError`` on every rank if nodes cannot read what the first rank saves."""
    if not is_one_place(recipe):
        raise UserError(
            "stages: at the end of each stage every node reads the checkpoint, but "
            f"trainer.save_folder = {recipe.trainer.save_folder} is not one that all nodes see. "
            "Use a bucket, or a folder that they share"
        )


def _leave_marker(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    name = f".marker-{uuid.uuid4().hex}"
    (folder / name).touch()
    return name
