"""A run goes on from another storage of its data, whose parts are others."""

import contextlib
import io
from pathlib import Path

import pytest

from data_prep import convert
from tests.training.tiny_runs import Run, curve


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_run_on_shards_goes_on_from_the_folder(
    tiny: Path, run: Run, tmp_path: Path, lanes: int
) -> None:
    shards = tmp_path / "shards"
    command = [str(tmp_path / "images"), str(shards), "--format", "mds", "--shard-mb", "0.004"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert.main(command) == 0
    assert len(list(shards.glob("*.mds"))) >= 3
    order = ("data.order=windows", "data.window=8", f"data.lanes={lanes}")
    options = (*order, "trainer.max_duration=2ep", "trainer.save_interval=1ba")
    code, said = run(tiny, *options, f"data.path={shards}")
    assert code == 0, said
    folder = tmp_path / "runs" / "tiny"
    whole = curve(folder)
    for late in folder.glob("checkpoints/*-ba[3-6].*"):
        late.unlink()
    code, said = run(tiny, *options)
    assert code == 0 and "ep0-ba2.pt" in said, said
    assert len(whole) == 6 and curve(folder) == whole
