"""A run goes on from another storage of its data, whose parts are others."""

import contextlib
import io
import shutil
from pathlib import Path

from PIL import Image

from data_prep import convert
from tests.disk import snapshot
from tests.training.tiny_runs import Run, curve


def test_a_run_on_shards_goes_on_from_the_folder(tiny: Path, run: Run, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    command = [str(tmp_path / "images"), str(shards), "--format", "mds", "--shard-mb", "0.004"]
    with contextlib.redirect_stdout(io.StringIO()):
        assert convert.main(command) == 0
    assert len(list(shards.glob("*.mds"))) >= 3
    order = ("data.order=windows", "data.window=8", "data.shard_groups=2")
    options = (*order, "trainer.max_duration=2ep", "trainer.save_interval=1ba")
    code, said = run(tiny, *options, f"data.path={shards}")
    assert code == 0, said
    folder = tmp_path / "runs" / "tiny"
    whole = curve(folder)
    for late in folder.glob("checkpoints/*-ba[3-6]"):
        shutil.rmtree(late)
    code, said = run(tiny, *options)
    assert code == 0 and "ep0-ba2" in said, said
    assert len(whole) == 6 and curve(folder) == whole


def relabelled(folder: Path) -> None:
    one, other = sorted(path for path in folder.iterdir() if path.is_dir())[:2]
    first = sorted(one.iterdir())[0]
    first.rename(other / first.name)


def others(folder: Path) -> None:
    for number, path in enumerate(sorted(folder.rglob("*.*g"))):
        Image.new("RGB", (40 + number, 30), (number, 0, 0)).save(path)


def drop_last(run_folder: Path) -> None:
    for path in run_folder.glob("checkpoints/*-ba6"):
        shutil.rmtree(path)


def test_a_run_does_not_go_on_with_as_many_other_images(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    short = ("trainer.max_duration=6ba", "trainer.save_interval=1ba")
    assert run(tiny, *short)[0] == 0
    run_folder, copy = tmp_path / "runs" / "tiny", tmp_path / "copy"
    shutil.copytree(tmp_path / "images", copy)
    drop_last(run_folder)
    code, said = run(tiny, *short, f"data.path={copy}")  # the same images elsewhere
    assert code == 0 and "ba5" in said, said
    drop_last(run_folder)
    before = snapshot(run_folder)
    told = f"trained on other data ({tmp_path / 'images'}) than data.path = {copy} holds"
    for change, what in (
        (others, "files (paths and sizes) differ"),
        (relabelled, "the labels differ"),
    ):
        change(copy)
        code, said = run(tiny, *short, f"data.path={copy}")
        assert code == 2 and snapshot(run_folder) == before
        assert told in said and what in said and "choose another run_name" in said, said
    assert run(tiny, *short)[0] == 0
