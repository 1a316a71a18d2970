"""The loader's bill: its shares add up, its advice fits what it saw, mistakes are explained."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from pospre import loader_report
from pospre.errors import UserError
from pospre.loader_report import LoaderBill, advice, main, table

RECIPE = str(Path(__file__).parents[1] / "yamls" / "demo" / "dinov2.yaml")


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("report") / "photographs"
    root.mkdir()
    for number in range(24):
        coarse = np.random.default_rng(number).integers(0, 256, (40, 50, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((600, 480), Image.Resampling.BICUBIC)
        image.save(root / f"{number}.jpg", quality=90)
    return root


def bill(**changes: Any) -> LoaderBill:
    stages = dict.fromkeys(loader_report.STAGES, 1.0)
    usual: dict[str, Any] = {
        "path": "data.beton", "format": "ffcv", "samples": 1000, "views": 2, "images": 100,
        "seconds": 7.0, "stages": stages, "workers": 2, "loaded_per_s": 300.0,
        "bytes_per_image": 50e3, "pixels_per_image": 200e3, "pixels_needed": 100e3,
    }  # fmt: skip
    return LoaderBill(**{**usual, **changes})


def test_shares_add_up_to_the_wall_time(photographs, tmp_path, capsys):
    output = tmp_path / "bill.json"
    options = [f"data.path={photographs}", "data.batch_size=4", "trainer.device=cpu"]
    assert main([RECIPE, *options, "--images", "16", "--output", str(output)]) == 0
    found = json.loads(output.read_text())
    assert found["images"] == 20 and found["samples"] == 24
    assert sum(found["stages"].values()) == pytest.approx(found["seconds"], rel=0.05)
    assert found["stages"]["other"] < 0.05 * found["seconds"]
    assert all(found["stages"][stage] > 0 for stage in ("read", "decode", "resize", "augment"))
    mean = np.mean([path.stat().st_size for path in photographs.iterdir()])
    assert found["bytes_per_image"] == pytest.approx(mean, rel=0.1)
    said = capsys.readouterr().out
    assert "together" in said and "one core loads" in said and "make data" in said


def test_the_table_says_what_feeding_takes():
    said = table(bill(), feed=100.0)
    assert "one core loads      25 images/s (50 views/s)" in said
    assert "4.0 for 100 images/s" in said and "wait                0%" in said
    assert "wait                70%" in table(bill(), feed=1000.0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pixels_per_image": 1e6}, r"10 times the pixels .* --max-side 384"),
        ({"bytes_per_image": 200e3}, r"8\.0 bits per pixel"),
        ({"format": "folder"}, r"convert to \.beton or MDS"),
        ({"stages": {**dict.fromkeys(loader_report.STAGES, 0.5), "read": 4.0}}, r"page_cache"),
        ({"is_remote": True}, r"cache_limit is above 0\.1 GB"),
    ],
)
def test_advice_fits_what_was_seen(changes, said):
    assert not advice(bill())
    (line,) = advice(bill(**changes))
    assert re.search(said, line)


def test_mistakes_are_explained(photographs, tmp_path):
    with pytest.raises(UserError, match=r"--feed is -1"):
        main([RECIPE, "--feed", "-1"])
    with pytest.raises(UserError, match=r"not two batches of 20; try data.batch_size=12"):
        main([RECIPE, f"data.path={photographs}", "data.batch_size=20", "trainer.device=cpu"])
