"""``python -m pospre.plan``: the whole command, what follows from more GPUs, and bad input."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pospre.errors import run_command
from pospre.plan import main
from pospre.planning import estimate as estimating
from pospre.planning.counts import Counts, Parameters, count
from pospre.planning.estimate import Choice
from pospre.planning.estimate import plan as estimate
from pospre.planning.gpus import GIB, GPUS, IMAGENET, Assumptions, Machine
from pospre.planning.kernels import floor_seconds, fused
from pospre.planning.layouts import Held, Layout, StepTime, bus_bandwidth, layouts
from pospre.planning.text import as_json, render
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.build import build_components
from pospre.training.callbacks.stop_signals import StopSignals
from pospre.training.scale.fsdp import build_sharding
from pospre.training.train import build_trainer
from tests.benchmarks.gpu_count import traced

YAMLS = Path(__file__).parents[2] / "yamls"
SMALL = [str(YAMLS / "demo/ijepa.yaml"), "data.path=nowhere", "encoder.depth=1"]
NO_TIME = StepTime(0, 0, 0, 0)
Command = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True, scope="module")
def counted_once() -> Iterator[None]:
    """Count what is trained once: most of these plans differ in data, batch and GPUs only."""
    known: dict[str, Counts] = {}

    def once(recipe: Recipe, *stage: Any) -> Counts:
        if recipe.stages:
            return count(recipe, *stage)
        views, trainer = recipe.data.views, recipe.trainer
        key = f"{recipe.encoder} {recipe.algorithms} {views} {trainer.precision} {trainer.compile}"
        if key not in known:
            known[key] = count(recipe)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimating, "count", once)
        yield


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str]:
        code = run_command(lambda: main(arguments))
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return run


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    output = tmp_path_factory.mktemp("plan") / "plan.json"
    given = ["--gpus", "16", "--gpu", "a10g", "--nodes", "2", "--price-per-gpu-hour", "2"]
    assert main([*SMALL, "data.batch_size=256", *given, "--output", str(output)]) == 0
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def test_the_text_says_everything(plan: Command) -> None:
    code, said = plan(*SMALL, "data.batch_size=64", "--gpus", "8", "--gpu", "h100")
    assert code == 0
    for words in ("FLOPs per image", "teacher", "Memory by microbatch", "trainer.microbatch_size="):
        assert words in said
    assert f"{IMAGENET} images (assumed" in said and "--decode-rate" in said
    assert "Measured: nothing of this method and encoder on one NVIDIA H100" in said


def test_every_stage_has_its_cost(plan: Command, tmp_path: Path) -> None:
    large = "{train: {norms: true}, sizes: {view: 324}}"
    stages = f"stages=[{{until: .5, train: heads}}, {{until: .9, train: all}}, {large}]"
    given = [*SMALL, "encoder.weights=w.pth", "--gpus", "1", "--gpu", "a10g", "--images", "32000"]
    out = tmp_path / "plan.json"
    code, said = plan(*given, stages, "--output", str(out))
    assert code == 0 and "Stages; all above" in said and "heads" in said, said
    found = json.loads(out.read_text())
    heads, every, grown = found["stages"]
    assert heads["steps"] + every["steps"] + grown["steps"] == found["steps"]
    assert heads["trained"] < grown["trained"] < every["trained"]
    assert heads["flops"] < every["flops"] < grown["flops"] and "true} at 324 px (view)" in said
    # what must fit, and is planned, is the largest
    assert heads["time"] < every["time"] < grown["time"]
    assert grown["time"] == pytest.approx(found["best"]["seconds"]["total"])
    seconds = sum(one["time"] * one["steps"] for one in found["stages"])
    assert found["best"]["days"] * 86400 == pytest.approx(seconds)
    code, said = plan(*given, stages.replace("heads", "{last: 9}"))
    assert code == 2 and "stages.0.train.last = 9" in said
    code, said = plan(*given, stages.replace("324", "320"))
    assert code == 2 and "stages.2.sizes = {view: 320}: encoder.image_size = 320 is not" in said


def test_what_was_measured_stands_beside_what_is_predicted() -> None:
    few = ["encoder.depth=1", "algorithms.mae.decoder_depth=1", "data.batch_size=8"]
    recipe = load_recipe(YAMLS / "pretrain/mae_vitb16.yaml", ["data.path=nowhere", *few])
    planned = estimate(recipe, Machine(GPUS["h100"], 1, 1), Assumptions())
    found = as_json(planned)["measured"]
    rates = [one["images_per_s"] for one in found]
    assert rates == sorted(rates, reverse=True)
    assert {"eager", "compiled"} <= {one["setting"] for one in found}
    (row,) = [line for line in render(planned).splitlines() if line.startswith("compiled  ")]
    assert row.split()[1:] == ["plain", "256", "4583", "2026-11-23"]


def test_what_is_best_fits_and_is_not_slower_than_others(planned: dict[str, Any]) -> None:
    best = planned["best"]
    assert best["fits"] and best in planned["choices"]
    fitting = [one for one in planned["choices"] if one["fits"]]
    fastest = min(one["seconds"]["total"] for one in fitting)
    assert best["seconds"]["total"] <= 1.03 * fastest
    assert {one["layout"] for one in planned["choices"]} == {"DDP", "HSDP", "FSDP2"}
    for one in planned["choices"]:
        parts = {name: value for name, value in one["bytes"].items() if name != "total"}
        assert one["bytes"]["total"] == pytest.approx(sum(parts.values()))
        assert min(parts.values()) >= 0
        assert one["fits"] == (one["bytes"]["total"] <= GPUS["a10g"].memory)


def test_a_microbatch_that_changes_the_loss_is_warned_of_in_one_line() -> None:
    given = [*SMALL[1:], "data.batch_size=64", "algorithms.droppos.temperature=0.1"]
    recipe = load_recipe(YAMLS / "demo/droppos.yaml", given)
    whole = estimate(recipe, Machine(GPUS["a10g"], 1, 1), Assumptions())
    assert whole.best.microbatch == 64 and "warning" not in render(whole)
    part = replace(whole, best=next(one for one in whole.choices if one.microbatch == 16))
    (warning,) = [line for line in render(part).splitlines() if "warning" in line]
    assert (
        "= 16 of a rank's 64: the weights of patches of droppos see 16 samples at once" in warning
    )
    assert as_json(part)["warning"] in warning


@pytest.mark.parametrize("fsdp", ["null", "{shard_degree: 4}"])
def test_keys_of_every_setting_load_and_are_what_is_trained(
    image_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fsdp: str
) -> None:
    given = [*SMALL[2:], f"data.path={image_folder()}", "data.batch_size=8", "trainer.device=cpu"]
    given += [f"trainer.run_folder={tmp_path}", f"trainer.fsdp={fsdp}"]
    for layout in layouts(8, 2):
        for checkpointing, microbatch in ((False, 8), (True, 2)):
            choice = Choice(layout, checkpointing, microbatch, Held(*[0.0] * 8), NO_TIME)
            recipe = load_recipe(SMALL[0], [*given, *choice.keys(8)])
            assert recipe.trainer.activation_checkpointing is checkpointing
            with monkeypatch.context() as patched:
                patched.setattr("pospre.training.scale.fsdp.dist.get_world_size", lambda: 8)
                sharding = build_sharding(recipe.trainer.fsdp)
            assert (sharding is not None) == (layout.shards > 1)
            if sharding is not None:
                assert (sharding.num_copies or 1) == layout.replicas
            if layout.name != "HSDP":  # which one rank cannot be
                trainer = build_trainer(build_components(recipe), signals=StopSignals())
                trainer.engine.close()
                assert trainer.state.device_train_microbatch_size == microbatch


def test_length_and_cost_follow_from_the_step(planned: dict[str, Any]) -> None:
    best, steps = planned["best"], planned["steps"]
    seconds = steps * best["seconds"]["total"]
    assert best["gpu_hours"] == pytest.approx(16 * seconds / 3600)
    assert best["cost"] == pytest.approx(2 * best["gpu_hours"])
    node = planned["loader_of_a_node"]
    assert node["images_per_s"] == pytest.approx(best["images_per_s"] / 2)
    assert node["cores"] == pytest.approx(node["images_per_s"] / node["decode_rate"])


def test_sharding_divides_what_is_held_and_smaller_microbatches_hold_less(
    planned: dict[str, Any],
) -> None:
    by = {
        (one["layout"], one["activation_checkpointing"], one["microbatch"]): one["bytes"]
        for one in planned["choices"]
    }
    for kind in ("weights", "teacher", "gradients", "optimizer"):
        whole = by["DDP", False, 16][kind]
        assert by["FSDP2", False, 16][kind] == pytest.approx(whole / 16)
        assert by["HSDP", False, 16][kind] == pytest.approx(whole / 8)
    assert by["DDP", False, 16]["total"] > by["DDP", False, 4]["total"]
    assert by["DDP", False, 16]["total"] > by["DDP", True, 16]["total"]


@pytest.mark.parametrize("compiled", [True, False])
def test_time_is_the_floor_of_the_counted_step_over_the_efficiency(compiled: bool) -> None:
    given = [*SMALL[1:], "data.batch_size=64", "trainer.precision=amp_bf16"]
    given += [] if compiled else ["trainer.compile=false"]
    recipe, gpu = load_recipe(YAMLS / "demo/mae.yaml", given), GPUS["h100"]
    planned = estimate(recipe, Machine(gpu, 1, 1), Assumptions(efficiency=0.4))
    (whole,) = [one for one in planned.choices if one.microbatch == 64 and not one.checkpointing]
    work, update = traced(recipe, 64)
    kernels = fused(work.operators) if compiled else work.kernels
    floor = floor_seconds([*kernels, *update.kernels], gpu)
    assert whole.time.total == pytest.approx(floor / 0.4, rel=1e-6)
    halves = next(one for one in planned.choices if one.microbatch == 32)
    assert whole.time.compute < halves.time.compute < 1.2 * whole.time.compute


def test_communication_is_what_rings_send() -> None:
    parameters = Parameters(trained=1000, frozen=500, unit=10, unit_trained=10)
    assert Layout("DDP", 1, 8).bytes_sent(parameters, 4) == (0, 2 * 4000 * 7 / 8)
    assert Layout("FSDP2", 8, 1).bytes_sent(parameters, 4) == (4 * (3 * 4000 + 2000) * 7 / 8, 0)
    among, between = Layout("HSDP", 4, 2).bytes_sent(parameters, 1)
    assert among == (3 * 4000 + 2000) * 3 / 4 and between == 2 * 1000 / 2


def test_a_ring_over_nodes_is_as_fast_as_their_ports_together() -> None:
    h100, assumed = GPUS["h100"], Assumptions()
    assert bus_bandwidth(Machine(h100, 8, 1), assumed, whole_nodes=True) == 0.75 * 450e9
    assert bus_bandwidth(Machine(h100, 16, 2), assumed, whole_nodes=False) == 0.75 * 400e9
    given = Assumptions(bandwidth=10)
    assert bus_bandwidth(Machine(h100, 16, 2), given, whole_nodes=False) == 10e9


def test_communication_hides_behind_computing_as_far_as_there_is_some() -> None:
    parameters = Parameters(trained=10**9, frozen=0, unit=10, unit_trained=10)
    machine, assumed = Machine(GPUS["h100"], 8, 1), Assumptions()
    layout = Layout("DDP", 1, 8)
    long, short = (
        layout.time(machine, parameters, assumed, work=work, update=0.0, microbatches=1)
        for work in (1.0, 1e-6)
    )
    assert long.communication == short.communication == pytest.approx(7e9 / (0.75 * 450e9))
    assert long.exposed == pytest.approx(0.2 * long.communication)
    assert short.exposed == pytest.approx(short.communication, rel=1e-3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--gpus", "8", "--gpu", "h10"], "--gpu h10 is not known. Did you mean 'h100'?"),
        (["--gpus", "0", "--gpu", "h100"], "--gpus is 0; give a number above 0"),
        (["--gpus", "12", "--gpu", "h100", "--nodes", "5"], "not evenly spread over 5 nodes"),
        (["--gpus", "7", "--gpu", "h100"], "of their number, 7; use data.batch_size=63 or 70"),
        (["--gpus", "8", "--gpu", "h100", "--efficiency", "40"],
         "--efficiency is 40.0; give a number > 0, ≤ 1."),
        (["--gpus", "8", "--gpu", "h100", "--images", "0"],
         "--images is 0; give a whole number > 0."),
        (["--gpus", "8", "--gpu", "h100", "--output", "/dev/null/x"], "is not a writable folder"),
        (["encoder.nam=x", "--gpus", "8", "--gpu", "h100"], "unknown key 'encoder.nam'"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message(plan: Command, given: list[str], said: str) -> None:
    code, text = plan(*SMALL, "data.batch_size=64", *given)
    assert code == 2 and said in text and "Traceback" not in text


def test_what_fits_nowhere_says_what_would(plan: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = GPUS["a10g"].__class__("a tiny one", 1e12, 1e12, 2.51 * GIB, 1e11, 1e10)
    monkeypatch.setitem(GPUS, "tiny", tiny)
    code, text = plan(*SMALL, "data.batch_size=64", "--gpus", "2", "--gpu", "tiny")
    assert code == 2 and "fits on no a tiny one" in text
    assert "GiB, and has 2.5. What would fit: --gpu a100-40" in text


def test_images_of_the_data_are_counted(plan: Command, image_folder: Callable[..., Path]) -> None:
    path = image_folder(num_images=24)
    data = [f"data.path={path}", "data.batch_size=8", "trainer.max_duration=5ep"]
    code, text = plan(*SMALL, *data, "--gpus", "2", "--gpu", "4090")
    assert code == 0 and "5ep = 15 steps of 8 samples, 4 on each GPU; 24 images" in text
