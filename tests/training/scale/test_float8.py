"""Blocks that multiply in 8 bits: in training alone, with the same parameters."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from composer.devices import Device, DeviceCPU
from torch import nn

from pospre.errors import UserError
from pospre.training.scale import float8
from pospre.training.scale.blocks import blocks_of
from tests.algorithms.cases import Case
from tests.training.tiny_runs import MAE, curve

CASE = Case(("mae",))


def test_blocks_train_in_8_bits_and_are_evaluated_as_before() -> None:
    (plain, _), (model, _), batch = CASE.build(), CASE.build(), CASE.batch()
    float8.convert_blocks(model, emulate=True)  # rounds as a GPU does, on any device
    assert list(model.state_dict()) == list(plain.state_dict())
    kinds = {type(each).__name__ for block in blocks_of(model) for each in block.modules()}
    outside = set(model.modules()) - {m for block in blocks_of(model) for m in block.modules()}
    assert "Float8Linear" in kinds and "Linear" not in kinds
    assert not [each for each in outside if type(each).__name__ == "Float8Linear"]
    expected, found = (each.train()(dict(batch), progress=0.5).loss for each in (plain, model))
    found.backward()
    assert found != expected and float(found) == pytest.approx(float(expected), rel=0.02)
    assert all(each.grad is not None for each in model.encoder.blocks.parameters())
    expected, found = (each.eval()(dict(batch), progress=0.5).loss for each in (plain, model))
    assert torch.equal(found, expected)


def test_narrow_layers_stay() -> None:
    assert float8._is_wide(nn.Linear(48, 16), "") and not float8._is_wide(nn.Linear(40, 16), "")


@pytest.mark.parametrize(("capability", "lacks"), [((9, 0), False), ((8, 0), True)])
def test_which_gpus_can(
    capability: tuple[int, int], lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    found = float8.lacking_float8(cast(Device, type("Gpu", (), {"name": "gpu"})()))
    assert (found == "NVIDIA A100 cannot (compute capability 8.9 or more can)") is lacks


def test_a_cpu_says_that_it_cannot_and_trains_all_the_same(
    tiny: Path, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    options = MAE, "trainer.max_duration=3ba", "trainer.precision=auto"
    assert run(tiny, *options, "run_name=plain")[0] == 0
    code, output = run(tiny, *options, "trainer.float8=true", "trainer.attention=cudnn")
    assert code == 0 and "nothing multiplies in float8, for CPUs cannot" in output
    assert "trainer.attention = cudnn: torch chooses" in output
    assert curve(tmp_path / "runs/tiny") == curve(tmp_path / "runs/plain")
    code, output = run(tiny, "trainer.float8=true", "trainer.precision=fp32")
    assert code == 2 and "trainer.float8 = true needs trainer.precision = amp_bf16" in output


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert float8.lacking_float8(DeviceCPU()) == "CPUs cannot"
    with pytest.raises(UserError, match=r"trainer.float8 needs torchao.*\[float8\]"):
        float8.convert_blocks(CASE.build()[0])
