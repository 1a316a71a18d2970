"""The notebook runs from its first cell to its last, on a run and on a model of timm."""

import ast
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
NOTEBOOK = json.loads((ROOT / "yamls/demo/positions.ipynb").read_text("utf-8"))
CELLS = [("".join(cell["source"]), cell) for cell in NOTEBOOK["cells"]]
CODE = [text for text, cell in CELLS if cell["cell_type"] == "code"]


def test_it_has_ten_cells_without_outputs_and_uses_public_names_only() -> None:
    assert len(CELLS) == 10 and NOTEBOOK["nbformat"] == 4
    for text, cell in CELLS:
        assert max(map(len, text.splitlines())) <= 130
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
    names = {
        node.attr
        for node in ast.walk(ast.parse("\n".join(CODE)))
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "pospre"
    }
    assert names and names <= {*importlib.import_module("pospre").__all__}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("notebook")


@pytest.mark.parametrize("model", [None, "timm:test_vit"])
def test_it_runs(
    model: str | None,
    work: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its cells in order, in one namespace; its commands in this process, on fewer images."""
    monkeypatch.chdir(ROOT / "yamls/demo")  # as editors start it
    pyplot.switch_backend("agg")
    drawn = []

    def show() -> None:
        for number in pyplot.get_fignums():
            drawn.append(len(pyplot.figure(number).axes))
        pyplot.close("all")

    monkeypatch.setattr(pyplot, "show", show)
    small = ["trainer.device=cpu", "trainer.precision=fp32", "encoder.depth=2"]
    small += ["data.batch_size=16", "schedule.warmup=1ba"]

    def python(module: str, *arguments: Any) -> None:
        given = [*map(str, arguments), *(small if module == "pospre.train" else [])]
        assert importlib.import_module(module).main(given) == 0

    names: dict[str, Any] = {"__name__": "notebook"}
    first, *others = CODE
    exec(compile(first, "first cell", "exec"), names)
    assert Path.cwd() == ROOT
    names |= {"python": python, "WORK": work, "IMAGES": 24, "EPOCHS": 2, "DEMO": "no run"}
    names["MODEL"] = model or "no run"
    for text in others:
        exec(compile(text, "cell", "exec"), names)
    assert drawn == [1, 1, 16, 3]
    assert names["MODEL"] == (model or str(work / "small"))
    assert {row["shown_as"] for row in names["probe"]["rows"]} >= {"image", "content"}
    assert names["removal"]["steps"][-1]["planes"] == 6
    assert "without 6 planes" in capsys.readouterr().out
    assert names["cosines"].shape == (names["encoder"].num_patches,) * 2
