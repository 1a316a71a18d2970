"""The loader's costs: its shares add up, it is about right, and mistakes are explained."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pospre.data.stores.folder_reader import FolderReader
from pospre.data.stores.reader import Sample
from pospre.loader_costs import STAGES, WAITING, LoaderCosts, RemoteCosts, StageTimes, measure
from pospre.loader_report import main
from pospre.recipe.recipe import load_recipe
from tests.conftest import write_images
from tests.data.buckets import ADDRESS, bucket, server, shards, store, upload  # noqa: F401 (fixtures)
from tests.data.deep_files import band_folder
from tests.data_prep.reading import converted
from tests.refusals import refuses

RECIPE = str(Path(__file__).parents[1] / "yamls" / "demo" / "dinov2.yaml")
SLOW = 0.02
OPTIONS = ("data.batch_size=4", "trainer.device=cpu", "data.num_workers=1")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("report") / "photographs", 24, size=(600, 480))


@pytest.fixture(scope="module")
def shards_of_them(photographs: Path) -> Path:
    return converted(photographs, photographs.parent / "mds")


@pytest.fixture
def slow_reads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make every read take ``SLOW`` seconds (or the parameter) or a little more; list them."""
    seconds: list[float] = []
    pause = getattr(request, "param", SLOW)
    read = FolderReader.read

    def slow(self: FolderReader, index: int) -> Sample:
        start = time.perf_counter()
        time.sleep(pause)
        sample = read(self, index)
        seconds.append(time.perf_counter() - start)
        return sample

    monkeypatch.setattr(FolderReader, "read", slow)
    return seconds


def costs(*, read: float = 1.0, **changes: Any) -> LoaderCosts:
    """Return costs of 100 images; one core decodes for 2 s, and every other stage takes 1 s."""
    stages = {**dict.fromkeys(STAGES, 1.0), "read": read, "decode": 2.0}
    usual: dict[str, Any] = {
        "path": "data.beton", "format": "ffcv", "samples": 1000, "views": 2, "repeats": 1,
        "device": "cpu", "augment_threads": 2, "workers": 4, "cores": 4, "batch": 10,
        "loaded_per_s": 60.0, "feed": None,
        "alone": StageTimes(100, sum(stages.values()), stages),
        "consumer": StageTimes(100, 5.0, dict.fromkeys(WAITING, 1.0)),
        "bytes_per_image": 50e3,
    }  # fmt: skip
    return LoaderCosts(**{**usual, **changes})


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({}, "decode is 40% of loading; store smaller images"),
        ({"read": 4.0}, "read is 50% of loading; copy the data to a faster disk"),
        ({"read": 4.0, "format": "folder"}, "read is 50% of loading; convert the folder"),
        ({"workers": 1, "feed": 1000.0}, "leave data.num_workers out to use all 4 cores"),
        ({"remote": RemoteCosts(9, 20, 10, 0, 1.0)}, "data.cache_limit=20 is enough"),
        ({"remote": RemoteCosts(9, 20, 20, 0, 1.0)}, "decode is 40% of loading"),
    ],
)
def test_the_hint_is_about_what_costs_most(changes: dict[str, Any], hint: str) -> None:
    assert hint in costs(**changes).hint


def test_cores_are_counted_as_threads_scale() -> None:
    good = costs()  # 100 images take 5 s
    assert good.per_core == pytest.approx(20) and good.scaling == pytest.approx(60 / 4 / 20)
    assert good.cores_for(1000.0) == pytest.approx(1000 / 15)
    assert costs(loaded_per_s=500.0).cores_for(1000.0) == pytest.approx(1000 / 20)
    assert costs(workers=8).cores_for(1000.0) == pytest.approx(1000 / 15)  # threads are no cores


def measured(path: Any, *options: str, images: int = 16, feed: float | None = None) -> Any:
    recipe = load_recipe(RECIPE, [f"data.path={path}", *OPTIONS, *options])
    return measure(recipe, images, feed)


def check_sum(timing: StageTimes, stages: tuple[str, ...]) -> None:
    """What was timed stage by stage is most of what the clock says, whatever else runs."""
    assert set(timing.stages) == set(stages)
    named = {stage: seconds for stage, seconds in timing.stages.items() if stage != "other"}
    assert min(named.values()) >= 0
    assert 0.5 * timing.seconds < sum(named.values()) < 1.01 * timing.seconds
    assert sum(timing.stages.values()) == pytest.approx(timing.seconds)


def test_shares_add_up_to_the_wall_time(photographs, tmp_path, capsys):
    output = tmp_path / "costs.json"
    given = [RECIPE, f"data.path={photographs}", *OPTIONS, "--images", "16"]
    assert main([*given, "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["alone"]["images"] == 16 and found["samples"] == 24 and found["batch"] == 2
    for name, stages in (("alone", STAGES), ("consumer", WAITING)):
        check_sum(StageTimes(**found[name]), stages)
    assert all(found["alone"]["stages"][stage] > 0 for stage in STAGES[:-1])
    mean = np.mean([path.stat().st_size for path in photographs.iterdir()])
    assert found["bytes_per_image"] == pytest.approx(mean, rel=0.1)
    assert found["bytes_per_epoch"] == pytest.approx(24 * mean, rel=0.1)
    said = capsys.readouterr().out
    for part in ("together", "wait ", "one core loads", "hint     ", "on cpu, 1 thread"):
        assert part in said


def test_reading_takes_as_long_as_it_does(photographs, slow_reads):
    costs = measured(photographs, "data.repeats=2")
    check_sum(costs.alone, STAGES)
    took = sum(slow_reads[-costs.alone.images :])
    assert took <= costs.alone.stages["read"] < 2 * took
    assert costs.loaded_per_s < 1 / SLOW and costs.per_core < 1 / SLOW
    assert costs.bytes_per_epoch == pytest.approx(12 * costs.bytes_per_image)


def waits_little(photographs: Path) -> bool:
    """Tell whether a consumer of 5 images a second gets them at that rate from four threads."""
    timing = measured(photographs, "data.num_workers=4", images=8, feed=5.0).consumer
    check_sum(timing, WAITING)
    at_rate = timing.images / timing.seconds == pytest.approx(5.0, rel=0.1)
    return at_rate and timing.stages["wait"] < 0.1 * timing.seconds


@pytest.mark.parametrize("slow_reads", [0.1], indirect=True)  # dwarfs the step on any machine
def test_a_consumer_waits_for_slow_threads_only(photographs, slow_reads):
    hungry = measured(photographs, images=8, feed=1000.0)
    check_sum(hungry.consumer, WAITING)
    assert hungry.consumer.stages["wait"] > 0.3 * hungry.consumer.seconds
    # Other programs only add time: a single measurement without them shows what is meant.
    assert any(waits_little(photographs) for _ in range(3))
    assert hungry.cores_for(1000.0) >= 1000.0 / hungry.per_core


def test_large_batches_do_not_take_more_images(photographs):
    costs = measured(photographs, "data.batch_size=24", images=8)
    assert (costs.batch, costs.alone.images) == (1, 8)


def test_images_of_other_channels(tmp_path: Path, capsys) -> None:
    path = band_folder(tmp_path / "arrays")
    channels = ("encoder.channels=6", "data.views.view.augment={blur_rate: 0.5}")
    recipe = RECIPE.replace("dinov2", "mae")
    assert main([recipe, f"data.path={path}", *OPTIONS, *channels, "--images", "8"]) == 0
    said = capsys.readouterr().out
    assert "together" in said and "JPEG" not in said


def test_bad_samples(photographs, tmp_path, capsys):
    folder = shutil.copytree(photographs, tmp_path / "photographs")
    (folder / "0005.jpg").write_bytes(b"no image")
    options = [RECIPE, f"data.path={folder}", *OPTIONS, "--images", "24"]
    refuses(r"05\.jpg cannot be decoded", lambda: main(options))
    with pytest.warns(UserWarning, match=r"05\.jpg"):
        assert main([*options, "data.bad_samples=skip"]) == 0
    said = capsys.readouterr().out
    assert "left out            1 bad samples" in said


def test_data_in_a_bucket(shards_of_them: Path, upload: Callable[[Path], Any], capsys):  # noqa: F811
    upload(shards_of_them)
    assert main([RECIPE, f"data.path={ADDRESS}", *OPTIONS, "--images", "16"]) == 0
    said = capsys.readouterr().out
    size = sum(path.stat().st_size for path in shards_of_them.glob("*.mds")) / 1e9
    assert f"{ADDRESS} (mds, 24 samples)" in said
    words = " ".join(said.split())
    assert f"download at most {size:.4f} GB for each machine: in the first epoch with" in words
    assert f"data.cache_limit from {size:.4f} GB, in every" in words
    assert f"{size:.4f} GB while measuring" in words
    assert main([RECIPE, f"data.path={ADDRESS}", *OPTIONS, "--images", "16"]) == 0
    assert "0.0000 GB while measuring" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--feed", "-1"], r"--feed is -1"),
        (["--images", "0"], r"--images is 0"),
        (["--output", "/dev/null/costs.json"], r"/dev/null is not a writable folder"),
        (["--output", "."], r"--output \. is a folder"),
        (["data.batch_size=25"], r"has 24 samples, fewer than one batch of 25"),
    ],
)
def test_mistakes_are_said_before_anything_is_measured(photographs, options, said):
    refuses(said, lambda: main([RECIPE, f"data.path={photographs}", *OPTIONS, *options]))
