"""Training on a part of the labels: so many images, the same ones when a run goes on."""

from pathlib import Path

from tests.training.tiny_runs import Run, curve


def test_an_epoch_is_of_the_part_and_a_run_goes_on_with_it(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    half = (
        "algorithms={supervised: {}}",
        "data.batch_size=4",
        "data.label_fraction=0.5",
        "schedule.length=2ep",
    )
    assert run(tiny, *half, "run_name=whole", "trainer.max_duration=2ep")[0] == 0
    whole = curve(tmp_path / "runs" / "whole")
    assert [step for step, *_ in whole] == [1, 2, 3, 4, 5, 6]  # 12 of 24 images in batches of 4
    assert run(tiny, *half, "trainer.max_duration=4ba")[0] == 0
    assert run(tiny, *half, "trainer.max_duration=2ep")[0] == 0
    assert curve(tmp_path / "runs" / "tiny") == whole
    code, said = run(tiny, *half, "data.label_fraction=1.0", "trainer.max_duration=3ep")
    assert code == 2 and "data.label_fraction" in said
