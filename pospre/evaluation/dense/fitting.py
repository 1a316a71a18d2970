"""Training of heads for dense evaluations."""

import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from pospre import draws
from pospre.errors import UserError
from pospre.evaluation.dense.maps import FeatureMaps
from pospre.evaluation.dense.settings import Detection, Segmentation
from pospre.evaluation.registry import Context
from pospre.training.optimizer.optim import parameter_groups


class Fit(NamedTuple):
    """How long a head is trained, and on which batches."""

    iterations: int
    batch_size: int
    num_workers: int
    seed: int


def adamw(
    maps: FeatureMaps,
    head: nn.Module,
    rate: Callable[[float], float],
    settings: Detection | Segmentation,
    *,
    lr: float,
    weight_decay: float,
) -> tuple[Optimizer, LRScheduler]:
    """Return AdamW for a head, and for the encoder if it is fine-tuned, with its schedule.

    ``rate`` gives the learning rate at a share of training in [0, 1), as a share of ``lr``. Vectors
    have no weight decay.
    """
    groups = parameter_groups(head, lr, weight_decay=weight_decay)
    if maps.finetune:
        groups += parameter_groups(
            maps.model, lr, weight_decay=weight_decay, layer_decay=settings.layer_decay
        )
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.999))
    return optimizer, LambdaLR(optimizer, lambda step: rate(step / settings.iterations))


def train_head(
    context: Context,
    title: str,
    optimizer: Optimizer,
    schedule: LRScheduler,
    samples: Dataset[Any],
    loss: Callable[[Any], Tensor],
    settings: Fit | Detection | Segmentation,
    *,
    clip: float = math.inf,
    collate: Callable[[list[Any]], Any] | None = None,
) -> float:
    """Train a head, and the encoder if it is fine-tuned; return the loss of the last tenth.

    Samples are asked by (epoch, index) and reshuffled every epoch; without ``collate`` their
    tensors are stacked. ``clip`` is the largest norm of the gradient.
    """
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    losses: list[float] = []
    batches = _batches(samples, settings, collate)
    bar = tqdm(batches, title, unit="it", disable=not context.progress)
    with torch.enable_grad():
        for step, batch in enumerate(bar):
            value = loss(batch)
            losses.append(float(value.detach()))
            if not np.isfinite(losses[-1]):
                remedy = "lower lr=…" if step else "no rate helps; give a larger size=…"
                raise UserError(f"the loss is {losses[-1]} after {step} steps ({title}); {remedy}")
            optimizer.zero_grad()
            value.backward()
            if clip < math.inf:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
            schedule.step()
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            context.go_on()
    return float(np.mean(losses[-max(1, settings.iterations // 10) :]))


def _batches(
    samples: Dataset[Any],
    settings: Fit | Detection | Segmentation,
    collate: Callable[[list[Any]], Any] | None,
) -> DataLoader[Any]:
    size: int = len(samples)  # type: ignore[arg-type]  # ours have a length
    seed, batch_size = settings.seed, settings.batch_size
    count = settings.iterations * batch_size
    epochs = range(-(-count // size))
    keys = [(epoch, int(index)) for epoch in epochs for index in draws.order(seed, epoch, size)]
    return DataLoader(
        samples,
        batch_sampler=[keys[at : at + batch_size] for at in range(0, count, batch_size)],
        num_workers=settings.num_workers,
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
