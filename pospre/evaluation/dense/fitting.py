"""Training of heads for dense evaluations."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from pospre import draws
from pospre.errors import UserError
from pospre.evaluation.dense.maps import FeatureMaps
from pospre.evaluation.registry import Context
from pospre.training.optimizer.optim import parameter_groups


def fit(
    context: Context,
    title: str,
    batches: Iterable[Any],
    loss: Callable[[Any], Tensor],
    groups: Sequence[dict[str, Any]],
    rate: Callable[[float], float],
    iterations: int,
) -> float:
    """Train with AdamW; return the mean loss of the last tenth.

    Args:
        context: its progress setting, and its hook to stop early.
        title: of the progress bar.
        batches: one per iteration.
        loss: of a batch.
        groups: see ``trained_groups``.
        rate: the learning rate at a share of training in [0, 1), as a share of its peak.
        iterations: number of steps.

    Raises:
        UserError: the loss is not finite.
    """
    optimizer = torch.optim.AdamW(list(groups), betas=(0.9, 0.999))
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses: list[float] = []
    bar = tqdm(total=iterations, desc=title, unit="it", disable=not context.progress)
    with bar, torch.enable_grad():
        for step, batch in enumerate(batches):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate(step / iterations)
            value = loss(batch)
            losses.append(float(value.detach()))
            if not np.isfinite(losses[-1]):
                remedy = "lower lr=…" if step else "no rate helps; give a larger size=…"
                raise UserError(f"the loss is {losses[-1]} after {step} steps ({title}); {remedy}")
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
            context.go_on()
    return float(np.mean(losses[-max(1, iterations // 10) :]))


def trained_groups(
    maps: FeatureMaps, head: nn.Module, *, lr: float, weight_decay: float, layer_decay: float
) -> list[dict[str, Any]]:
    """Return the parameter groups: a head, and the encoder if it is fine-tuned.

    Args:
        maps: of the encoder.
        head: the module on top of it.
        lr: peak rate of the head.
        weight_decay: for all parameters except vectors.
        layer_decay: rate factor from each block of the encoder to the one below.
    """
    groups = parameter_groups(head, lr, weight_decay=weight_decay)
    if maps.finetune:
        groups += parameter_groups(
            maps.model, lr, weight_decay=weight_decay, layer_decay=layer_decay
        )
    return groups


def batches(
    samples: Dataset[Any],
    *,
    iterations: int,
    batch_size: int,
    num_workers: int,
    seed: int,
    collate: Callable[[list[Any]], Any] | None = None,
) -> DataLoader[Any]:
    """Return the training batches; samples are reshuffled every epoch.

    Args:
        samples: by (epoch, index).
        iterations: number of batches.
        batch_size: samples in each.
        num_workers: reading processes; 0 reads in the main process.
        seed: of the orders.
        collate: makes a batch from samples; None: stack their tensors.
    """
    size: int = len(samples)  # type: ignore[arg-type]  # ours have a length
    count = iterations * batch_size
    epochs = range(-(-count // size))
    places = [(epoch, int(index)) for epoch in epochs for index in draws.order(seed, epoch, size)]
    chunks = [places[at : at + batch_size] for at in range(0, count, batch_size)]
    return DataLoader(
        samples,
        batch_sampler=chunks,
        num_workers=num_workers,
        collate_fn=collate,
        worker_init_fn=_hush,
    )


def _hush(_: int) -> None:
    """Let a worker exit silently with its parent at Ctrl-C; errors go through the queue."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = lambda *_: None  # called by the thread that hands tensors over


@contextmanager
def seeded(
    seed: int, epoch: int, index: int, purpose: str, device: torch.device | None = None
) -> Iterator[None]:
    """Seed torch by (seed, epoch, index, purpose), and restore its state afterwards."""
    key = draws.sample_keys(seed, epoch, torch.tensor([index]), 0, purpose)
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(int(draws.bits(key, 1)[0, 0]))
        yield
