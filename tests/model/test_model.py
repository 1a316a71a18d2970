"""The frame: who writes what, bf16, discovery of algorithms."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import timm
import torch
from composer.core import Event, State, Time, Timestamp
from composer.loggers import Logger

from pospre.algorithms.crop_field import CropField
from pospre.algorithms.droppos import DropPos
from pospre.algorithms.ema_teacher import EmaTeacher
from pospre.algorithms.mae import MAE
from pospre.data.views.options import ViewGroup
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class, algorithm_names
from pospre.model.model import PretrainModel
from pospre.model.progress import Progress, training_progress
from pospre.nn.positions import SCHEMES
from tests.algorithms.cases import DECODER, made, random_views, tiny_model
from tests.refusals import refuses

SMALL: dict[str, Any] = DECODER


@pytest.fixture
def attached():
    model = tiny_model(made("droppos"), made("mae"))
    return model, model.draw(random_views())


def test_total_is_the_weighted_sum_and_metrics_carry_no_gradient(attached):
    model, inputs = attached
    terms = model.loss(model(inputs), inputs)
    losses = [terms[name] * model.objectives[name].weight for name in model.objectives]
    torch.testing.assert_close(terms["total"], torch.stack(losses).sum())
    assert not any(value.requires_grad for key, value in terms.items() if "metric/" in key)


def test_under_autocast_a_pass_without_gradient_takes_none_from_the_others(attached):
    model, inputs = attached
    reverse = dict(reversed(model.layout.passes.items()))
    model.layout = replace(model.layout, passes=reverse)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []


def test_algorithms_are_found_by_module_name():
    assert {"mae", "droppos"} <= set(algorithm_names())
    assert algorithm_class("mae") is MAE and algorithm_class("droppos") is DropPos
    for name in algorithm_names():
        assert issubclass(algorithm_class(name), PretrainAlgorithm)


def test_unknown_algorithm_is_suggested():
    refuses(r"'dropos' is not known\. Did you mean 'droppos'", lambda: algorithm_class("dropos"))


@pytest.mark.parametrize(
    ("duration", "expected"),
    [
        ("4ep", Progress(step=13 / 40, epoch=1 / 4, num_steps=40)),
        ("40ba", Progress(step=13 / 40, epoch=10 / 40, num_steps=40)),
    ],
)
def test_progress_counts_steps_within_an_epoch(duration, expected):
    state = SimpleNamespace(
        timestamp=Timestamp(epoch=1, batch=13, batch_in_epoch=3),
        max_duration=Time.from_timestring(duration),
        dataloader_len=Time.from_batch(10),
    )
    state.get_elapsed_duration = partial(State.get_elapsed_duration, cast(State, state))
    progress = training_progress(cast(State, state))
    assert progress == pytest.approx(expected)


def test_progress_is_zero_before_the_duration_is_known():
    state = SimpleNamespace(
        max_duration=None, timestamp=Timestamp(), get_elapsed_duration=lambda: None
    )
    assert training_progress(cast(State, state)) == Progress(0.0, 0.0)


def test_before_a_forward_sigma_is_set_and_masks_are_written():
    algorithm = DropPos(sigma_start=2.0, sigma_end=1.0, **SMALL)
    model: Any = tiny_model(algorithm)
    state = SimpleNamespace(
        model=model,
        algorithms=[algorithm],
        batch=random_views(),
        timestamp=Timestamp(epoch=2, batch=20),
        max_duration=Time.from_timestring("4ep"),
        dataloader_len=Time.from_batch(10),
    )
    state.get_elapsed_duration = partial(State.get_elapsed_duration, cast(State, state))
    algorithm.apply(Event.BEFORE_FORWARD, cast(State, state), cast(Logger, None))
    assert model.objectives["droppos"].sigma.item() == 1.5
    assert {"view/visible", "droppos/known"} <= set(state.batch)


def test_a_model_of_several_groups_of_crops_can_be_evaluated_on_whole_views():
    views = {name: ViewGroup(name=name, size=32) for name in ("global", "local")}
    model, batch = tiny_model(views=views), random_views()
    with pytest.raises(KeyError):
        model.images(batch)
    model.eval()
    expected = tiny_model().eval().images(batch)
    assert torch.equal(model.images(batch), expected)


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_timm_takes_the_positions_that_an_algorithm_gave(no_embed_class: bool) -> None:
    kind: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 1}
    kind["no_embed_class"] = no_embed_class
    vit: Any = timm.create_model("vit_tiny_patch16_224", num_classes=0, **kind)
    model = PretrainModel(vit, [EmaTeacher(), CropField(), made("mae")], seed=0)
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.add_(0.01)
    state = model.timm_state(vit)
    length = state["pos_embed"].shape[1]
    vit.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    expected = model.eval().encoder(images)
    torch.testing.assert_close(vit.eval().forward_features(images), expected, rtol=1e-3, atol=1e-4)
    assert model.teacher is not None
    encoders: list[Any] = [model.encoder, model.teacher.module]
    for encoder in encoders:  # each is whole: it holds the field itself
        assert encoder.positions.grid == (50, 50)
        assert encoder.timm_state(vit)["pos_embed"].shape[1] == length
    torch.testing.assert_close(encoders[0](images), expected)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "relative" not in name])
def test_features_are_the_patches_of_each_layer_normalised(scheme: str) -> None:
    """Also in training mode, of another size, without prefix tokens."""
    model = tiny_model(positions=scheme, num_registers=2, depth=2)
    images = torch.randn(2, 3, 48, 16)
    first, last = model.features(images, layers=(1, 2))
    assert first.shape == last.shape == (2, 12, model.encoder.embed_dim)
    assert torch.equal(last, model.encoder(images)[:, 3:])
    before = model.encoder(images, layers=[1])[0]
    assert torch.equal(first, model.vit.norm(before)[:, 3:])


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        (1, r"takes a list: \[1\]"),
        ([3], "layer 3, .* 2 blocks"),
        (["1"], "layer '1'"),
        ([0.5], "0.5"),
    ],
)
def test_layers_that_do_not_exist_are_named(layers: Any, words: str) -> None:
    refuses(words, lambda: tiny_model(depth=2).features(torch.randn(1, 3, 32, 32), layers=layers))
