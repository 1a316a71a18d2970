"""The loader under a Composer Trainer without a callback of ours."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer

from pospre.data.views.augment_options import Augment
from tests.algorithms.cases import Case
from tests.data.loading import VIEW, loader
from tests.data.two_ranks_loader import Mean, Record
from tests.refusals import refuses


def train(data: Path, stop: int, load_path: Path | None = None) -> tuple[Trainer, Record]:
    """Train three epochs of five batches, or until ``stop``; return who did and what was seen."""
    record, model = Record(stop), Mean()
    trainer = Trainer(
        model=model,
        train_dataloader=loader(data),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="3ep",
        callbacks=[record],
        load_path=None if load_path is None else str(load_path),
        device="cpu",
        progress_bar=False,
        run_name="plain",
    )
    trainer.fit()
    return trainer, record


@pytest.fixture(scope="module")
def whole(photos: Path) -> list[dict[str, Any]]:
    """What each step of three epochs was trained on."""
    return train(photos, 0)[1].seen


def test_each_epoch_is_another(whole):
    assert [step["epoch"] for step in whole] == [
        [epoch] * 4 for epoch in range(3) for _ in range(5)
    ]
    orders = [[step["index"] for step in whole[first : first + 5]] for first in (0, 5, 10)]
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("stop", [5, 12])
def test_a_resumed_run_sees_what_is_left(photos, whole, tmp_path, stop):
    first, before = train(photos, stop)
    first.save_checkpoint(str(tmp_path / "stopped.pt"))
    first.close()
    _, after = train(photos, 0, tmp_path / "stopped.pt")
    assert before.seen + after.seen == whole


def test_a_loop_of_several_ranks_warns_of_the_same_samples(photos, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.warns(UserWarning, match=r"2 ranks train together, but .* was made for 1"):
        iter(loader(photos))
    with warnings.catch_warnings(action="error"):
        iter(loader(photos, rank=1, world_size=2))
        iter(loader(photos, drop_last=False))  # of an evaluation


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rank": 1, "world_size": 2}, r"1 ranks train together, but .* made for 2, .*world_size"),
        ({"views": [replace(VIEW, augment=Augment(blur_rate=1.0))]}, "has another augment than"),
    ],
)
def test_a_trainer_refuses_a_loader_for_other_ranks_or_augments(photos, options, said):
    model = Case(("mae",)).build()
    trainer = Trainer(
        model=model,
        train_dataloader=loader(photos, **options),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=model.algorithms,
        max_duration="1ba",
        device="cpu",
        progress_bar=False,
    )
    refuses(said, trainer.fit)
