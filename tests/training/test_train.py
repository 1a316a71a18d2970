"""The command: from nothing to a report, killed and resumed, and what it refuses."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pospre.evaluation.run import run_evaluation
from pospre.training.build import load_model
from tests.disk import snapshot
from tests.processes import finished, started
from tests.training.tiny_runs import LONG, Run, command, curve, environment, metrics, wait_for_save


def test_end_to_end(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    options = (
        "evaluation.position_grid={num_samples: 8}",
        "loggers.tensorboard={}",
        "trainer.clip_grad={mode: norm, threshold: 1.0}",
    )
    result = finished(command(tiny, *options, "trainer.progress_bar=true"), env=environment())
    assert result.returncode == 0, result.stderr
    assert "weighted_mean" in result.stdout
    assert "loss " in result.stderr and "images/s" in result.stderr and "left" in result.stderr
    kept = "recipe.yaml", "pretext_tasks.json"
    for name in (*kept, "report.html", "evaluation/position_grid.json", "tensorboard"):
        assert (folder / name).exists()
    lines = metrics(folder)
    assert [line["step"] for line in lines] == list(range(1, 13))
    last = lines[-1]
    assert (last["samples"], last["epoch"]) == (96, 3)
    names = {"time", "lr", "throughput", "memory", "loss/droppos", "metric/droppos_accuracy"}
    assert names <= set(last)
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["run_name"] == "tiny"

    code, said = run(tiny, *options)
    assert code == 0 and "already finished" in said and "mean of" not in said


def test_killed_and_resumed_is_the_same_curve(tiny: Path, run: Run, tmp_path: Path) -> None:
    options = (*LONG, "trainer.save_interval=4ba")
    killed = tmp_path / "runs" / "tiny"
    with started(command(tiny, *options), env=environment()) as process:
        wait_for_save(killed, process)
    trained = curve(killed)[-1][0]
    assert trained < 600
    length = f"trainer.max_duration={trained + 3}ba"
    assert run(tiny, *options, length, "run_name=whole")[0] == 0
    # microbatches, loggers and where it is measured may change in the middle of a run
    code, said = run(tiny, *options, length, "evaluation={}", "trainer.save_interval=1ep")
    assert code == 0 and "resuming from" in said
    assert curve(killed) == curve(tmp_path / "runs" / "whole")


def test_old_checkpoints_go_also_after_a_resume(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny" / "checkpoints"
    options = ("trainer.max_duration=2ep", "trainer.save_interval=1ba")
    assert run(tiny, *options)[0] == 0
    shutil.rmtree(folder / "ep1-ba6")
    assert run(tiny, *options, "trainer.keep_checkpoints=2")[0] == 0
    assert {path.name for path in folder.iterdir()} == {"ep1-ba5", "ep1-ba6"}


def watched(folder: Path) -> dict[tuple[int, str], float]:
    """Return what the callbacks of a run have measured, by step and name."""
    found = {
        (line["step"], name): value
        for line in metrics(folder)
        for name, value in line.items()
        if name.startswith(("gradient/", "features/")) or name.endswith("blank_accuracy")
    }
    names = {name for _, name in found}
    assert {"gradient/encoder", "gradient/mae", "gradient/droppos"} < names
    assert {"features/student_std", "metric/droppos_blank_accuracy"} < names
    return found


def test_two_ranks(tiny: Path, run: Run, tmp_path: Path) -> None:
    # Their losses are plain means, so that two ranks of four are one rank of eight.
    both = (
        "algorithms.mae={decoder_dim: 32, decoder_depth: 1, decoder_heads: 2, mask_ratio: 0.5}",
        "algorithms.droppos={decoder_dim: 32, decoder_heads: 2, temperature: null}",
        "callbacks={collapse: {every: 2}, position_shortcut: {every: 2}}",
    )
    clip = "trainer.clip_grad={mode: per_tensor, threshold: 0.1}"
    base = (*both, "trainer.max_duration=2ep", clip)
    often = ("evaluation={knn: {every: 1ep, k: 3, baseline: false}}", "trainer.keep_best=knn/top1")
    assert run(tiny, *base, "run_name=one")[0] == 0
    one, seen = curve(tmp_path / "runs" / "one"), watched(tmp_path / "runs" / "one")
    for name, options in (("ddp", ()), ("fsdp2", ("trainer.fsdp={}",))):
        named = f"run_name={name}"
        two_ranks = command(tiny, *base, *options, *often, named, ranks=2)
        result = finished(two_ranks, env=environment())
        assert result.returncode == 0, result.stderr
        folder = tmp_path / "runs" / name
        check_figures(folder, tmp_path / "images")
        for (_, loss, rate), (_, other_loss, other_rate) in zip(one, curve(folder), strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-4) and other_rate == rate
        assert watched(folder) == pytest.approx(seen, rel=1e-4)
        # one rank takes up what they have left
        shutil.rmtree(folder / "checkpoints" / "ep2-ba6")
        code, said = run(tiny, *base, named)
        assert code == 0 and "ep1-ba3" in said
        assert curve(folder)[-1][1] == pytest.approx(one[-1][1], rel=1e-4)


def check_figures(folder: Path, data: Path) -> None:
    """What the ranks measured together is what their checkpoints measure; one of them is kept."""
    found = {}
    for line in metrics(folder):
        if "evaluation/knn/top1" in line:
            found[line["step"]] = line["evaluation/knn/top1"]
    for step, name in ((3, "ep1-ba3"), (6, "ep2-ba6")):
        model, recipe = load_model(str(folder / "checkpoints" / name))
        settings = {"k": 3, "baseline": False}
        document = run_evaluation("knn", model, recipe, data, settings, progress=False)
        assert document["results"]["top1"] == found.pop(step)
    assert not found and len(list((folder / "checkpoints" / "best").glob("ep*"))) == 1


def test_a_folder_of_another_run_is_left_alone(tiny: Path, run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "tiny"
    short = ("trainer.max_duration=1ep",)
    assert run(tiny, *short)[0] == 0
    before = snapshot(folder)

    code, said = run(tiny, *short, "algorithms.droppos.mask_ratio=0.25")
    assert code == 2
    for word in ("algorithms.droppos.mask_ratio = 0.5", "0.25", "run_name=", "overwrite"):
        assert word in said
    code, said = run(tiny, *short, "trainer.autoresume=false")
    assert code == 2 and "trainer.autoresume" in said
    assert before == snapshot(folder)

    code, _ = run(tiny, *short, "algorithms.droppos.mask_ratio=0.25", "trainer.overwrite=true")
    assert code == 0
    assert curve(folder)[0][0] == 1

    stranger = tmp_path / "runs" / "stranger"
    stranger.mkdir()
    (stranger / "thesis.txt").write_text("years of work")
    for options in ((), ("trainer.overwrite=true",)):
        code, said = run(tiny, *short, "run_name=stranger", *options)
        assert code == 2 and "not a run folder" in said
    assert (stranger / "thesis.txt").read_text() == "years of work"


def test_a_failing_evaluation_leaves_the_others_and_the_report(
    tiny: Path, run: Run, tmp_path: Path, image_folder: Callable[..., Path]
) -> None:
    alone = image_folder(num_images=4, classes=("a", "b", "c", "d"), name="alone")
    settings = f"{{knn: {{k: 1, data: {alone}}}, position_grid: {{num_samples: 8}}}}"
    code, said = run(tiny, "trainer.max_duration=1ep", f"evaluation={settings}")
    assert code == 2 and "one image per class" in said
    folder = tmp_path / "runs" / "tiny"
    assert (folder / "evaluation" / "position_grid.json").exists()
    assert (folder / "report.html").exists()


def test_two_ranks_say_a_mistake_once(tiny: Path) -> None:
    done = finished(command(tiny, "sed=1", ranks=2), env=environment())
    assert done.returncode == 2
    assert (done.stdout + done.stderr).count("unknown key 'sed'") == 1
