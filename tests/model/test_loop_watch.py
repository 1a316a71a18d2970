"""Mistakes of a training loop without Composer, and loops that only look like them."""

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from composer import Callback, Trainer
from composer.core import State
from composer.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

import pospre
from pospre.errors import UserError
from pospre.model import loop_watch
from tests.algorithms.cases import Case, tiny_model
from tests.model.test_sample_numbers import noise
from tests.refusals import refuses

TOO_FAST = r"after_step was called 1\d times, but the weights have changed \d times"
TOO_EARLY = "before optimizer.step"
IN_EVAL = "trained in eval mode"


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Yield the warnings so far."""
    lines: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: lines.append(str(message))
        yield lines


def averaged() -> pospre.PretrainModel:
    """Return a small model with a teacher."""
    return Case(("mae", "ema_teacher")).of_one_block().build()


def batch_of(step: int) -> pospre.batch.Batch:
    """Return the four images of a step of the first epoch."""
    return noise(step, index=torch.arange(4) + 4 * step)


def play(model: pospre.PretrainModel, calls: str, **options: Any) -> None:
    """Run a loop: P prepares a batch, E one in eval mode, S is a step, A calls ``after_step``."""
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], 0.01)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    for number, call in enumerate(calls):
        progress = number / len(calls)
        if call == "S":
            optimizer.step()
        elif call == "A":
            model.after_step(progress)
        else:
            model.train(call == "P")
            model.prepare(batch_of(number), progress)


@pytest.mark.parametrize(
    ("calls", "error", "warning"),
    [
        ("PSAA" * 7, TOO_FAST, None),
        ("PPPPSAA" * 7, TOO_FAST, None),
        ("PAPAPAPAS" * 5, TOO_FAST, None),  # after each microbatch
        ("PAPSA" * 7, TOO_FAST, None),
        ("PAS" * 14, None, TOO_EARLY),
        ("PPAS" * 14, None, TOO_EARLY),
        ("ESA" * 3, None, IN_EVAL),
        ("PSA" * 14, None, None),
        ("PPPPSA" * 14, None, None),
        ("PSSA" * 14, None, None),  # two optimisers
        ("PS" + "PSA" * 14, None, None),
        ("PAPAPA" + "PSA" * 14, None, None),  # a loss scaler skips the first steps
        ("PSAPSAPA" * 6, None, None),
        ("PP" + "SAP" * 14 + "SASA", None, None),  # batches are prepared ahead
        ("P" + "SPA" * 14, None, None),
        ("EE" + "PSAEE" * 14, None, None),  # evaluations
        ("PSEEA" * 14, None, None),
        ("PA" * 70 + "PSAA" * 7, None, None),  # a learning rate of 0 for long
    ],
)
def test_after_step_is_called_once_after_each_optimiser_step(
    calls: str, error: str | None, warning: str | None, said: list[str]
) -> None:
    model = averaged()
    if error is None:
        play(model, calls)
    else:
        refuses(error, lambda: play(model, calls))
    assert [bool(warning and warning in line) for line in said] == [True] * bool(warning)


def test_without_a_teacher_only_eval_mode_matters(said: list[str]) -> None:
    for calls in ("PSAA" * 7, "PA" * 14, "PS" * 6 + "ES", "PPS" * 6):
        play(Case(("mae",)).of_one_block().build(), calls)
    assert not said
    play(Case(("mae",)).of_one_block().build(), "ES" * 6)
    assert len(said) == 1 and IN_EVAL in said[0] and "load_run" in said[0]


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (lambda step: step % 5 / 5, "has fallen from 0.8 to 0"),  # one epoch's, for every epoch
        (lambda step: 0.25, "is always 0.25"),
        (lambda step: step // 5 / 3, None),
        (lambda step: step / 15, None),
    ],
)
def test_progress_rises(
    progress: Callable[[int], float], words: str | None, said: list[str]
) -> None:
    model = averaged()
    for step in range(15):
        batch = noise(step, index=4 * (step % 5) + torch.arange(4), epoch=step // 5)
        model.prepare(batch, progress(step))
        if step % 5 == 4:  # an evaluation
            model.eval().prepare(noise(99), 0.0)
            model.train()
    assert len(said) == (words is not None)
    assert words is None or (
        words in said[0] and "(epoch + step / len(loader)) / epochs" in said[0]
    )


def test_after_step_gets_the_progress_too(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_watch, "_CONSTANT", 5)
    model = averaged()
    for step in range(6):
        model.prepare(batch_of(step), step / 6)
        model.after_step(0.0)
    assert len(said) == 1 and "after_step is always 0." in said[0]


@pytest.mark.parametrize("change", ["unfreeze", "add"])
def test_tensors_that_no_optimiser_holds_are_found_later_too(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "_BETWEEN", 2)
    model = averaged()
    bias = model.encoder.get_parameter("norm.bias").requires_grad_(False)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.01)

    def train(steps: int) -> None:
        for step in range(steps):
            model(batch_of(step), progress=0.5).loss.backward()
            optimizer.step()
            model.after_step(0.5)

    train(3)
    if change == "unfreeze":
        bias.requires_grad_(True)
    else:
        model.vit.norm.register_parameter("bias", nn.Parameter(torch.zeros_like(bias)))
    refuses(r"no optimiser trains them: .*Unfreeze or add", lambda: train(3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)  # a new one holds all
    train(3)


def test_a_trainer_looks_for_such_tensors_at_every_epoch() -> None:
    model = averaged()
    bias = model.encoder.get_parameter("norm.bias").requires_grad_(False)
    rows = [{key: value[row] for key, value in batch_of(0).items()} for row in range(4)]

    class Unfreezing(Callback):
        def epoch_end(self, state: State, logger: Logger) -> None:
            bias.requires_grad_(True)

    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),  # type: ignore[arg-type]
        optimizers=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01),
        algorithms=model.algorithms,
        callbacks=[Unfreezing()],
        max_duration="2ep",
        progress_bar=False,
        device="cpu",
    )
    refuses(r"1 tensors have a gradient, .*encoder.norm.bias", trainer.fit)
    assert trainer.state.timestamp.batch.value == 1


def test_weights_loaded_after_the_teacher_was_made_reach_it(said: list[str]) -> None:
    other = averaged().encoder

    def teacher_of(model: pospre.PretrainModel) -> torch.Tensor:
        assert model.teacher is not None
        return model.teacher.module.get_parameter("norm.weight")

    for load in (nn.Module.load_state_dict, None):
        model = averaged()
        before = teacher_of(model).clone()
        if load is not None:
            state = {key: value + 1 for key, value in other.state_dict().items()}
            model.encoder.load_state_dict(state)
        model.prepare(noise(0), 0.0)
        assert teacher_of(model).equal(before) is (load is None)
        assert teacher_of(model).equal(model.encoder.get_parameter("norm.weight"))
    assert len(said) == 1 and "since the teacher of algorithms.ema_teacher was copied" in said[0]

    trained = averaged()
    play(trained, "PSA" * 3)
    assert trained.teacher is not None
    model = averaged()
    model.load_state_dict(trained.state_dict())  # a resumed run, whose teacher differs
    edited = averaged()
    with torch.no_grad():
        teacher_of(edited).fill_(3)
    for each in (model, copy.deepcopy(trained), edited, copy.deepcopy(edited)):
        before = teacher_of(each).clone()
        each.prepare(noise(0), 0.0)
        assert teacher_of(each).equal(before)
    assert len(said) == 1


class Lora(nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(tokens) + self.up(self.down(tokens))


def test_parts_that_come_after_the_teacher_are_refused() -> None:
    model = Case(("ijepa",)).of_one_block().build()
    block: Any = model.encoder.get_submodule("blocks.0")
    block.mlp.fc1 = Lora(block.mlp.fc1)
    refuses(r"LoRA, before the model is made", lambda: model.prepare(noise(0), 0.0))
    refuses(r"tensors, but its teacher, copied before", lambda: model.after_step(0.0))


def test_an_encoder_is_not_exchanged() -> None:
    model = averaged()
    wrapped: Any = torch.compile(model.encoder, backend="eager")  # the same one
    model.encoder = wrapped
    model.prepare(noise(0), 0.0)
    model = averaged()
    model.encoder = averaged().encoder
    refuses(r"model.encoder was replaced .* Make a new model", lambda: model.prepare(noise(0), 0.0))


@pytest.mark.parametrize("change", ["weights", "frozen", None])
def test_changes_of_a_timm_model_after_it_was_copied_are_said(
    change: str | None, said: list[str]
) -> None:
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
    model = pospre.PretrainModel(vit, [pospre.MAE(decoder_depth=1, decoder_dim=32)], seed=0)
    if change == "weights":
        vit.load_state_dict({key: value + 1 for key, value in vit.state_dict().items()})
    elif change == "frozen":
        vit.blocks.requires_grad_(False)
    for step in range(2):
        model.prepare(batch_of(step), step / 2)
    assert len(said) == (change is not None)
    assert change is None or "the timm model has changed since it was copied" in said[0]
    vit.load_state_dict(model.timm_state(vit), strict=False)  # at the end of the training
    model.prepare(batch_of(2), 1.0)
    model.loop_watch.start(model)  # as a Trainer does
    assert len(said) == (change is not None)
    pickle.loads(pickle.dumps(model.encoder))


def test_a_plain_loop_warns_of_what_should_wait(said: list[str]) -> None:
    model = Case(("dinov2",)).build()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(3):
        model(Case(("dinov2",)).batch(), progress=step / 3).loss.backward()
        optimizer.step()
        model.after_step(step / 3)
    assert len(said) == 1 and "dinov2 freezes head.last for some epochs" in said[0]


def test_features_take_normalised_images() -> None:
    model = tiny_model()
    images = noise(0)["view/image"][:, 0]
    for wrong in (images, images.float()):
        with pytest.raises(UserError, match=r"from 0 to 255, .*model.augment.normalise\(images\)"):
            model.features(wrong, layers=[1])
    model.features(model.augment.normalise(images), layers=[1])
