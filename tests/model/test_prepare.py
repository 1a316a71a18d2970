"""A model under DDP, and mirrored images."""

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import pospre
from pospre.errors import UserError
from tests.algorithms.cases import Case
from tests.model.test_sample_numbers import noise


def test_batches_are_prepared_under_ddp(one_rank: None) -> None:
    model = Case(("mae", "ema_teacher", "crop_field")).build()
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    out = wrapped(Case(("mae", "crop_field")).batch(), progress=0.0)
    out.loss.backward()
    assert all(each.grad is not None for each in model.objectives.parameters())


def test_mirrored_images_are_upright_with_a_flip() -> None:
    images = noise(0)["view/image"][:, 0]
    mirrored = torch.tensor([True, False, True, False])
    shown = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    given: dict[str, Any] = {"index": torch.arange(4), "epoch": 0}
    given["boxes"] = torch.tensor([0.25, 0.0, 0.5, 0.5]).repeat(4, 1)
    batch = pospre.from_images(shown, mirrored=mirrored, **given)
    assert torch.equal(batch["view/image"][:, 0], images)
    assert torch.equal(batch["view/flip"][:, 0], mirrored)
    model = Case(("mae", "crop_field")).build()
    batch = model.prepare(batch, 0.0)
    assert torch.equal(
        model.images(batch), model.augment(shown[:, None], torch.zeros(4, 1, dtype=torch.bool))
    )
    left, _, right, _ = batch["view/field_box"][:, 0].unbind(-1)
    assert torch.equal(left > right, mirrored)
    with pytest.raises(UserError, match=r"mirrored of torch.float32 and shape \(4,\)"):
        pospre.from_images(shown, mirrored=mirrored.float(), **given)
