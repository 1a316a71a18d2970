"""Mistakes of a loop that train without an error: parts added too late, samples without number."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pospre
from pospre.errors import UserError
from tests.algorithms.cases import DECODER, Case, bare_model


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


def noise(step: int, **numbers: Any) -> pospre.batch.Batch:
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pospre.from_images(images, **{"index": torch.arange(4), "epoch": 0, **numbers})


@pytest.mark.parametrize("microbatches", [1, 2])
def test_an_index_that_starts_anew_in_every_batch_is_an_error(microbatches: int) -> None:
    model = Case(("mae", "droppos")).build()[0]

    def step(number: int) -> None:
        whole = noise(number)
        for rows in torch.arange(4).chunk(microbatches):
            model.prepare({k: v[rows] for k, v in whole.items()}, 0.0)

    for number in range(2):
        step(number)
    with pytest.raises(
        UserError, match=r"the same 'index' and 'epoch', .* position in the data set"
    ):
        step(2)


def test_an_epoch_of_two_such_batches_is_found_in_the_next() -> None:
    model = Case(("mae",)).build()[0]
    model.prepare({k: v[:2] for k, v in noise(9, epoch=7).items()}, 0.0)  # tried on two images
    for step in range(3):
        model.prepare(noise(step, epoch=step // 2), 0.0)
    with pytest.raises(
        UserError, match=r"the same 'index' and 'epoch', .* position in the data set"
    ):
        model.prepare(noise(3, epoch=1), 0.0)


def test_some_samples_that_come_twice_are_no_error() -> None:
    model = Case(("mae",)).build()[0]
    for step in range(5):  # of a sampler that fills its batches up, in any order
        model.prepare(noise(step, index=torch.tensor([3 * step, 0, 3 * step + 1, 1])), 0.0)


def test_numbers_that_count_are_no_error() -> None:
    model = Case(("mae",)).build()[0]
    for epoch in range(3):
        for step in range(3):
            index = torch.arange(4) + 4 * step
            model.prepare(noise(step, index=index, epoch=epoch), 0.0)
    for _ in range(4):  # one batch, again and again, to see whether it is learned
        model.prepare(noise(7, epoch=9), 0.0)
    model.eval()
    for step in range(4):
        model.prepare(noise(step), 0.0)


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
