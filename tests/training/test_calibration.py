"""Heads are fitted when a run begins from published weights, and never again."""

from pathlib import Path

from tests.training.test_start_encoder import written
from tests.training.tiny_runs import Run


def test_a_run_from_weights_fits_its_heads_once(tiny: Path, tmp_path: Path, run: Run) -> None:
    weights = written(tmp_path / "w.pth", positions="learned")
    heads = "dinov2: {num_prototypes: 16, head_hidden: 16, head_bottleneck: 8, freeze_epochs: 0}"
    options = (
        f"encoder={{weights: {weights}, image_size: 64}}",
        f"algorithms={{{heads}}}",
        "data.views={global: {count: 2, size: 64}}",
        "schedule.warmup=0ba",
    )
    code, said = run(tiny, *options, "trainer.max_duration=1ba")
    assert code == 0, said
    assert "heads of dinov2 fitted to 48 views of the start" in said
    code, said = run(tiny, *options, "trainer.max_duration=2ba")
    assert code == 0 and "fitted" not in said
    code, said = run(tiny, *options[1:], "run_name=new", "trainer.max_duration=1ba")
    assert code == 0 and "fitted" not in said
