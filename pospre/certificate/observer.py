"""Writes down what every step of a training consumed and what came out of it."""

import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch import Tensor
from torch.distributed.tensor import DTensor

from pospre.certificate.records import property_of
from pospre.model.algorithm import PretrainAlgorithm
from pospre.training.callbacks.metrics import losses_of

_BREATH = 0.05  # seconds that a step takes at least, so that whoever kills can strike in it
_ROW_BYTES = 8  # of a sample's hash: enough to tell a few thousand samples apart


class Observer(Callback):
    """Appends a line to a file when training begins, at both ends of every step, and at the end.

    A step's line has one hash for each sample and property (ids, boxes, flips, masks, pixels: the
    batch as the model got it, after the algorithms' draws), the losses, and a hash of all weights
    after it. Each line is one write, so a kill leaves a half line at most.

    Args:
        path: the file of this rank and life.
        every_weight: hash the weights after every step; else only in the end.
        values: where to put the final weights, rank 0 only.
    """

    def __init__(self, path: Path, *, every_weight: bool, values: Path) -> None:
        self.every_weight = every_weight
        self.values = values
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._rows: dict[str, list[str]] = defaultdict(list)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Note after which step this life begins, and what makes ranks matter to the losses."""
        algorithms = (each for each in state.algorithms if isinstance(each, PretrainAlgorithm))
        asked = (algorithm.couples_samples() for algorithm in algorithms)
        self._write(start=state.timestamp.batch.value, coupled=" and ".join(filter(None, asked)))

    def batch_start(self, state: State, logger: Logger) -> None:
        """Note that a step begins: whoever ends this process knows where it is."""
        self._rows.clear()
        self._write(begun=state.timestamp.batch.value + 1)
        time.sleep(_BREATH)

    def after_forward(self, state: State, logger: Logger) -> None:
        """Hash the samples of a microbatch with all that was drawn for them."""
        found: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for key, value in state.batch.items():
            found[property_of(key)][key] = value
        for name, values in found.items():
            self._rows[name].extend(hash_rows(values))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Write the line of the step that is done."""
        self._write(
            step=state.timestamp.batch.value,
            rows={name: "".join(rows) for name, rows in self._rows.items()},
            losses={name: value.hex() for name, value in losses_of(state).items()},
            parameters=hash_tensors(state.model.state_dict()) if self.every_weight else None,
        )

    def fit_end(self, state: State, logger: Logger) -> None:
        """Note the final weights, optimiser and random state; keep the weights' values."""
        model = state.get_model_state_dict()
        optimizer = state.optimizers[0].state_dict()
        # Python's own generator is left out: boto draws its pauses from it
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
    """Return one hash for each sample over some keys of a batch: of types, shapes and bytes."""
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
    """Return a hash of everything in nested dicts and lists, tensors by their bytes."""
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
