"""What a Trainer, and a loop without Composer, refuse or set right by themselves."""

from typing import Any

import pytest
import torch
from composer import Trainer
from torch import nn
from torch.utils.data import DataLoader

import pospre
from pospre.algorithms.ema_teacher import EmaTeacher
from pospre.algorithms.mae import MAE
from pospre.arguments import check_arguments
from pospre.errors import UserError
from pospre.model.optimizer_checks import unfrozen
from pospre.model.progress import Progress
from tests.algorithms.cases import DECODER, Case, made, tiny_model
from tests.refusals import refuses

SMALL: dict[str, Any] = DECODER


def images(**numbers: Any) -> dict[str, torch.Tensor]:
    """Return a batch of four small images."""
    pixels = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    return pospre.from_images(pixels, **{"index": torch.arange(4), "epoch": 0, **numbers})


@pytest.mark.parametrize("fused", [False, True])
def test_a_teacher_that_never_follows_is_an_error(fused: bool) -> None:
    model = Case(("mae", "ema_teacher")).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)

    def step(follow: bool) -> None:
        batch = model.prepare(images(), 0.0)
        model.loss(model(batch), batch)["total"].backward()
        optimizer.step()
        if follow:
            model.after_step(0.0)

    for _ in range(3):
        step(follow=False)
    refuses(r"ema_teacher has a teacher .* model.after_step\(", lambda: step(follow=False))
    model.after_step(0.0)
    for follow in (True, False, False, False, False):  # once it was called, it is known
        step(follow)


def test_steps_that_keep_the_sum_of_the_weights_are_noticed() -> None:
    model = Case(("mae", "ema_teacher")).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)
    largest = max(model.encoder.parameters(), key=torch.Tensor.numel)
    signs = torch.tensor([1.0, -1.0]).repeat(largest.numel() // 2).view_as(largest)
    largest.data.copy_(signs / 2)
    largest.grad = signs  # its sum is 0, as it almost is beside a LayerNorm
    for _ in range(3):
        model.prepare(images(), 0.0)
        optimizer.step()
    refuses("never updated", lambda: model.prepare(images(), 0.0))


def test_a_rate_that_is_too_small_for_some_weights_is_no_mistake() -> None:
    model = Case(("mae",)).build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-8, fused=True)
    norm = model.encoder.get_parameter("norm.weight")
    before = norm.detach().clone()
    batch = model.prepare(images(), 0.0)
    model.loss(model(batch), batch)["total"].backward()
    optimizer.step()
    assert norm.equal(before), "a weight of 1 has moved"
    model.after_step(0.0)


@pytest.mark.parametrize("early", [False, True])
def test_without_a_teacher_after_step_need_not_be_called(early: bool) -> None:
    model = tiny_model(made("mae"))
    trained = model.encoder.parameters() if early else model.parameters()
    optimizer = torch.optim.SGD(trained, lr=0.1)

    def train() -> None:
        for _ in range(6):
            batch = model.prepare(images(), 0.0)
            model.loss(model(batch), batch)["total"].backward()
            optimizer.step()

    if not early:
        return train()
    refuses(r"19 tensors .*before making the optimiser", train)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda own: [*own, *own], r"algorithms.mae is given twice"),
        (lambda own: own[1:], r"algorithms.mae is part of .* not given; .*=model.algorithms"),
        (lambda own: [*own, made("droppos")], r"droppos is not part of the model. Make the model"),
    ],
)
def test_a_trainer_gets_the_algorithms_of_the_model(given: Any, said: str) -> None:
    model = Case(("mae", "ema_teacher")).build()
    with pytest.raises(UserError, match=said):
        Trainer(model=model, algorithms=given(model.algorithms), progress_bar=False, device="cpu")


def test_parts_are_made_where_the_encoder_is() -> None:
    model = pospre.PretrainModel(tiny_model().encoder.to("meta"), [made("mae")])
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"meta"}


def test_weights_of_a_head_depend_on_seed_and_method_alone() -> None:
    def head(*names: str, seed: int = 7) -> torch.Tensor:
        torch.manual_seed(seed)
        model = tiny_model(*map(made, names), seed=seed)
        return model.objectives["mae"].get_parameter("embed.weight")

    before = torch.get_rng_state()
    model = pospre.PretrainModel(tiny_model().encoder, [made("mae")])
    torch.manual_seed(0)
    tiny_model(made("droppos"))
    assert torch.equal(head("mae"), head("droppos", "mae"))
    assert torch.equal(head("mae", "ema_teacher", "droppos"), head("mae"))
    assert not torch.equal(head("mae"), head("mae", seed=8))
    assert model.seed == 0 and before.shape == torch.get_rng_state().shape


@pytest.mark.parametrize("kind", [torch.int32, torch.uint8])
def test_draws_are_the_same_of_any_whole_numbers(kind: torch.dtype) -> None:
    model = Case(("mae",)).build()
    expected = model.prepare(images(epoch=3), 0.0)["view/visible"]
    batch = images(epoch=3)
    batch.update({key: batch[key].to(kind) for key in ("index", "epoch")})
    assert torch.equal(model.prepare(batch, 0.0)["view/visible"], expected)


@pytest.mark.parametrize("value", [torch.rand(4), torch.arange(4)[:, None], [0, 1, 2, 3], 0])
def test_what_masks_cannot_be_drawn_from_is_said(value: Any) -> None:
    model = Case(("mae",)).build()
    with pytest.raises(UserError, match=r"the batch's 'index' is .* make it a tensor \(B,\)"):
        model.prepare({**images(), "index": value}, 0.0)


def test_a_wrapped_model_is_prepared_as_well() -> None:
    model = Case(("mae",)).of_one_block().build()

    class Wrapper(nn.Module):  # as DistributedDataParallel has it
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, *inputs: Any, **named: Any) -> Any:
            return self.module(*inputs, **named)

    wrappers: list[Any] = [Wrapper(), torch.compile(model, backend="eager")]
    for wrapped in wrappers:
        loss = wrapped(images(), progress=0.0).loss
        assert loss.item() == pytest.approx(model(images(), progress=0.0).loss.item())


@pytest.mark.parametrize("names", [("mae", "droppos"), ("supervised",), ("dinov2",)])
def test_a_trainer_evaluates_the_loss(names: tuple[str, ...]) -> None:
    model = Case(names).build()
    held_out = Case(names).batch(6)
    data = [{key: value[row] for key, value in held_out.items()} for row in range(6)]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=2),  # type: ignore[arg-type]
        eval_dataloader=DataLoader(data, batch_size=4),  # type: ignore[arg-type]
        optimizers=torch.optim.SGD(model.parameters(), lr=0.0),
        algorithms=model.algorithms,
        max_duration="1ep",
        progress_bar=False,
        device="cpu",
    )
    trainer.fit()
    model.eval()
    expected = []
    for rows in (slice(0, 4), slice(4, 6)):
        part = {key: value[rows] for key, value in held_out.items()}
        part = model.prepare(part, Progress(2 / 3, 0.0))
        expected.append(float(model.loss(model(part), part)["total"].detach()))
    found = {
        name: float(each.compute()) for name, each in trainer.state.eval_metrics["eval"].items()
    }
    assert found.keys() == {"loss/total", *(f"loss/{name}" for name in names)}
    assert found["loss/total"] == pytest.approx((4 * expected[0] + 2 * expected[1]) / 6, rel=1e-4)
    assert len(trainer.predict(DataLoader(data, batch_size=4))) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_trainer_warns_of_what_should_wait(epochs: int) -> None:
    model = Case(("dinov2",), options={"dinov2": {"freeze_epochs": epochs}}).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = [*unfrozen(model.layout, [optimizer])]
    optimizer.param_groups[0]["frozen"] = 1  # as that of pospre.train
    assert not [*unfrozen(model.layout, [optimizer])]
    assert len(said) == epochs and all("dinov2 freezes head.last" in s for s in said)


class Alone(MAE):
    """An algorithm of another package."""


def test_a_class_of_ones_own_has_its_own_name() -> None:
    own = Alone(**SMALL)
    model = tiny_model(own)
    assert model.algorithms == [own] and list(model.objectives) == ["Alone"]
    with pytest.raises(UserError, match=r"unknown key 'Alone.mask_rato'"):
        check_arguments("Alone", Alone, {"mask_rato": 0.5}, source="algorithms")
    assert "view/visible" in model.prepare(images(), 0.0)


class Averaged(EmaTeacher):
    """A second one in the same file."""


def test_the_teacher_of_a_class_of_ones_own_follows() -> None:
    model = tiny_model(Averaged(), Alone(**SMALL))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.prepare(images(), 0.0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.after_step(0.0)
    moved = {
        key for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert "teacher.module.norm.weight" in moved
