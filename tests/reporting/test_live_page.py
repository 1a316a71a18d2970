"""The page while training: written again, with the views of a step, and never in the way."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pospre.reporting.live_page import GREY, LivePage, draw_views
from pospre.reporting.page import write_report
from tests.algorithms.cases import Case
from tests.reporting.fabricated_run import fabricate_run


def at_step(number: int) -> Any:
    """Return what a callback is told at the end of a step of MAE and DropPos."""
    case = Case(("mae", "droppos"))
    model = case.build()
    return SimpleNamespace(
        model=model.train(),
        algorithms=model.algorithms,
        batch=case.batch(4),
        device=SimpleNamespace(batch_to_device=lambda batch: batch),
        timestamp=SimpleNamespace(batch=SimpleNamespace(value=number)),
        previous_timestamp=SimpleNamespace(epoch=SimpleNamespace(value=0)),
    )


def test_the_page_follows_the_run_and_changes_nothing_of_it(tmp_path: Path) -> None:
    folder, state = fabricate_run(tmp_path, num_steps=5, evaluated=False), at_step(1)
    before = {key: value.clone() for key, value in state.model.state_dict().items()}
    batch = {key: value.clone() for key, value in state.batch.items()}
    drawn = torch.get_rng_state()
    LivePage(folder, every=60).batch_end(state, None)  # type: ignore[arg-type]
    assert (folder / "views" / "views.json").exists() and not (folder / "report.html").exists()
    live = LivePage(folder, every=0)
    live.batch_end(state, None)  # type: ignore[arg-type]
    page = (folder / "report.html").read_text("utf-8")
    assert "this page is updated" in page and page.count("data:image/jpeg") == 3
    assert torch.equal(torch.get_rng_state(), drawn)
    assert set(state.batch) == set(batch) and state.model.training
    for key, value in state.model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_what_fails_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    (folder / "report.html").mkdir()
    live = LivePage(folder, every=0)
    for number in (1, 2):
        live.batch_end(at_step(number), None)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said.count("the report is not updated during training") == 1 and "report.html" in said


def test_the_page_waits_for_the_first_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    metrics = (folder / "metrics.jsonl").rename(tmp_path / "metrics.jsonl")
    live = LivePage(folder, every=0)
    live.batch_end(at_step(1), None)  # type: ignore[arg-type]
    assert not (folder / "report.html").exists() and not capsys.readouterr().err
    metrics.rename(folder / "metrics.jsonl")
    live.batch_end(at_step(2), None)  # type: ignore[arg-type]
    assert (folder / "report.html").exists()


def drawn(case: Case, folder: Path) -> tuple[dict[str, torch.Tensor], list[np.ndarray]]:
    """Return a batch with masks, and the strips of its first group of views."""
    model = case.build()
    model.train()
    batch = case.batch(4)
    keys = set(batch)
    draw_views(model, batch, folder, step=1)
    assert set(batch) == keys
    model.draw(batch)
    groups = json.loads((folder / "views.json").read_text())["groups"]
    assert [group["name"] for group in groups] == list(case.views)
    return batch, [np.asarray(Image.open(folder / name)) for name in groups[0]["files"]]


def test_hidden_patches_are_grey_and_the_others_as_the_encoder_gets_them(tmp_path: Path) -> None:
    batch, strips = drawn(Case(("mae",)), tmp_path / "views")
    assert len(strips) == 3
    for row, strip in enumerate(strips):
        small = torch.from_numpy(strip[::6, ::6].copy())  # 32 px, enlarged to 192
        image, flip = batch["view/image"][row, 0], batch["view/flip"][row, 0]
        pixels = (image.flip(-1) if flip else image).permute(1, 2, 0)
        patches = pixels.unflatten(1, (8, 4)).unflatten(0, (8, 4)).transpose(1, 2).flatten(0, 1)
        patches[batch["view/hidden"][row]] = GREY
        mended = patches.unflatten(0, (8, 8)).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        assert torch.equal(small, mended)


@pytest.mark.parametrize(
    ("names", "legend"),
    [
        (("droppos",), "framed in green: keep their position"),
        (("mp3",), "framed in green: the context"),
        (("ijepa",), "framed in green: the features are predicted"),
        (("simmim",), "grey: masked"),
        (
            ("dinov2", "masked_position"),
            "grey: the content is masked; framed in green: the position",
        ),
    ],
)
def test_each_method_says_what_its_colours_mean(
    names: tuple[str, ...], legend: str, tmp_path: Path
) -> None:
    _, strips = drawn(Case(names), tmp_path / "views")
    document = json.loads((tmp_path / "views" / "views.json").read_text())
    assert legend in document["groups"][0]["legend"]
    tinted = sum((np.diff(strip.astype(int), axis=2) != 0).sum() for strip in strips)
    assert tinted > 0
    folder = fabricate_run(tmp_path, num_steps=5, evaluated=False)
    (tmp_path / "views").rename(folder / "views")
    page = write_report(folder).read_text("utf-8")
    assert legend[:1].upper() + legend[1:] in page or legend in page
    assert page.count("data:image/jpeg") == 3 * len(document["groups"])
