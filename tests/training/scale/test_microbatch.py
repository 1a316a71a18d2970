"""Microbatches: found by trials that run out of memory, and what looks at a whole batch says so."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.nn.block import Block
from tests.training.tiny_runs import MAE, Run, curve

SHORT = ("trainer.max_duration=2ba", "trainer.save_interval=2ba", "schedule.warmup=1ba")


@pytest.fixture
def memory_for(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what lets a block run out of memory with more than so many samples."""
    forward = Block.forward

    def limit(samples: int) -> None:
        def limited(self: Block, x: torch.Tensor, *arguments: Any) -> torch.Tensor:
            if len(x) > samples:
                raise torch.OutOfMemoryError(f"tried to allocate {len(x)} samples")
            return forward(self, x, *arguments)

        monkeypatch.setattr(Block, "forward", limited)

    return limit


def test_auto_is_the_largest_half_that_fits_and_leaves_no_trace(
    tiny: Path, run: Run, tmp_path: Path, memory_for: Callable[[int], None]
) -> None:
    assert run(tiny, MAE, *SHORT, "trainer.microbatch_size=2", "run_name=given")[0] == 0
    memory_for(3)
    code, said = run(tiny, MAE, *SHORT, "trainer.microbatch_size=auto")
    assert code == 0, said
    assert "trainer.microbatch_size = auto: 2 of a rank's 8 samples at a time" in said
    assert curve(tmp_path / "runs" / "tiny") == curve(tmp_path / "runs" / "given")


def test_one_sample_that_does_not_fit_is_one_message(
    tiny: Path, run: Run, memory_for: Callable[[int], None]
) -> None:
    memory_for(0)
    code, said = run(tiny, *SHORT, "trainer.microbatch_size=auto")
    assert code == 2 and "Traceback" not in said
    assert "out of memory with one sample" in said and "activation_checkpointing=true" in said


def test_a_step_that_runs_out_of_memory_is_one_message(
    tiny: Path, run: Run, memory_for: Callable[[int], None]
) -> None:
    memory_for(4)
    code, said = run(tiny, *SHORT)
    assert code == 2 and "Traceback" not in said
    for words in ("out of memory in step 1", "8 samples", "trainer.microbatch_size (or auto)"):
        assert words in said


def test_what_looks_at_a_whole_batch_says_so(tiny: Path, run: Run) -> None:
    code, said = run(tiny, *SHORT, "trainer.microbatch_size=4")
    assert code == 0
    assert "the weights of patches of droppos see 4 samples at once" in said
    code, said = run(tiny, MAE, *SHORT, "trainer.microbatch_size=4", "run_name=mae")
    assert code == 0 and "at once" not in said
