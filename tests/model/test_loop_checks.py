"""Parts that are attached too late, and mirrored images."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pospre
from pospre.errors import UserError
from tests.algorithms.cases import DECODER, Case, bare_model
from tests.model.test_sample_numbers import noise


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, fully_shard])
def test_what_is_attached_after_ddp_or_fsdp_is_refused(wrapper: Any, one_rank: None) -> None:
    model = bare_model()
    wrapped = wrapper(model)
    for name, options in (("mae", DECODER), ("ema_teacher", {}), ("stop", {}), ("crop_field", {})):
        with pytest.raises(UserError, match=rf"{name} is attached to a model that DDP .* first"):
            pospre.attach(model, name, **options)
    assert not list(model.objectives) and model.teacher is None
    del wrapped


def test_what_is_attached_before_is_prepared_under_ddp(one_rank: None) -> None:
    model = Case(("mae", "ema_teacher", "crop_field")).build()[0]
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    out = wrapped(Case(("mae", "crop_field")).batch(), progress=0.0)
    out.loss.backward()
    assert all(each.grad is not None for each in model.objectives.parameters())
    del wrapped
    model, _ = Case(("mae",)).build()
    wrapped = DistributedDataParallel(model)
    del wrapped  # it is gone: the model is one process's again
    pospre.attach(model, "ema_teacher")


def test_mirrored_images_are_upright_with_a_flip() -> None:
    images = noise(0)["view/image"][:, 0]
    mirrored = torch.tensor([True, False, True, False])
    shown = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    given: dict[str, Any] = {"index": torch.arange(4), "epoch": 0}
    given["boxes"] = torch.tensor([0.25, 0.0, 0.5, 0.5]).repeat(4, 1)
    batch = pospre.from_images(shown, mirrored=mirrored, **given)
    assert torch.equal(batch["view/image"][:, 0], images)
    assert torch.equal(batch["view/flip"][:, 0], mirrored)
    model = Case(("mae", "crop_field")).build()[0]
    batch = model.prepare(batch, 0.0)
    assert torch.equal(
        model.images(batch), model.augment(shown[:, None], torch.zeros(4, 1, dtype=torch.bool))
    )
    left, _, right, _ = batch["view/field_box"][:, 0].unbind(-1)
    assert torch.equal(left > right, mirrored)
    with pytest.raises(UserError, match=r"mirrored of torch.float32 and shape \(4,\)"):
        pospre.from_images(shown, mirrored=mirrored.float(), **given)
