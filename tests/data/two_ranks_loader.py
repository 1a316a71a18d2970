"""Run by ``composer -n 2``: trains two epochs on a ``.beton`` and says what each rank was given.

Arguments: the ``.beton``, a rank's batch size, the folder for the answers, and after how many steps
to stop, save, and go on with another trainer.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from composer import Callback, DataSpec, Logger, State, Time, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor, nn

from pospre.data.loader import build_loader
from pospre.data.views.options import ViewGroup
from pospre.training.data import LoaderPosition


class Mean(ComposerModel):
    """The mean of a view's pixels, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Return a number."""
        return self.weight * batch["view/image"].float().mean() / 255

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Return the number."""
        return outputs


class Record(Callback):
    """Notes what each step was trained on; stops after some steps, as a time limit would."""

    def __init__(self, stop: int) -> None:
        self.seen: list[dict[str, Any]] = []
        self.stop = stop

    def batch_start(self, state: State, logger: Logger) -> None:
        """Note the batch."""
        keys = ("index", "epoch", "label", "view/box", "view/flip")
        noted: dict[str, Any] = {key: state.batch[key].tolist() for key in keys}
        self.seen.append({**noted, "pixels": int(state.batch["view/image"].long().sum())})

    def batch_end(self, state: State, logger: Logger) -> None:
        """Stop when it is time to."""
        if state.timestamp.batch.value == self.stop:
            state.max_duration = Time.from_batch(self.stop)


def train(record: Record, load_path: str | None) -> None:
    path, batch_size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    loader = build_loader(
        path,
        views=[ViewGroup(size=16, count=2)],
        batch_size=batch_size,
        seed=5,
        num_workers=2,
        rank=dist.get_global_rank(),
        world_size=dist.get_world_size(),
    )
    model = Mean()
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(loader, get_num_samples_in_batch=lambda b: len(b["index"])),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="2ep",
        callbacks=[LoaderPosition(loader), record],
        load_path=load_path,
        device="cpu",
        progress_bar=False,
        run_name="two-ranks",
    )
    trainer.fit()
    trainer.save_checkpoint(str(folder / "stopped.pt"))
    trainer.close()


def main() -> None:
    folder, stop = Path(sys.argv[3]), int(sys.argv[4])
    dist.initialize_dist("cpu", timeout=60)
    record = Record(stop)
    train(record, None)
    dist.barrier()
    record.stop = 0
    train(record, str(folder / "stopped.pt"))
    (folder / f"rank{dist.get_global_rank()}.json").write_text(json.dumps(record.seen))


if __name__ == "__main__":
    main()
