"""Advice on loading fits what was measured, and can be followed."""

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pospre.data.stores.folder import FolderReader
from pospre.data.views.options import ViewGroup
from pospre.loader_costs.advice import advise
from pospre.loader_costs.costs import STAGES, WAITING, LoaderCosts, RemoteCosts, StageTimes
from pospre.loader_costs.image_sizes import ImageSizes, look_at_sizes, shorter_side
from pospre.loader_costs.table import table

SIZES = ImageSizes(
    pixels=200e3, pixels_needed=100e3, max_side=384, bits_per_pixel=2.0, other_than_jpeg=0.0,
    is_raw=False, unreadable=0, looked_at=64,
)  # fmt: skip
REMOTE = RemoteCosts(
    num_bytes=10**9, unpacked_bytes=2 * 10**9, cache_limit=None, downloaded=0, fetched_per_s=300.0
)


def costs(*, read: float = 0.5, **changes: Any) -> LoaderCosts:
    """Return costs without any fault; one core spends ``read`` of 3.5 s on reading."""
    stages = {**dict.fromkeys(STAGES, 1.0), "read": read}
    usual: dict[str, Any] = {
        "path": "data.beton", "format": "ffcv", "samples": 1000, "views": 2, "repeats": 1,
        "order": "random", "device": "cpu", "augment_threads": 2,
        "workers": 4, "cores": 4, "batch": 10, "loaded_per_s": 100.0, "feed": None,
        "alone": StageTimes(100, sum(stages.values()), stages),
        "consumer": StageTimes(100, 5.0, dict.fromkeys(WAITING, 1.0)),
        "bytes_per_image": 50e3, "sizes": SIZES,
    }  # fmt: skip
    return LoaderCosts(**{**usual, **changes})


def sizes(**changes: Any) -> dict[str, Any]:
    return {"sizes": dataclasses.replace(SIZES, **changes)}


def remote(**changes: Any) -> dict[str, Any]:
    return {"remote": dataclasses.replace(REMOTE, **changes)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (sizes(pixels=1e6), r"10 times the pixels .* --max-side 384 \(decode is 29% of loading"),
        (sizes(bits_per_pixel=8.0), r"8\.0 bits per pixel.* only those JPEGs anew"),
        (sizes(other_than_jpeg=0.5, bits_per_pixel=9.0), r"50% of the images are no JPEGs"),
        (sizes(is_raw=True, bits_per_pixel=24.0), r"stored raw"),
        ({"format": "folder"}, r"read file by file \(14% of .*convert to \.beton or MDS"),
        ({"read": 4.0}, r"reading is 57% of loading: copy to a faster disk"),
        ({"read": 4.0, **remote()}, r"put data\.cache_dir on a faster disk"),
        (remote(cache_limit=10**9), r"downloads again: with data\.cache_limit from 2\.00 GB"),
        (remote(fetched_per_s=10.0), r"data\.order: windows needs few"),
        ({"workers": 1, "feed": 1000.0}, r"1 threads use 1 of 4 cores"),
    ],
)
def test_advice_fits_what_was_seen(changes, said):
    assert not advise(costs()) and not advise(costs(**remote()))
    (line,) = advise(costs(**changes))
    assert re.search(said, line)


def test_small_samples_are_not_read_slowly():
    alone = StageTimes(100, 0.02, {**dict.fromkeys(STAGES, 0.001), "read": 0.014})
    assert not advise(costs(alone=alone))


def test_cores_are_counted_as_threads_scale():
    good = costs()  # 100 images take 3.5 s
    assert good.per_core == pytest.approx(100 / 3.5)
    assert good.scaling == pytest.approx(100 / 4 / (100 / 3.5))
    assert good.cores_for(1000.0) == pytest.approx(1000 / 25)
    assert costs(loaded_per_s=500.0).cores_for(1000.0) == pytest.approx(1000 / (100 / 3.5))
    assert costs(workers=8).cores_for(1000.0) == pytest.approx(1000 / 25)  # threads are no cores


@pytest.mark.parametrize(
    ("crop", "size", "scale", "expected"),
    [
        ("random", 96, (0.05, 0.32), 96 / (0.05 * 1.5) ** 0.5),
        ("center", 224, (0.2, 1.0), 256),
        ("simple", 224, (0.2, 1.0), 224),
        ("full", (96, 224), (0.2, 1.0), 224),
    ],
)
def test_how_large_views_need_an_image(crop, size, scale, expected):
    group = ViewGroup(crop=crop, size=size, scale=scale)
    assert shorter_side(group, np.array([1.5])) == pytest.approx(expected)


def test_the_side_that_is_recommended_keeps_all_detail(tmp_path):
    for number, shape in enumerate([(1200, 900), (900, 1200), (1200, 800), (300, 200)]):
        suffix = "png" if number == 3 else "jpg"
        Image.new("RGB", shape).save(tmp_path / f"{number}.{suffix}")
    (tmp_path / "4.jpg").write_bytes(b"none")
    found = look_at_sizes(FolderReader(tmp_path), [ViewGroup(size=224, crop="simple")])
    assert found is not None
    assert (found.unreadable, found.looked_at, found.other_than_jpeg) == (1, 5, 0.25)
    assert found.max_side == 352  # 224 for the short side of 3:2 is 336
    assert found.pixels == (2 * 1200 * 900 + 1200 * 800 + 300 * 200) / 4
    shrunk = [352 * 264, 352 * 264, 352 * 352 / 1.5, 300 * 200]
    assert found.pixels_needed == pytest.approx(np.mean(shrunk))


def test_machines_share_what_lanes_deal():
    said = table(costs(lanes=8, **remote()))
    assert "for each machine (1/K of it on K machines, if K divides data.lanes = 8) in the" in said
    assert "1/K" not in table(costs(**remote()))
