"""A step without Composer: ``out = model(batch, progress=t)``, ``out.loss``, ``after_step``."""

from typing import Any

import pytest
import timm
import torch
from composer import Trainer
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import pospre
from pospre import MAE, DropPos, EmaTeacher, PretrainModel
from pospre.model.objective import StepOutputs
from tests.algorithms.cases import DECODER

SMALL: dict[str, Any] = DECODER


def made() -> PretrainModel:
    """Return a model of timm's ViT with three algorithms, given in any order."""
    torch.manual_seed(0)
    vit: Any = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1)
    return PretrainModel(vit, [DropPos(weight=0.05, **SMALL), EmaTeacher(), MAE(**SMALL)], seed=0)


def images(step: int = 0) -> pospre.batch.Batch:
    generator = torch.Generator().manual_seed(step)
    pixels = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return pospre.from_images(pixels, index=torch.arange(4) + 4 * step, epoch=0)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, each in model.named_parameters():
        if each.grad is not None:
            whole = each.grad.full_tensor() if isinstance(each.grad, DTensor) else each.grad
            found[name.removeprefix("module.")] = whole
    return found


def test_a_step_is_that_of_its_parts() -> None:
    model, twin = made(), made()
    assert [type(each) for each in model.algorithms] == [MAE, DropPos, EmaTeacher]
    out = model(images(), progress=0.25)
    batch = twin.prepare(images(), 0.25)
    parts = twin(batch)
    terms = twin.loss(parts, batch)
    assert isinstance(out, StepOutputs) and not isinstance(parts, StepOutputs)
    assert out.keys() == parts.keys() == {"mae", "droppos", "features"}
    assert torch.equal(out["mae"]["predicted"], parts["mae"]["predicted"])
    assert out.loss.item() == terms["total"].item() and out.terms.keys() == terms.keys()
    assert out.loss.item() == pytest.approx(
        out.terms["mae"].item() + 0.05 * out.terms["droppos"].item()
    )
    out.loss.backward()
    terms["total"].backward()
    found, expected = gradients(model), gradients(twin)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_loop_trains_and_its_teacher_follows() -> None:
    model = made()
    assert model.teacher is not None
    before = {key: value.clone() for key, value in model.teacher.state_dict().items()}
    optimizer = torch.optim.AdamW(pospre.parameter_groups(model, lr=1e-3))
    losses = []
    for step in range(6):
        out = model(images(), progress=step / 6)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        model.after_step(step / 6)
        losses.append(out.terms["mae"].item())
    assert losses[-1] < losses[0]
    after = model.teacher.state_dict()
    assert any(not torch.equal(after[key], value) for key, value in before.items())


def test_under_a_trainer_the_same_model_takes_the_same_step() -> None:
    rows = [{key: value[row] for key, value in images().items()} for row in range(4)]
    by_loop, by_trainer = made(), made()
    Trainer(
        model=by_trainer,
        train_dataloader=DataLoader(rows, batch_size=4),  # type: ignore[arg-type]
        optimizers=torch.optim.SGD(by_trainer.parameters(), lr=0.1),
        algorithms=by_trainer.algorithms,
        max_duration="1ba",
        progress_bar=False,
        device="cpu",
    ).fit()
    optimizer = torch.optim.SGD(by_loop.parameters(), lr=0.1)
    by_loop(images(), progress=0.0).loss.backward()
    optimizer.step()
    by_loop.after_step(0.0)
    found = by_trainer.state_dict()
    for key, value in by_loop.state_dict().items():
        torch.testing.assert_close(found[key], value, msg=key)


@pytest.mark.parametrize("kind", ["ddp", "static", "fsdp2"])
def test_a_spread_model_has_the_same_gradients(kind: str, one_rank: None) -> None:
    alone, spread = made(), made()
    wrapped: nn.Module = spread
    if kind == "fsdp2":
        for block in spread.vit.blocks:
            fully_shard(block)
        fully_shard(spread)
    else:
        wrapped = DistributedDataParallel(spread, static_graph=kind == "static")
    alone(images(), progress=0.5).loss.backward()
    wrapped(images(), progress=0.5).loss.backward()
    expected, found = gradients(alone), gradients(spread)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, msg=key)


def test_a_compiled_step_is_compiled_once() -> None:
    model = made()
    compiled: Any = torch.compile(model, backend="eager")
    expected = made()(images(), progress=0.0).loss.item()
    counters.clear()
    losses = [compiled(images(step), progress=step / 4).loss.item() for step in range(2)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    once = counters["stats"]["calls_captured"]
    losses += [compiled(images(step), progress=step / 4).loss.item() for step in (2, 3)]
    assert counters["stats"]["calls_captured"] == once > 0 and len({*losses}) == 4
