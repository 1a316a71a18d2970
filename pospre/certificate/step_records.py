"""Records the inputs and results of every training step, and compares the records of two runs."""

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from composer.utils.collect_env import get_composer_env_dict
from PIL import Image
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from pospre.errors import run_command
from pospre.model.algorithm import pretrain_model
from pospre.recipe.recipe import load_recipe, recipe_from_dict
from pospre.scratch import scratch
from pospre.training.build import build_components
from pospre.training.callbacks.metrics import plain_losses
from pospre.training.train import train

_BREATH = 0.05  # minimal seconds of a step, so that kills can hit it
_ROW_BYTES = 8  # of a sample's hash: enough to distinguish a few thousand samples
_PROPERTIES = {  # of the keys of a batch; all others are masks
    **dict.fromkeys(("index", "epoch", "label"), "sample ids"),
    **dict.fromkeys(("box", "field_box"), "boxes"),
    "flip": "flips",
    "image": "pixels",
}
DRAWN = ("sample ids", "boxes", "flips", "masks", "pixels")
PREPARE = "POSPRE_PREPARES_FORKS"
"""The variable of the environment that makes this module call ``prepare``."""


@dataclass(frozen=True)
class Job:
    """The work of one process."""

    recipe: str
    overrides: tuple[str, ...]
    records: tuple[Path, ...]  # of the observers, by rank
    values: Path  # for the final weights
    log: Path
    every_weight: bool = True  # hash the weights after every step
    environment: Mapping[str, str] = field(default_factory=dict)  # such as a bucket's endpoint


class Observer(Callback):
    """Appends a line to a file at the start and end of training and of every step.

    A step's line has one hash for each sample and property (ids, boxes, flips, masks, pixels: the
    model's batch, after the algorithms' draws), the losses, and a hash of all weights after it.
    Each line is one write, so a kill leaves at most half a line. Rank 0 writes the final weights
    to the file ``values``. Without ``every_weight`` only these are hashed.
    """

    def __init__(self, path: Path, *, every_weight: bool, values: Path) -> None:
        self.every_weight = every_weight
        self.values = values
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._rows: dict[str, list[str]] = defaultdict(list)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record the step before this process, and the part of the method that couples samples."""
        coupled = pretrain_model(state).layout.coupled
        self._write(start=state.timestamp.batch.value, coupled=coupled)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Record the start of a step, so that the killer can follow the process."""
        self._rows.clear()
        self._write(begun=state.timestamp.batch.value + 1)
        time.sleep(_BREATH)

    def after_forward(self, state: State, logger: Logger) -> None:
        """Hash the samples of a microbatch with everything drawn for them."""
        parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.batch.items():
            parts[_PROPERTIES.get(key.rpartition("/")[2], "masks")][key] = value
        for name, values in parts.items():
            self._rows[name].extend(hash_rows(values))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the line of a finished step."""
        self._write(
            step=state.timestamp.batch.value,
            rows={name: "".join(rows) for name, rows in self._rows.items()},
            losses={k: value.hex() for k, value in plain_losses(state.total_loss_dict).items()},
            parameters=hash_tensors(state.model.state_dict()) if self.every_weight else None,
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Record the final weights, optimiser and random state; save the weights' values."""
        model = state.get_model_state_dict()
        optimizer = state.optimizers[0].state_dict()
        # without Python's own generator: boto draws its delays from it
        random = reproducibility.get_rng_state()
        random = [{key: rank[key] for key in rank if key != "python"} for rank in random]
        self._write(
            end=state.timestamp.batch.value,
            parameters=hash_tensors(model),
            optimiser=hash_tensors(optimizer),
            random=hash_tensors(random),
        )
        if dist.get_global_rank() == 0:
            arrays: dict[str, Any] = {
                name: _local(value).float().numpy() for name, value in model.items()
            }
            np.savez(self.values, **arrays)

    def _write(self, **values: Any) -> None:
        line = json.dumps({**values, "at": time.monotonic()})
        os.write(self._file, (line + "\n").encode())


def hash_rows(values: Mapping[str, Tensor]) -> list[str]:
    """Return one hash per sample over some keys of a batch: types, shapes and bytes."""
    hashes = [hashlib.blake2b(digest_size=_ROW_BYTES) for _ in next(iter(values.values()))]
    for key, value in sorted(values.items()):
        head = f"{key} {value.dtype} {tuple(value.shape[1:])}".encode()
        for row, digest in zip(value.detach().cpu(), hashes, strict=True):
            digest.update(head)
            digest.update(_bytes(row))
    return [digest.hexdigest() for digest in hashes]


def hash_tensors(tree: Any) -> str:
    """Return a hash of nested dicts, in any order of keys, and lists; with tensors by their bytes.

    An optimiser orders its moments by when they began.
    """
    digest = hashlib.blake2b(digest_size=16)
    leaves = {keystr(path): leaf for path, leaf in tree_flatten_with_path(tree)[0]}
    for path, leaf in sorted(leaves.items()):
        digest.update(path.encode())
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(np.ascontiguousarray(leaf).view(np.uint8))
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(_bytes(_local(leaf)))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _local(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@dataclass
class Step:
    """A finished training step."""

    number: int  # counted from 1
    rows: dict[str, str]  # a hash for each sample of all ranks, in order, by property
    losses: dict[str, float]  # averages over the ranks, with the metrics
    parameters: str | None  # a hash of the weights after it, if recorded

    def value(self, name: str) -> object:
        """Return the values that are compared for this property."""
        return self.rows.get(name, "") if name in DRAWN else getattr(self, name)


@dataclass
class ProcessRecord:
    """The record of one process."""

    start: int | None = None  # the step it resumed from; None: it ended before that
    steps: list[Step] = field(default_factory=list)
    end: dict[str, Any] | None = None  # hashes of the final state, if it finished the run
    coupled: str = ""  # the part of the method that couples samples; empty: none
    first: float = 0.0  # when its first step began, in seconds of the machine's clock
    seconds: list[float] = field(default_factory=list)  # of each of its steps


def read_record(paths: Sequence[Path]) -> ProcessRecord:
    """Return the record of a process from its ranks' files, rank 0 first.

    A step is finished when all ranks have written it.
    """
    texts = [path.read_bytes() if path.exists() else b"" for path in paths]
    # without a last line that was cut off by a kill
    ranks = [list(map(json.loads, text.split(b"\n")[:-1])) for text in texts]
    record, begun_at = ProcessRecord(), 0.0
    for line in ranks[0]:
        if "start" in line and record.start is None:  # not that of a later stage
            record.start, record.coupled = line["start"], line["coupled"]
        elif "begun" in line:
            begun_at = line["at"]
            record.first = record.first or begun_at
        elif "step" in line:
            record.seconds.append(line["at"] - begun_at)
        elif "end" in line:
            record.end = line
    by_rank = [{line["step"]: line for line in lines if "step" in line} for lines in ranks]
    for number in sorted(set.intersection(*map(set, by_rank))):
        lines = [steps[number] for steps in by_rank]
        rows = {name: "".join(line["rows"][name] for line in lines) for name in lines[0]["rows"]}
        losses = {name: float.fromhex(value) for name, value in lines[0]["losses"].items()}
        record.steps.append(Step(number, rows, losses, lines[0]["parameters"]))
    return record


def train_observed(job: Job) -> None:
    """Train as ``python -m pospre.train`` does, with an observer; exit with its code."""

    def work() -> int:
        torch.set_num_threads(1)
        recipe = load_recipe(job.recipe, job.overrides)
        record = job.records[dist.get_global_rank()]
        train(recipe, [Observer(record, every_weight=job.every_weight, values=job.values)])
        return 0

    sys.exit(run_command(work))


def prepare() -> None:
    """Do in advance what every process would repeat: late imports, numba's cache, the host name.

    The fork server calls it while it imports this module. No thread may be left: a fork has only
    the forking one, and locks held by others would stay.
    """
    import composer.algorithms  # noqa: F401  (with transformers; Composer does at its first step)

    with scratch() as folder:
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(folder / "black.jpg")
        recipe = {
            "run_name": "preload",
            "data": {"path": str(folder), "batch_size": 1, "num_workers": 0},
            "encoder": {"name": "vit_tiny16", "image_size": 32, "depth": 1},
            "algorithms": {"mae": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}},
            "schedule": {"warmup": "0ba"},
            "trainer": {"max_duration": "1ba", "device": "cpu"},
        }
        next(iter(build_components(recipe_from_dict(recipe)).loader))
    get_composer_env_dict()  # starts a subprocess; its result goes into every checkpoint
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"preparing training started {threads - 1} threads, so forks are unsafe")


if os.environ.get(PREPARE):  # only in the fork server, which calls nothing
    prepare()
