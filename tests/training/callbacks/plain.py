"""Training under a plain Composer Trainer, with nothing of a recipe."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback
from composer.loggers import InMemoryLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pospre.model.model import PretrainModel
from tests.algorithms.cases import Case


class Rows(Dataset[dict[str, Tensor]]):
    """The samples of a batch."""

    def __init__(self, batch: dict[str, Tensor]) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch["index"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {key: value[row] for key, value in self.batch.items()}


def fit(
    case: Case,
    *,
    steps: int,
    built: PretrainModel | None = None,
    callbacks: Sequence[Callback] = (),
    algorithms: Sequence[Algorithm] = (),
    lr: float = 1e-3,
    batch: dict[str, Tensor] | None = None,
    loader: Iterable[Any] | None = None,
) -> dict[str, list[float]]:
    """Train a small model on batches of 8 and return what was logged, by name and in order."""
    model = case.build() if built is None else built
    rows = Rows(case.batch(16) if batch is None else batch)
    logger = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=8) if loader is None else loader,
        optimizers=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=lr),
        algorithms=[*model.algorithms, *algorithms],
        callbacks=list(callbacks),
        loggers=[logger],
        max_duration=f"{steps}ba",
        progress_bar=False,
        device="cpu",
    )
    try:
        trainer.fit()
    finally:
        trainer.close()
    return {name: [float(v) for _, v in found] for name, found in logger.data.items()}
