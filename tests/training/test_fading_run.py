"""A run whose positions fade into others: exact at the start, after a kill, and when exported."""

from functools import partial
from pathlib import Path

import pytest
import torch
import yaml

from pospre.errors import UserError
from pospre.evaluation.models import open_model
from pospre.exporting.export import export
from pospre.nn.positions.fading import Fading
from pospre.training.start_encoder import KEYS
from pospre.training.weight_files import read_source
from tests.processes import finished
from tests.training.test_stages import end, go_back, losses_of
from tests.training.test_start import written
from tests.training.tiny_runs import Run, command, environment


@pytest.fixture
def fading(tiny: Path, tmp_path: Path) -> Path:
    """Return a recipe of 12 steps: a table fades out, and rotary positions come in."""
    recipe = yaml.safe_load(tiny.read_text())
    weights = written(tmp_path / "w.pth", positions="learned")
    recipe["encoder"] = {"weights": weights, "positions": "rotary", "keep": "fade"}
    recipe["reference"] = {"weights": "start"}
    recipe["algorithms"] = {"distill": {}}
    recipe["optimizer"]["base_lr"] = 0.01
    tiny.write_text(yaml.safe_dump(recipe))
    return tiny


def images(size: int = 64) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))


def test_it_begins_as_the_original_and_ends_without_its_table(
    fading: Path, run: Run, tmp_path: Path
) -> None:
    (code, said), folder = run(fading, "trainer.save_interval=1ba"), tmp_path / "runs" / "tiny"
    assert code == 0, said
    assert "encoder.positions = rotary: learned → rotary over the first half" in said
    losses, last = losses_of(folder), end(folder)
    assert losses[0] == 0 and min(losses[1:7]) > 0  # step 1 has the original's weights and places
    go_back(folder, 5)
    assert run(fading, "trainer.save_interval=1ba")[0] == 0
    assert end(folder) == last and losses_of(folder) == losses
    half = next((folder / "checkpoints").glob("ep*-ba4"))
    scheme = open_model(str(half)).model.encoder.positions
    assert isinstance(scheme, Fading) and float(scheme.share) == pytest.approx(0.5)
    with pytest.raises(UserError, match="learned → rotary cannot be exported for timm"):
        export(str(half), tmp_path / "half.pth", format="timm")
    with pytest.raises(UserError, match="positions that still fade"):
        read_source(str(half), "student", KEYS)
    export(str(folder), tmp_path / "out.pth", format="timm")
    opened = open_model(str(folder)).model.encoder.eval()
    assert opened.positions.name == "rotary" and opened.options.fades_from is None
    again = open_model(str(tmp_path / "out.pth")).model.encoder.eval()
    with torch.no_grad():
        torch.testing.assert_close(again(images()), opened(images()), rtol=0, atol=1e-5)


@pytest.fixture
def one(fading: Path, run: Run, tmp_path: Path) -> list[float]:
    """Return the losses of one rank."""
    assert run(fading, "run_name=one")[0] == 0
    return losses_of(tmp_path / "runs" / "one")


@pytest.mark.parametrize("sharding", ["null", "{}"])
def test_two_ranks_are_one(
    sharding: str, fading: Path, one: list[float], run: Run, tmp_path: Path
) -> None:
    options = ("run_name=two", f"trainer.fsdp={sharding}", "trainer.save_interval=4ba")
    done = finished(command(fading, *options, ranks=2), env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert losses_of(tmp_path / "runs" / "two") == pytest.approx(one, rel=1e-4, abs=1e-6)
    go_back(tmp_path / "runs" / "two", 4)
    assert run(fading, *options[::2])[0] == 0  # one rank goes on
    assert losses_of(tmp_path / "runs" / "two") == pytest.approx(one, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("parts", ["true", "blocks"])
def test_a_compiled_run_learns_the_same(
    parts: str,
    fading: Path,
    one: list[float],
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    code, said = run(fading, "run_name=compiled", f"trainer.compile={parts}")
    assert code == 0 and "warning" not in said, said
    assert losses_of(tmp_path / "runs" / "compiled") == pytest.approx(one, rel=1e-4, abs=1e-6)
