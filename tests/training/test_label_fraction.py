"""Training on a part of the labels: so many images, the same ones when a run goes on."""

from collections.abc import Callable
from pathlib import Path

import pytest

from pospre.errors import UserError
from pospre.train import main
from tests.training.tiny_runs import curve

RECIPE = """\
data: {path: %s, batch_size: 4, label_fraction: 0.5, views: {view: {size: 32}}}
encoder: {name: vit_tiny16, depth: 1, image_size: 32, patch_size: 16}
algorithms: {supervised: {}}
schedule: {warmup: 1ba}
trainer: {max_duration: 3ep, device: cpu, progress_bar: false, run_folder: %s, log_interval: 1}
"""


def test_an_epoch_is_of_the_part_and_a_run_goes_on_with_it(
    image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    recipe = tmp_path / "part.yaml"
    recipe.write_text(RECIPE % (image_folder(num_images=16), tmp_path / "runs"))
    assert main([str(recipe), "run_name=whole"]) == 0
    whole = curve(tmp_path / "runs" / "whole")
    assert [step for step, *_ in whole] == [1, 2, 3, 4, 5, 6]  # 8 of 16 images in batches of 4
    stopped = [str(recipe), "run_name=stopped", "schedule.length=3ep"]
    assert main([*stopped, "trainer.max_duration=3ba"]) == 0
    assert main(stopped) == 0
    assert curve(tmp_path / "runs" / "stopped") == whole
    with pytest.raises(UserError, match="label_fraction"):
        main([*stopped, "data.label_fraction=1.0", "trainer.max_duration=4ep"])
