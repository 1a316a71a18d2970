"""The compiled step: one graph with its losses, the same numbers, and its messages."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from composer.utils import get_device
from torch._dynamo.utils import counters
from torch._inductor.runtime.runtime_utils import cache_dir

from pospre.recipe.sections import Trainer
from pospre.training.scale import compilation
from pospre.training.scale.blocks import recompute_blocks
from pospre.training.scale.compilation import CACHE, choose_parts, compile_model, open_cache
from tests.algorithms.cases import Case
from tests.processes import finished
from tests.training.scale.test_blocks import DROPPING, gradients
from tests.training.tiny_runs import environment

CPU = get_device("cpu")
GPU: Any = SimpleNamespace(name="gpu")
WHOLE: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}
STEPS = [
    Case(names, encoder={"depth": 1})
    for names in (("supervised",), ("simmim",), ("mp3",), ("mae", "droppos", "lut"))
]
"""The contract of all algorithms, in tests/algorithms, has the others."""
BLOCKS = [DROPPING, Case(("dinov2", "masked_position")).of_one_block()]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget what was compiled: torch counts it for a whole process."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: case.title)
def test_the_step_with_its_losses_is_one_graph_that_stays(case: Case) -> None:
    batch, model = case.batch(), case.build()
    expected = gradients(case.build(), batch)
    deep = len(case.names) == 1  # of all it would take minutes
    compile_model(model, "step", CPU, **{**WHOLE, "backend": "aot_eager" if deep else "eager"})
    found = gradients(model, batch)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)
    for progress in (0.0, 0.2, 0.7, 0.9):
        model(model.prepare(dict(batch), progress))
    assert graphs() == 1


@pytest.mark.parametrize(("case", "recompute"), [(BLOCKS[0], False), (BLOCKS[1], True)])
def test_compiled_blocks_and_objectives_give_the_same(case: Case, recompute: bool) -> None:
    batch, model = case.batch(), case.build()
    expected = gradients(case.build(), batch)
    keys = list(model.state_dict())
    compile_model(model, "blocks", GPU, **WHOLE)
    if recompute:
        recompute_blocks(model, offload=False)
    found = gradients(model, batch)
    assert list(model.state_dict()) == keys
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-6, msg=key)
    first = graphs()
    gradients(model, batch)
    assert graphs() == first <= 10


@pytest.mark.parametrize("parts", ["step", "blocks"])
def test_an_evaluation_is_not_compiled(parts: compilation.Parts) -> None:
    case = Case(("droppos",))
    model = case.build()
    compile_model(model, parts, GPU, **WHOLE)
    model.eval()
    model(model.prepare(case.batch(2), 0.5))
    assert graphs() == 0


@pytest.mark.parametrize(
    ("options", "device", "parts"),
    [
        ({}, CPU, None),
        ({}, GPU, "step"),
        ({"fsdp": {}}, GPU, "blocks"),
        ({"activation_checkpointing": True}, GPU, "blocks"),
        ({"compile": True}, CPU, "step"),
        ({"compile": "blocks"}, CPU, "blocks"),
        ({"compile": False}, GPU, None),
    ],
)
def test_what_a_device_compiles(
    options: dict[str, Any], device: Any, parts: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "has_triton", lambda: True)
    trainer = Trainer.model_validate({"max_duration": "1ep", **options})
    assert choose_parts(trainer, device) == parts


@pytest.mark.parametrize(
    ("device", "said"),
    [(CPU, "there is no C++ compiler (apt-get install g++)"), (GPU, "there is no Triton")],
)
def test_without_a_compiler_nothing_is_compiled_and_that_is_said(
    device: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def search() -> str:
        raise compilation.InvalidCxxCompiler

    monkeypatch.setattr(compilation, "get_cpp_compiler", search)
    monkeypatch.setattr(compilation, "has_triton", lambda: False)
    trainer = Trainer.model_validate({"max_duration": "1ep", "compile": True})
    assert choose_parts(trainer, device) is None
    assert f"trainer.compile = True: nothing is compiled, because {said}" in capsys.readouterr().out


def test_the_cache_is_kept_or_it_is_said_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert open_cache() == os.environ[CACHE] == str(tmp_path / "pospre" / "compiled") == cache_dir()
    assert capsys.readouterr().out == ""
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    folder = open_cache()
    assert Path(folder).is_dir() and folder == os.environ[CACHE] != str(tmp_path / "file")
    assert f"{tmp_path / 'file'} cannot be written" in capsys.readouterr().out


BREAKING = """
import torch
from pospre.training.scale.compilation import Compiling

def function(x):
    x = x + 1
    torch._dynamo.graph_break()
    return x * 2

callback = Compiling("step", "/cache")
compiled = torch.compile(function, backend="eager", dynamic=False)
callback.fit_start(None, None)
callback.batch_start(None, None)
compiled(torch.zeros(2))
callback.batch_end(None, None)
for size in range(3, 14):
    compiled(torch.zeros(size))
callback.batch_end(None, None)
callback.close(None, None)
"""


def test_breaks_and_too_many_graphs_are_said_in_a_line(tmp_path: Path) -> None:
    script = tmp_path / "breaking.py"
    script.write_text(BREAKING)
    # alone: torch tells a process of some things once
    said = finished([sys.executable, str(script)], env=environment()).stderr
    assert "compiling the step: the first step takes longer" in said
    assert said.count("the first step took") == 1 and "cached in /cache" in said
    assert f"warning: the compiled graph breaks at {script}:7: " in said
    assert "was compiled 8 times (recompile_limit) and runs uncompiled from here on" in said
    assert "the last change:" in said


def test_a_compiled_run_says_so_and_learns_the_same(
    tiny: Path, run: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    # C++ of the whole step would take a hundred seconds
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    short = ("trainer.max_duration=3ba", f"trainer.run_folder={tmp_path}")
    losses = []
    for name, more in (("plain", ()), ("compiled", ("trainer.compile=true",))):
        code, output = run(tiny, *short, f"run_name={name}", *more)
        assert code == 0, output
        assert ("compiling the step" in output) is bool(more)
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss/total"] for line in lines])
    assert "1 compiled graph;" in output and f"cached in {tmp_path / 'cache'}" in output
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-4)
