"""The band of a reference: who stays in it, who does not, and what no reference is made of."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pospre.compare import main
from pospre.reporting.reference_curves import read_reference
from tests.refusals import fails

RECIPE = """\
run_name: {name}
seed: {seed}
data: {{path: images, batch_size: 4}}
encoder: {{name: vit_tiny16}}
algorithms: {{mae: {{mask_ratio: {mask}}}}}
trainer: {{max_duration: 20ba}}
"""


def made(root: Path, seed: int, *, shift: float = 0.0, mask: float = 0.75, steps: int = 20) -> Path:
    """Fabricate a run whose loss falls from 2 to 1, with noise of its seed."""
    folder = root / f"run{seed}_{shift}_{mask}_{steps}"
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(RECIPE.format(name=folder.name, seed=seed, mask=mask))
    noise = np.random.default_rng(seed).normal(0, 0.02, steps)
    lines = [
        {"step": step + 1, "loss/mae": 2 - step / 20 + noise[step] + shift, "lr": 0.1, "time": seed}
        for step in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


@pytest.fixture
def reference(tmp_path: Path) -> Path:
    out = tmp_path / "mae.json"
    runs = [str(made(tmp_path, seed)) for seed in range(4)]
    assert main([*runs, "--write-reference", str(out)]) == 0
    return out


def test_the_band_is_mean_and_deviation_of_the_windows(reference: Path, tmp_path: Path) -> None:
    plain = json.loads(reference.read_text())
    assert plain["seeds"] == [0, 1, 2, 3] and plain["edges"] == [0, 4, 8, 12, 16, 20]
    assert list(plain["curves"]) == ["loss/mae"]
    values = np.zeros((4, 5))
    for seed in range(4):
        lines = (tmp_path / f"run{seed}_0.0_0.75_20" / "metrics.jsonl").read_text().splitlines()
        losses = [json.loads(line)["loss/mae"] for line in lines]
        values[seed] = np.reshape(losses, (5, 4)).mean(1)
    assert np.allclose(plain["curves"]["loss/mae"], values, rtol=1e-4)
    deviations = values.std(0, ddof=1)
    reach = np.maximum(deviations, np.sqrt(np.mean(deviations**2)))
    found = read_reference(reference)
    middle = values.mean(0)
    other = np.stack([middle - 5 * reach, middle + 5 * reach], axis=1)
    assert np.allclose(found.bands("loss/mae", 99), other, rtol=1e-3)
    same = np.stack([values[2] - reach / 2, values[2] + reach / 2], axis=1)
    assert np.allclose(found.bands("loss/mae", 2), same, rtol=1e-3)


def test_another_seed_stays_and_a_shift_does_not(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main([str(made(tmp_path, 11)), "--reference", str(reference)]) == 0
    assert "stays in the band: 5 of 5 windows" in capsys.readouterr().out
    assert main([str(made(tmp_path, 2)), "--reference", str(reference)]) == 0
    assert main([str(made(tmp_path, 2, shift=0.02)), "--reference", str(reference)]) == 1
    capsys.readouterr()
    assert main([str(made(tmp_path, 12, shift=0.3)), "--reference", str(reference)]) == 1
    assert "leaves the band in 5 of 5 windows, first loss/mae at steps 1–4" in (
        capsys.readouterr().out
    )


def test_a_lost_value_is_outside(reference: Path, tmp_path: Path) -> None:
    run = made(tmp_path, 11)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[6]["loss/mae"] = None
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert main([str(run), "--reference", str(reference)]) == 1


def test_mistakes(reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    says = partial(fails, main, capsys)
    broken, short = tmp_path / "broken.json", made(tmp_path, 20, steps=12)
    broken.write_text('{"seeds": [1]}')
    run = made(tmp_path, 11)
    assert "not one: seeds: List should have at least 3" in says(run, "--reference", broken)
    broken.write_text('{"seeds": [1, 2, 3], "edges": [0, 5], "curves": {"loss/mae": [[1.0]]}}')
    assert "loss/mae has not one value for each" in says(run, "--reference", broken)
    assert "cannot be read" in says(run, "--reference", tmp_path / "no.json")
    assert "has 12 steps, the reference 20" in says(short, "--reference", reference)
    (run / "metrics.jsonl").write_text('{"step": 20, "loss/droppos": 1.0}\n')
    message = says(run, "--reference", reference)
    assert "nothing in common" in message and "loss/droppos" in message and "loss/mae" in message
    out = tmp_path / "new.json"
    runs = [made(tmp_path, seed) for seed in (5, 6, 7)]
    write = ["--write-reference", out]
    assert "at least 3 runs" in says(*runs[:2], *write)
    assert "same length" in says(*runs, short, *write)
    wrong = made(tmp_path, 8, mask=0.5)
    assert "algorithms.mae.mask_ratio is 0.75, 0.5" in says(*runs, wrong, *write)
    again = made(tmp_path, 5, shift=0.1)
    assert "runs with different seeds; these have [5, 6, 7, 5]" in says(*runs, again, *write)
    assert "--output is a page" in says(*runs, *write, "--output", tmp_path / "a.html")
    assert not out.exists()
