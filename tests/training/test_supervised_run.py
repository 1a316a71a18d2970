"""A classifier trained through the command: resumed alike, sharded alike, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pospre.run.checkpoints.content import callback_states
from pospre.run.checkpoints.reading import read_checkpoint
from tests.processes import finished
from tests.training.tiny_runs import Run, command, curve, environment

pytestmark = pytest.mark.science

CLASSIFIER = (  # 12 steps with all that changes with the step
    "encoder={name: vit_tiny16, image_size: 64, depth: 2, positions: learned, drop_path: 0.2,"
    " final_norm: false}",
    "algorithms.droppos=null",
    "algorithms.supervised={pooling: mean, mixup: 0.8, cutmix: 1.0}",
    "algorithms.ema_teacher={momentum_start: 0.5}",
    "schedule={warmup: 2ba, start_lr: 0.001, fix_after: 10ba}",
    "optimizer={base_lr: 0.1, weight_decay: 0.5, weight_decay_end: 5.0, layer_decay: 0.75,"
    " patch_embed_lr: 0.5, no_decay: [cls_token]}",
    "trainer.max_duration=12ba",
    "trainer.save_interval=6ba",
    "trainer.clip_grad={mode: per_module, threshold: 0.5}",
)


def last_checkpoint(folder: Path) -> Path:
    (path,) = (folder / "checkpoints").glob("ep*-ba12")
    return path


def last_state(folder: Path) -> dict[str, Any]:
    return read_checkpoint(str(last_checkpoint(folder))).content["state"]


def test_resumed_is_the_same_run(tiny: Path, run: Run, tmp_path: Path) -> None:
    assert run(tiny, *CLASSIFIER, "run_name=whole")[0] == 0
    assert run(tiny, *CLASSIFIER, "run_name=again")[0] == 0
    whole, again = tmp_path / "runs" / "whole", tmp_path / "runs" / "again"
    shutil.rmtree(last_checkpoint(again))  # as if killed after step 6
    code, said = run(tiny, *CLASSIFIER, "run_name=again")
    assert code == 0 and "ep1-ba6" in said
    assert curve(again) == curve(whole)
    expected = last_state(whole)
    for key, value in last_state(again)["model"].items():
        assert torch.equal(value, expected["model"][key]), key
    groups = next(iter(expected["optimizers"].values()))["param_groups"]
    decays = {group["weight_decay"] for group in groups}
    assert len(decays) == 2 and 0.0 in decays and max(decays) > 4
    assert len({group["lr"] for group in groups}) > 3


def test_evaluated_with_the_teacher_and_reported(tiny: Path, run: Run, tmp_path: Path) -> None:
    accuracy = "evaluation.accuracy={weights: teacher, batch_size: 8}"
    code, said = run(tiny, *CLASSIFIER, accuracy, "trainer.max_duration=4ba")
    assert code == 0 and "accuracy: Accuracy of the class head" in said
    folder = tmp_path / "runs" / "tiny"
    document = json.loads((folder / "evaluation" / "accuracy.json").read_text())
    assert document["weights"] == "teacher" and document["results"]["samples"] == 24
    recorded = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert recorded["algorithms"]["supervised"]["num_classes"] == 2
    assert "metric/supervised_accuracy" in (folder / "metrics.jsonl").read_text()
    record = read_checkpoint(str(folder / "checkpoints" / "ep1-ba4")).content
    assert callback_states(record)["RecipeRecord"]["classes"] == ["cat", "dog"]
    (folder.parents[1] / "images" / "dog").rename(folder.parents[1] / "images" / "fox")
    code, said = run(tiny, *CLASSIFIER)
    assert code == 2 and "the classes differ (first difference: 'dog')" in said
    code, said = run(tiny, *CLASSIFIER, "evaluation.accuracy={weights: mine}", "run_name=other")
    assert code == 2 and "evaluation.accuracy.weights" in said


def test_two_sharded_ranks_train_the_same_groups(tiny: Path, run: Run, tmp_path: Path) -> None:
    """Mixing is off: its partners depend on the rank's share of the batch."""
    plain = ("algorithms.supervised.mix_rate=0.0", "trainer.max_duration=4ba")
    assert run(tiny, *CLASSIFIER, *plain, "run_name=ranks1")[0] == 0
    result = finished(
        command(tiny, *CLASSIFIER, *plain, "trainer.fsdp={}", "run_name=ranks2", ranks=2),
        env=environment(),
    )
    assert result.returncode == 0, result.stderr
    one, two = (curve(tmp_path / "runs" / f"ranks{ranks}") for ranks in (1, 2))
    assert [step for step, _, _ in one] == [step for step, _, _ in two]
    for (_, loss, rate), (_, other, same) in zip(one, two, strict=True):
        assert other == pytest.approx(loss, rel=1e-4) and same == rate
