"""A continuation that collapses is told while it trains, and judged worse at its end."""

from pathlib import Path

from tests.evaluation.dense.pictures import rendered_splits
from tests.training.test_start_weights import exported
from tests.training.tiny_runs import Run

COLLAPSING = (
    "{dinov2: {koleo_weight: 0, momentum_start: 0, momentum_end: 0, freeze_epochs: 0, "
    "num_prototypes: 32, head_hidden: 32, head_bottleneck: 16, centering: centering}}"
)
"""Nothing spreads the features, and the teacher is the student."""


def test_a_planted_collapse_is_told_and_judged_worse(tiny: Path, run: Run, tmp_path: Path) -> None:
    images = rendered_splits(tmp_path / "scenes", {"train": 480}, frames=1) / "train"
    # untrained, it tells scenes apart far above 1/6
    start, _ = exported(tmp_path / "published.safetensors", shift=0.0, positions="learned")
    code, said = run(
        tiny,
        *(f"data.path={images}", "data.batch_size=16", "data.views={global: {count: 2}}"),
        *(f"encoder={{weights: {start}}}", f"algorithms={COLLAPSING}", "optimizer.base_lr=3"),
        "evaluation={knn: {features: cls}, drift: {num_samples: 64, every: 30ba}}",
        *("verdict={figure: knn/top1, weights: teacher}", "trainer.max_duration=60ba"),
    )
    assert code == 0, said
    assert "warning: dinov2: the teacher is nearly the student in the 60 steps" in said
    assert "warning: step 30: drift: features collapse: rank " in said
    assert "Worse than the frozen start. The teacher's knn/top1" in said
    assert f"Keep the frozen start: {start}." in said
