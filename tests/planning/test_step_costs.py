"""What a plan counts over fake tensors is what real tensors do, for every method."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

from pospre.planning.counts import Counts, count
from pospre.planning.kernels import count_flops, fused
from pospre.planning.step_costs import FakeTraining, StepMemory
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.build import build_model
from pospre.training.data import build_views
from pospre.training.resolve import resolve
from tests.benchmarks.bench_methods import make_batch

DEMO = Path(__file__).parents[2] / "yamls/demo"
METHODS = ("mae", "simmim", "droppos", "mp3", "lut", "intertwined", "stop", "lejepa")


def recipe_of(method: str, depth: int = 2) -> Recipe:
    return resolve(load_recipe(DEMO / f"{method}.yaml", [f"encoder.depth={depth}"]))


def real_step(recipe: Recipe, size: int) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a real model and a prepared batch."""
    model = build_model(recipe).train()
    return model, model.prepare(make_batch(build_views(recipe), size, "cpu"), 0.5)


@pytest.mark.parametrize("method", METHODS)
def test_flops_are_those_of_real_tensors(method: str) -> None:
    recipe = recipe_of(method, depth=1)
    model, batch = real_step(recipe, 16)
    flops = count_flops(lambda: model.loss(model(batch), batch)["total"].backward())
    training = FakeTraining(recipe)
    fake = count_flops(partial(training.forward_backward, training.batch(16)))
    assert fake == pytest.approx(flops, rel=1e-6)


def test_products_are_what_the_profiler_counts_and_attention_comes_on_top() -> None:
    model, batch = real_step(recipe_of("mae"), 2)
    with profile(with_flops=True) as profiler, torch.no_grad():
        model(batch)
    products = sum(event.flops for event in profiler.key_averages())
    with torch.no_grad():
        counted = count_flops(lambda: model(batch))
    attention = 0
    decoder = model.objectives["mae"]
    kept, every = batch["view/visible"].shape[1] + 1, model.encoder.num_patches + 1
    for blocks, tokens, width in (
        (model.encoder.blocks, kept, model.encoder.embed_dim),
        (decoder.blocks, every, decoder.embed.out_features),
    ):
        attention += 2 * len(blocks) * 2 * 2 * tokens**2 * width
    assert counted == pytest.approx(products + attention, rel=1e-3)


@pytest.fixture(scope="module")
def ijepa() -> Counts:
    return count(recipe_of("ijepa"))


def test_activation_checkpointing_computes_trained_blocks_again_and_keeps_less(
    ijepa: Counts,
) -> None:
    counts = ijepa
    plain, again = counts.steps[False], counts.steps[True]
    student = sum(one.flops for one in counts.passes.values() if not one.teacher)
    assert plain.flops + 0.9 * student < again.flops < 4 / 3 * plain.flops
    kept, less = (one.memory.working(64, 1.0, accumulates=False) for one in (plain, again))
    assert less < 0.8 * kept


def test_memory_grows_with_the_microbatch_as_tracked(ijepa: Counts) -> None:
    training, line = FakeTraining(recipe_of("ijepa")), ijepa.steps[False].memory
    training.begin()
    tracked, work, _ = training.track(training.batch(48))
    alive = max(grads + working for grads, working in tracked.items())
    assert line.working(48, 1.0, accumulates=False) == pytest.approx(alive, rel=0.01)
    assert ijepa.steps[False].work(48) == fused(work.operators)


def test_gradients_of_earlier_microbatches_are_there_from_the_beginning() -> None:
    memory = StepMemory({0: (10.0, 2.0), 100: (5.0, 1.0)})
    assert memory.working(4, 1.0, accumulates=False) == 109
    assert memory.working(4, 1.0, accumulates=True) == 118
    assert memory.working(4, 0.0, accumulates=True) == 18


def test_parameters_are_those_of_the_model(ijepa: Counts) -> None:
    counts = ijepa
    model, _ = real_step(recipe_of("ijepa"), 2)
    trained = sum(one.numel() for one in model.parameters() if one.requires_grad)
    every = sum(one.numel() for one in model.parameters())
    assert counts.parameters.trained == trained and counts.parameters.frozen == every - trained
    assert sum(counts.parts.values()) == pytest.approx(every, rel=0.01)
    assert counts.optimizer_bytes == pytest.approx(8 * trained, rel=0.01)
    block = sum(one.numel() for one in model.encoder.blocks[0].parameters())
    assert block < counts.parameters.unit_trained <= trained


def test_every_pass_is_counted() -> None:
    """Also one that begins with a module that is given a parameter, here the table of positions."""
    counts = count(recipe_of("intertwined", depth=1))
    forward = [one.flops for one in counts.passes.values()]
    assert min(forward) > 0 and counts.steps[False].flops > sum(forward)
