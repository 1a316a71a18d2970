"""The page while training: written again, with the views of a step, and never in the way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pospre.report.live import LivePage
from tests.algorithms.cases import Case
from tests.report.fabricated_run import fabricate_run


def at_step(number: int) -> Any:
    """Return what a callback is told at the end of a step of MAE and DropPos."""
    case = Case(("mae", "droppos"))
    model, algorithms = case.build()
    return SimpleNamespace(
        model=model.train(),
        algorithms=algorithms,
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
    assert "this page follows it" in page and page.count("data:image/jpeg") == 3
    assert torch.equal(torch.get_rng_state(), drawn)
    assert set(state.batch) == set(batch) and state.model.training
    for key, value in state.model.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_what_fails_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    (folder / "recipe.yaml").write_text("a: [1")
    live = LivePage(folder, every=0)
    for number in (1, 2):
        live.batch_end(at_step(number), None)  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said.count("the report is not written while training") == 1 and "recipe.yaml" in said
