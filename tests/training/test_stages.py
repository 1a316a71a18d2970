"""Stages of a run: frozen tensors do not move, and a kill at any step changes nothing."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import pospre
from pospre.export import main as export
from pospre.nn.lora import PAIRS
from pospre.recipe.recipe import load_recipe
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.build import build_model, load_model
from pospre.training.replay import replay
from pospre.training.resolve import resolve
from tests.disk import snapshot
from tests.processes import finished
from tests.refusals import refuses
from tests.training.tiny_runs import MAE, Run, command, curve, environment, flat, write_tiny

STAGES = (
    "stages=[{until: .25, train: heads}, {until: .6, train: {last: 1}, ramp: 2ba}, {train: all}]"
)
"""Of 12 steps: they end after steps 3, which is an epoch, and 7."""
SIZES = "sizes: {view: 96}"


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    """Return a recipe of 12 steps with weights to start from and two blocks."""
    path = write_tiny(tmp_path)
    recipe = yaml.safe_load(path.read_text())
    recipe["encoder"]["depth"] = 2
    path.write_text(yaml.safe_dump(recipe))
    given = load_recipe(path, [MAE])
    weights = build_model(given.model_copy(update={"seed": 5})).timm_state()
    torch.save({k: v for k, v in weights.items() if k != "pos_embed"}, tmp_path / "start.pth")
    recipe["encoder"]["weights"] = f"{tmp_path}/start.pth,positions=none"
    recipe["encoder"]["positions"] = "learned"  # which the start does not give
    recipe["optimizer"]["weight_decay"] = 0.5
    path.write_text(yaml.safe_dump(recipe))
    return path


def end(folder: Path) -> Any:
    """Return what a run's last checkpoint has of the training."""
    (last,) = (folder / "checkpoints").glob("ep*-ba12")
    state = read_checkpoint(str(last)).content["state"]
    return flat({key: state[key] for key in ("model", "optimizers", "schedulers")})


def saved(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the state of every checkpoint of a run, by step."""
    found = map(read_checkpoint, map(str, (folder / "checkpoints").glob("ep*")))
    return {each.batch: each.content["state"] for each in found}


def go_back(folder: Path, step: int) -> None:
    """Remove the checkpoints after a step, as if the run had been killed before the next one."""
    for path in (folder / "checkpoints").glob("ep*"):
        if int(path.name.partition("-ba")[2]) > step:
            shutil.rmtree(path)


def test_frozen_tensors_keep_their_bytes_and_a_kill_changes_nothing(
    staged: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    options = (
        *(MAE, STAGES, "trainer.save_interval=1ba", "trainer.clip_grad={threshold: 1.0}"),
        *("trainer.microbatch_size=auto", "trainer.activation_checkpointing=true"),
    )
    code, said = run(staged, *options)
    assert code == 0 and "fresh: pos_embed" in said
    assert said.count("trainer.microbatch_size = auto: 8 of a rank's 8") == 3
    assert "stage 2 of 3, steps 4 to 7: {last: 1}, 0.49 of 1.09 M parameters train" in said
    whole, losses, last_state = saved(folder), curve(folder), end(folder)
    assert sorted(whole) == [*range(1, 13)]
    start = torch.load(tmp_path / "start.pth")
    names = {f"encoder.{key}": tensor for key, tensor in start.items()}
    moved = {
        step: {
            name for name, own in names.items() if not torch.equal(whole[step]["model"][name], own)
        }
        for step in (3, 7, 12)
    }
    last = {name for name in names if name.startswith(("encoder.blocks.1.", "encoder.norm."))}
    assert (moved[3], moved[7], moved[12]) == (set(), last, {*names})
    new = "encoder.positions.pos_embed"
    assert not torch.equal(whole[3]["model"][new], whole[1]["model"][new])
    steps = {
        step: {name: int(each["step"]) for name, each in state_of(whole[step]).items()}
        for step in (3, 4, 12)
    }
    first, second = "encoder.blocks.0.norm1.weight", "encoder.blocks.1.norm1.weight"
    head = "objectives.named.mae.embed.weight"
    assert not {first, second} & set(steps[3]) and steps[3][head] == 3
    assert (steps[4][second], steps[4][head], first in steps[4]) == (1, 4, False)
    assert (steps[12][first], steps[12][second], steps[12][head]) == (5, 9, 12)
    rarely = "trainer.save_interval=12ba"
    for step in (7, 4, 3, 2):  # after a boundary, on it, before it; each from what the whole left
        go_back(folder, step)
        code, said = run(staged, *options, rarely)
        assert code == 0 and f"-ba{step}\n" in said
        assert end(folder) == last_state and curve(folder) == losses


def state_of(state: dict[str, Any]) -> dict[str, Any]:
    """Return the moments in a checkpoint by tensor."""
    found: dict[str, Any] = state["optimizers"]["AdamW"]["state"]
    return found


def test_two_ranks_are_one_and_a_kill_changes_nothing(
    staged: Path, run: Run, tmp_path: Path
) -> None:
    stages = STAGES.replace("last: 1", "last: 1, lora: true").replace("all}", f"all, {SIZES}}}")
    adapting = ("algorithms.gram={}", "reference={weights: start}", "lora={rank: 2, dora: true}")
    options = (MAE, stages, *adapting, "encoder.positions=rotary")
    auto = "trainer.microbatch_size=auto"
    assert run(staged, *options, "run_name=one")[0] == 0
    one = losses_of(tmp_path / "runs" / "one")
    for name, more, twice, once in (
        ("ddp", ("trainer.save_interval=3ba",), (12, 3), (3,)),
        ("fsdp2", ("trainer.save_interval=1ba", "trainer.fsdp={}"), (12,), (4, 3, 2)),
    ):
        folder, whole = tmp_path / "runs" / name, None
        options_of = (*options, f"run_name={name}")
        for step in twice:
            go_back(folder, step)
            ranks = command(staged, *options_of, *more, auto, ranks=2)
            done = finished(ranks, env=environment())
            assert done.returncode == 0, done.stdout + done.stderr
            assert losses_of(folder) == pytest.approx(one, rel=1e-5)
            assert whole in (None, end(folder))
            whole = end(folder)
        for step in once:  # one rank takes up what two have left
            go_back(folder, step)
            assert run(staged, *options_of)[0] == 0
            assert losses_of(folder) == pytest.approx(one, rel=1e-5)


def losses_of(folder: Path) -> list[float]:
    return [loss for _, loss, _ in curve(folder)]


@pytest.mark.parametrize("parts", ["true", "blocks"])
def test_each_stage_is_compiled_anew_with_its_pairs(
    parts: str, staged: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages = "stages=[{until: 2ba, train: heads}, {train: {last: 1, lora: true}}]"
    options = (
        MAE,
        stages,
        "lora={rank: 2}",
        "trainer.max_duration=4ba",
        "trainer.precision=amp_bf16",
    )
    assert run(staged, *options, "run_name=plain")[0] == 0
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    code, said = run(staged, *options, "run_name=compiled", f"trainer.compile={parts}")
    assert code == 0 and "warning" not in said, said
    assert said.count("the first step took") == 2
    plain, compiled = (losses_of(tmp_path / "runs" / name) for name in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=2e-2)


def test_a_plain_loop_can_do_the_same(staged: Path, run: Run, tmp_path: Path) -> None:
    assert run(staged, MAE, STAGES, "schedule={name: constant, warmup: 0ba}")[0] == 0
    given = load_recipe(staged, [MAE])
    encoder = pospre.build_encoder("vit_tiny16", image_size=64, depth=2, positions="learned")
    methods = [pospre.MAE(**given.algorithms["mae"])]
    model = pospre.PretrainModel(encoder, methods, seed=0)
    pospre.load_weights(model, given.encoder.weights or "")
    loader = pospre.build_loader(given.data.path, batch_size=8, views=[pospre.ViewGroup(size=64)])
    stages = pospre.Stages(
        model,
        [
            {"until": 0.25, "train": "heads"},
            {"until": 0.6, "train": {"last": 1}, "ramp": "2ba"},
            {"train": "all"},
        ],
        total_steps=12,
        steps_per_epoch=3,
        batch_size=8,
        fresh=["pos_embed"],
    )
    peak = 0.03 * 8 / 256
    groups = pospre.parameter_groups(model, peak, weight_decay=0.5, stages=stages)
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)
    step = 0
    for _ in range(4):
        for batch in loader:
            stages.begin(step, optimizer)
            for group in optimizer.param_groups:
                group["lr"] = peak * stages.factor(group["life"], step)
            model(batch, progress=step / 12).loss.backward()
            optimizer.step()
            model.after_step(step / 12)
            optimizer.zero_grad()
            step += 1
    model_of_run = saved(tmp_path / "runs" / "tiny")[12]["model"]
    assert flat(dict(model.state_dict())) == flat(model_of_run)


def test_views_grow_in_a_run_from_random_weights(staged: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    options = (MAE, "encoder.weights=null", "encoder.positions=rotary", "trainer.save_interval=1ba")
    assert run(staged, *options, "run_name=small")[0] == 0
    stages = f"stages=[{{until: 4ba}}, {{until: 8ba, {SIZES}}}, {{}}]"
    code, said = run(staged, *options, stages, "trainer.microbatch_size=auto")
    assert code == 0 and "steps 5 to 8: all at 96 px (view), 1.08 of 1.08" in said, said
    small, losses = losses_of(tmp_path / "runs" / "small"), losses_of(folder)
    assert losses[:4] == small[:4] and not set(losses[4:]) & set(small)
    last = end(folder)
    for step in (8, 6, 4):
        go_back(folder, step)
        assert run(staged, *options, stages)[0] == 0
        assert end(folder) == last and losses_of(folder) == losses
    again = replay(bad_step(folder, 6, 96))
    assert again.losses["loss/total"] == losses[5]
    assert again.batch["view/image"].shape[-2:] == (96, 96)
    assert load_model(str(folder))[0].encoder.image_size == (64, 64)


def bad_step(folder: Path, step: int, size: int) -> Path:
    """Write the record of a bad step of a run on one rank and 3 steps an epoch; return its path."""
    (last,) = (folder / "checkpoints").glob("ep*-ba12")
    given = read_checkpoint(str(last)).content["state"]["callbacks"]["RecipeRecord"]["recipe"]
    views = [pospre.ViewGroup(size=size)]
    loader = pospre.build_loader(given["data"]["path"], batch_size=8, views=views)
    loader.load_state_dict({"epoch": (step - 1) // 3, "samples": (step - 1) % 3 * 8})
    ranks = [{"index": next(iter(loader))["index"].tolist()}]
    noted = folder / "bad_steps" / f"ba{step}.json"
    noted.parent.mkdir()
    noted.write_text(json.dumps({"step": step, "ranks": ranks, "recipe": given}))
    return noted


def test_only_ends_to_come_may_change(staged: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    stages = (
        "stages=[{{until: {}, train: heads}}, {{until: {}, train: {{last: 1}}}}, {{train: all}}]"
    )
    options = (MAE, "trainer.save_interval=1ba")
    assert run(staged, *options, stages.format(0.25, 0.6))[0] == 0
    go_back(folder, 5)
    before = snapshot(folder)
    for ends, words in (
        ((0.3, 0.6), "stages.0.until was 0.25, is 0.3, but that stage has ended at step 3"),
        ((0.25, 0.35), "stages.1.until = 0.35 is step 4, but the run is at step 5"),
    ):
        code, said = run(staged, *options, stages.format(*ends))
        assert code == 2 and words in said and snapshot(folder) == before
    code, said = run(staged, *options, STAGES.replace("last: 1", "norms: true"))
    assert code == 2 and "stages.1.train.last = 1, this one None" in said
    # a longer run: the first stage has ended at step 3, and stays so
    code, said = run(staged, *options, stages.format(0.25, 0.5), "trainer.max_duration=16ba")
    assert code == 0 and "steps 4 to 8" in said and "steps 9 to 16" in said
    assert saved(folder)[16]["callbacks"]["RecipeRecord"]["starts"] == [0, 3, 8]


def test_a_step_is_replayed_in_its_stage(staged: Path, run: Run, tmp_path: Path) -> None:
    folder, step = tmp_path / "runs" / "tiny", 5
    assert run(staged, MAE, STAGES)[0] == 0
    noted = bad_step(folder, step, 64)
    losses = dict(zip(range(1, 13), losses_of(folder), strict=True))
    # from step 3, where the second stage begins
    assert replay(noted).losses["loss/total"] == losses[step]
    go_back(folder, 2)
    refuses("step 5 is in a later stage than the start", lambda: replay(noted))


def test_pairs_train_beside_frozen_weights_and_are_merged_for_others(
    staged: Path, run: Run, tmp_path: Path
) -> None:
    folder, ema = tmp_path / "runs" / "tiny", "algorithms.ema_teacher={momentum_start: 0.5}"
    options = (MAE, "lora={rank: 2, layers: [q, fc1]}", ema)
    code, said = run(staged, *options)
    assert code == 0 and "encoder: 29 of 30 tensors" in said and "stage 1 of 1" in said
    tensors = saved(folder)[12]["model"]
    start = torch.load(tmp_path / "start.pth")
    for name, own in start.items():
        is_norm = "norm" in name
        assert torch.equal(tensors[f"encoder.{name}"], own) is not is_norm, name
    pairs = {name for name in tensors if PAIRS in name}
    assert len(pairs) == 2 * 2 * 2 * 2  # encoder and teacher, two blocks, q and fc1, A and B
    assert all(tensors[name].any() for name in pairs)

    recipe = load_recipe(staged, options)
    unmerged = build_model(resolve(recipe))
    unmerged.load_state_dict(tensors)
    images = torch.randn(2, 3, 64, 64)
    for which in ("student", "teacher"):
        model, merged = load_model(str(folder), weights=which)
        assert merged.lora is None and not any(PAIRS in name for name in model.state_dict())
        trained: Any = unmerged.encoder if which == "student" else unmerged.teacher
        expected = trained.eval()(images)
        assert torch.allclose(model.eval().encoder(images), expected, atol=1e-4)
        again = pospre.PretrainModel(
            pospre.build_encoder("vit_tiny16", image_size=64, depth=2, positions="learned"), []
        )
        pospre.load_weights(again, str(folder), which)
        for name, tensor in again.encoder.state_dict().items():
            assert torch.equal(tensor, model.encoder.state_dict()[name]), name
    written = []
    for more in ((), ("--overwrite",)):
        out = tmp_path / "encoder.safetensors"
        assert export([str(folder), str(out), "--format", "safetensors", *more]) == 0
        written.append(flat(load_file(out)))
    assert written[0] == written[1] and not any(PAIRS in name for name in written[0])
    card = (tmp_path / "encoder.safetensors.md").read_text()
    told = yaml.safe_load(card.rpartition("```yaml\n")[2].rpartition("```")[0])
    assert told["lora"]["layers"] == ["q", "fc1"]  # how it was trained, not what is left

    before = snapshot(folder)
    code, said = run(staged, *options, "lora.rank=3")
    assert code == 2 and "lora.rank = 2, this one 3" in said and snapshot(folder) == before


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("lora={}", "encoder.weights=null"), "lora: parts of the encoder are frozen"),
        (("lora={rank: 96}",), "lora.rank = 96, but q is 192 × 192"),
        (("lora={layers: [qkv]}",), "expected q, k, v, proj, fc1, fc2"),
        (("lora={}", "stages=[{train: {last: 2}}]"), "stages train all blocks whole"),
        (("lora={}", "stages=[{until: .5, train: heads}, {train: {last: 1}}]"), "lora has no eff"),
        (("stages=[{train: {lora: true}}]",), "there are no pairs; add the section lora"),
        ((STAGES, "encoder.weights=null"),
         "stages: parts of the encoder are frozen, but encoder.weights is null"),
        (("stages=[{until: 99ba, train: heads}, {}]",), "stages.0.until = 99ba is step 99"),
        (("stages=[{until: .5, train: head}, {}]",),
         "'stages.0.train' is 'head' (str); expected heads"),
        (("stages=[{until: .5}, {sizes: {all: 96}}]",),
         "stages.1.sizes.all: data.views has view. Name one of them"),
        (("stages=[{until: .5}, {sizes: {view: 100}}]", "encoder.positions=rotary"),
         "stages.1.sizes = {view: 100}: encoder.image_size = 100 is not divisible"),
        (("stages=[{until: .5}, {sizes: {view: 96}}]",),
         "the tensor 'encoder.positions.pos_embed' would have the shape (1, 37, 192) instead of"),
        (("stages=[{until: .5}, {}]",), "stages.1.train = all trains the same tensors"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_write_nothing(
    overrides: tuple[str, ...], words: str, staged: Path, run: Run, tmp_path: Path
) -> None:
    before = snapshot(tmp_path)
    code, said = run(staged, MAE, *overrides)
    assert code == 2 and words in said and "Traceback" not in said
    assert snapshot(tmp_path) == before
