"""Records the inputs and results of every training step, and reads the records."""

import hashlib
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch import Tensor
from torch.distributed.tensor import DTensor

from pospre.certificate.processes import Job
from pospre.errors import run_command
from pospre.model.algorithm import PretrainAlgorithm
from pospre.recipe.recipe import load_recipe
from pospre.training.callbacks.metrics import plain_losses
from pospre.training.train import train

_BREATH = 0.05  # minimal seconds of a step, so that kills can hit it
_ROW_BYTES = 8  # of a sample's hash: enough to distinguish a few thousand samples
_PROPERTIES = {
    "index": "sample ids",
    "epoch": "sample ids",
    "label": "sample ids",
    "box": "boxes",
    "field_box": "boxes",
    "flip": "flips",
    "image": "pixels",
}
DRAWN = ("sample ids", "boxes", "flips", "masks", "pixels")


class Observer(Callback):
    """Appends a line to a file at the start and end of training and of every step.

    A step's line has one hash for each sample and property (ids, boxes, flips, masks, pixels: the
    model's batch, after the algorithms' draws), the losses, and a hash of all weights after it.
    Each line is one write, so a kill leaves at most half a line.

    Args:
        path: the file of this rank and process.
        every_weight: hash the weights after every step; otherwise only at the end.
        values: file for the final weights, rank 0 only.
    """

    def __init__(self, path: Path, *, every_weight: bool, values: Path) -> None:
        self.every_weight = every_weight
        self.values = values
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._rows: dict[str, list[str]] = defaultdict(list)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Record the step before this process, and the part of the method that couples samples."""
        algorithms = (each for each in state.algorithms if isinstance(each, PretrainAlgorithm))
        asked = (algorithm.couples_samples() for algorithm in algorithms)
        self._write(start=state.timestamp.batch.value, coupled=" and ".join(filter(None, asked)))

    def batch_start(self, state: State, logger: Logger) -> None:
        """Record the start of a step, so that the killer can follow the process."""
        self._rows.clear()
        self._write(begun=state.timestamp.batch.value + 1)
        time.sleep(_BREATH)

    def after_forward(self, state: State, logger: Logger) -> None:
        """Hash the samples of a microbatch with everything drawn for them."""
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.batch.items():
            found[property_of(key)][key] = value
        for name, values in found.items():
            self._rows[name].extend(hash_rows(values))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the line of a finished step."""
        self._write(
            step=state.timestamp.batch.value,
            rows={name: "".join(rows) for name, rows in self._rows.items()},
            losses={
                name: value.hex() for name, value in plain_losses(state.total_loss_dict).items()
            },
            parameters=hash_tensors(state.model.state_dict()) if self.every_weight else None,
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Record the final weights, optimiser and random state; save the weights' values."""
        model = state.get_model_state_dict()
        optimizer = state.optimizers[0].state_dict()
        # without Python's own generator: boto draws its delays from it
        random = [
            {name: value for name, value in rank.items() if name != "python"}
            for rank in reproducibility.get_rng_state()
        ]
        self._write(
            end=state.timestamp.batch.value,
            parameters=hash_tensors(model),
            optimiser=hash_tensors(optimizer),
            random=hash_tensors(random),
        )
        if dist.get_global_rank() == 0:
            arrays = {name: _local(value).float().numpy() for name, value in model.items()}
            np.savez(self.values, **arrays)

    def _write(self, **values: Any) -> None:
        line = json.dumps({**values, "at": time.monotonic()})
        os.write(self._file, (line + "\n").encode())


def hash_rows(values: Mapping[str, Tensor]) -> list[str]:
    """Return one hash per sample over some keys of a batch: types, shapes and bytes."""
    parts = []
    for key, value in sorted(values.items()):
        head = f"{key} {value.dtype} {tuple(value.shape[1:])}".encode()
        parts.append((head, value.detach().cpu().contiguous()))
    hashes = []
    for row in range(len(parts[0][1])):
        digest = hashlib.blake2b(digest_size=_ROW_BYTES)
        for head, value in parts:
            digest.update(head)
            digest.update(_bytes(value[row]))
        hashes.append(digest.hexdigest())
    return hashes


def hash_tensors(tree: Any) -> str:
    """Return a hash of nested dicts and lists, with tensors by their bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for path, leaf in _leaves(tree):
        digest.update(path.encode())
        if isinstance(leaf, np.ndarray):
            leaf = torch.from_numpy(np.ascontiguousarray(leaf).view(np.uint8))
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            digest.update(_bytes(_local(leaf)))
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()


def _leaves(tree: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for key in tree:
            yield from _leaves(tree[key], f"{path}/{key}")
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{place}")
    else:
        yield path, tree


def _local(value: Tensor) -> Tensor:
    value = value.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _bytes(value: Tensor) -> bytes:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def property_of(key: str) -> str:
    """Return the certificate's property that a batch key belongs to."""
    return _PROPERTIES.get(key.rpartition("/")[2], "masks")


@dataclass
class Step:
    """A finished training step.

    Attributes:
        number: counted from 1.
        rows: by property, a hash for each sample of the batch over all ranks, in order.
        losses: averages over the ranks, with the metrics of the training step.
        parameters: a hash of the weights after it, if recorded.
    """

    number: int
    rows: dict[str, str]
    losses: dict[str, float]
    parameters: str | None


@dataclass
class ProcessRecord:
    """The record of one process.

    Attributes:
        start: the step it resumed from; None if it ended before that.
        steps: its finished steps.
        end: hashes of the final state, if the process finished the run.
        coupled: the part of the method that couples samples; empty: none.
        first: when its first step began, in seconds of the machine's clock.
        seconds: duration of each of its steps.
    """

    start: int | None = None
    steps: list[Step] = field(default_factory=list)
    end: dict[str, Any] | None = None
    coupled: str = ""
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)


def read_record(paths: Sequence[Path]) -> ProcessRecord:
    """Return the record of a process from its ranks' files, rank 0 first.

    A step is finished when all ranks have written it.
    """
    ranks = [list(map(json.loads, _whole_lines(path))) for path in paths]
    record, begun_at = ProcessRecord(), 0.0
    for line in ranks[0]:
        if "start" in line:
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
        record.steps.append(_joined(number, [steps[number] for steps in by_rank]))
    return record


def _joined(number: int, lines: list[dict[str, Any]]) -> Step:
    rows = {name: "".join(line["rows"][name] for line in lines) for name in lines[0]["rows"]}
    losses = {name: float.fromhex(value) for name, value in lines[0]["losses"].items()}
    return Step(number, rows, losses, lines[0]["parameters"])


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file, without a last one cut off by a kill."""
    content = path.read_bytes() if path.exists() else b""
    return content.split(b"\n")[:-1]


def train_observed(job: Job) -> None:
    """Train as ``python -m pospre.train`` does, with an observer; exit with its code."""
    sys.exit(run_command(lambda: _train(job)))


def _train(job: Job) -> int:
    torch.set_num_threads(1)
    recipe = load_recipe(job.recipe, job.overrides)
    record = job.records[dist.get_global_rank()]
    observer = Observer(record, every_weight=job.every_weight, values=job.values)
    train(recipe, [observer])
    return 0
