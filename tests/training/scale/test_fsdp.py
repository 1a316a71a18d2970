"""Hybrid sharding on four ranks is one process, whatever else is on; degrees and precisions."""

from pathlib import Path

import pytest
import torch
from composer.core import Precision
from composer.distributed.fsdp2 import create_mixed_precision_policy
from torch import Tensor

from pospre.errors import UserError
from pospre.recipe.sections import Fsdp
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.scale.fsdp import build_sharding, num_copies
from tests.processes import finished, launcher
from tests.training.tiny_runs import Run, curve, environment

OPTIONS = (
    "algorithms={mae: {decoder_dim: 32, decoder_depth: 1, decoder_heads: 2}, ema_teacher: {}}",
    "trainer.max_duration=4ba",
    "trainer.save_interval=2ba",
    "trainer.clip_grad={threshold: 0.1}",
)


@pytest.mark.timeout(900)
def test_two_copies_of_two_shards_are_one_process(tiny: Path, run: Run, tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("four_ranks.py"))
    runs = tmp_path / "runs"
    done = finished([*launcher(4), script, str(tiny), str(runs), *OPTIONS], env=environment())
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "auto: 1 of a rank's 2 samples at a time" in done.stdout
    assert "resuming from" in done.stdout and "ep0-ba2\n" in done.stdout
    assert run(tiny, *OPTIONS, "run_name=one")[0] == 0
    one, four = (curve(runs / name) for name in ("one", "four"))
    for (_, loss, rate), (_, other_loss, other_rate) in zip(one, four, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-5) and other_rate == rate
    weights, others = (_weights(runs / name) for name in ("one", "four"))
    assert others.keys() == weights.keys()
    for key, value in weights.items():
        torch.testing.assert_close(others[key], value, rtol=1e-4, atol=1e-5, msg=key)


def _weights(folder: Path) -> dict[str, Tensor]:
    """Return the model of the last checkpoint, teacher included."""
    (path,) = (folder / "checkpoints").glob("*-ba4")
    return read_checkpoint(str(path)).content["state"]["model"]


@pytest.mark.parametrize(("degree", "copies"), [(None, 1), (4, 1), (2, 2), (1, 4)])
def test_degrees(degree: int | None, copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = Fsdp(shard_degree=degree)
    assert num_copies(options) == copies
    sharding = build_sharding(options)
    assert sharding is not None
    assert sharding.data_parallel_replicate_degree == (None if copies == 1 else copies)


def test_a_degree_that_does_not_divide_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match=r"shard_degree = 3 does not .*; use one of 1, 2, 4"):
        num_copies(Fsdp(shard_degree=3))


@pytest.mark.parametrize(
    ("name", "weights", "gradients"),
    [
        ("FULL", None, None),
        ("DEFAULT", torch.bfloat16, torch.float32),
        ("PURE", torch.bfloat16, torch.bfloat16),
    ],
)
def test_what_travels_between_ranks_as_documented(
    name: str, weights: torch.dtype | None, gradients: torch.dtype | None
) -> None:
    policy = create_mixed_precision_policy(Precision.AMP_BF16, name)
    assert (policy.param_dtype, policy.reduce_dtype) == (weights, gradients)
    assert policy.cast_forward_inputs
