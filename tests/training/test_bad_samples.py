"""Damage met while training: named, with a checkpoint to go on from once it is left out."""

from pathlib import Path

import pytest

from pospre import draws
from tests.processes import finished
from tests.training.tiny_runs import Run, command, curve, environment, metrics

SEED, NUM_IMAGES, BATCH_SIZE = 0, 24, 8
OPTIONS = (f"seed={SEED}", "trainer.max_duration=2ep", "trainer.save_interval=1ba")
SKIP = "data.bad_samples=skip"
PROBED = (0, 7, 15, 23)


def damage(folder: Path, batch: int, row: int = 0) -> Path:
    """Cut off the photograph in that place of the first epoch; it is none that the start reads."""
    order = draws.order(SEED, 0, NUM_IMAGES)[batch * BATCH_SIZE :].tolist()
    index = next(index for index in order[row:] if index not in PROBED)
    path = sorted(folder.rglob("*.jpg"))[index]
    path.write_bytes(path.read_bytes()[:300])
    return path


def checkpoints(folder: Path) -> set[str]:
    return {path.name for path in (folder / "checkpoints").iterdir()}


def bad_samples(folder: Path) -> list[int | None]:
    return [line.get("data/bad_samples") for line in metrics(folder)]


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
def test_a_run_goes_on_without_the_sample_that_stopped_it(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    broken = damage(tmp_path / "images", batch=2)
    folder = tmp_path / "runs" / "tiny"
    for _ in range(2):  # a second start comes to the same place
        code, said = run(tiny, *OPTIONS)
        assert code == 2 and "Traceback" not in said
        assert f"{broken.parent.name}/{broken.name} cannot be decoded" in said
        assert "set data.bad_samples: skip" in said
        assert checkpoints(folder) == {"ep0-ba1", "ep0-ba2"}
    code, said = run(tiny, *OPTIONS, SKIP)
    assert code == 0 and "resuming from" in said, said
    assert run(tiny, *OPTIONS, SKIP, "run_name=whole")[0] == 0
    assert curve(folder) == curve(tmp_path / "runs" / "whole")
    assert bad_samples(folder)[-1] == bad_samples(tmp_path / "runs" / "whole")[-1] == 1


@pytest.mark.filterwarnings("ignore:.*cannot be decoded")
def test_a_bad_sample_of_one_rank_ends_both(tiny: Path, run: Run, tmp_path: Path) -> None:
    broken = damage(tmp_path / "images", batch=1, row=BATCH_SIZE // 2)
    done = finished(command(tiny, *OPTIONS, ranks=2), env=environment())
    said = done.stdout + done.stderr
    assert done.returncode != 0 and f"{broken.name} cannot be decoded" in said, said
    assert checkpoints(tmp_path / "runs" / "tiny") == {"ep0-ba1"}
    assert run(tiny, *OPTIONS, SKIP)[0] == 0  # on a single one
    assert bad_samples(tmp_path / "runs" / "tiny") == [None, 1, 1, 1, 1, 1]


def test_the_ranks_count_their_bad_samples_together(tiny: Path, tmp_path: Path) -> None:
    damage(tmp_path / "images", batch=1, row=BATCH_SIZE // 2)  # the second rank's
    done = finished(command(tiny, *OPTIONS, SKIP, ranks=2), env=environment())
    assert done.returncode == 0, done.stderr
    seen = bad_samples(tmp_path / "runs" / "tiny")
    assert (seen[0], seen[2], seen[-1]) == (None, 1, 1)
