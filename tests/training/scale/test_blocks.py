"""Blocks that are computed again, and blocks that multiply in 8 bits: the same parameters."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from composer.devices import Device, DeviceCPU
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.block import Block
from pospre.nn.projections import UnbiasedKeys
from pospre.training.scale import blocks
from pospre.training.scale.blocks import blocks_of, recompute_blocks
from tests.algorithms.cases import Case, written
from tests.training.tiny_runs import MAE, curve

# with a bias of attention, which each block is told; the others are told nothing
DROPPING = Case(
    ("supervised",), encoder={"drop_path": 0.5, "dropout": 0.3, "positions": "relative"}
)
CASES = (DROPPING, Case(("ijepa", "stop")), Case(("dinov2", "masked_position")))
CASE = Case(("mae",))


def gradients(model: PretrainModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the loss and every gradient of a step in training."""
    inputs = written(model.train(), batch)
    loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    named = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_blocks_give_the_same_and_keep_less(case: Case, offload: bool) -> None:
    plain, kept = case.build(), case.build()
    recompute_blocks(kept, offload=offload)
    assert list(kept.state_dict()) == list(plain.state_dict())
    (expected, all_bytes), (found, few_bytes) = (
        counted(model, case.batch()) for model in (plain, kept)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert few_bytes < 0.6 * all_bytes


def counted(model: PretrainModel, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """Return ``gradients``, and the bytes that the forward pass kept for them."""
    kept: list[int] = []

    def count(value: Tensor) -> Tensor:
        kept.append(value.nbytes)
        return value

    with saved_tensors_hooks(count, lambda value: value):
        found = gradients(model, batch)
    return found, sum(kept)


def test_a_block_is_run_twice_where_it_is_trained_and_the_teachers_once() -> None:
    model = CASES[1].build()
    runs: dict[str, int] = {}
    for name, module in model.named_modules():
        if module in blocks_of(model):
            module.attn.register_forward_hook(
                lambda *_, name=name: runs.update({name: runs.get(name, 0) + 1})
            )
    recompute_blocks(model, offload=False)
    gradients(model, CASES[1].batch())
    assert {name.split(".")[0]: count for name, count in runs.items()} == {
        "encoder": 2,
        "objectives": 2,
        "teacher": 1,
    }


def test_swin_has_blocks_too() -> None:
    from pospre.nn.encoder_options import EncoderOptions
    from pospre.nn.swin.encoder import SwinEncoder

    encoder = SwinEncoder(EncoderOptions("swin_tiny", image_size=256, init="trunc_normal"))
    found = [module for module in encoder.modules() if encoder.fsdp_wrap_fn(module)]
    assert len(found) == encoder.depth and all(isinstance(block, nn.Module) for block in found)


def test_blocks_train_in_8_bits_and_are_evaluated_as_before() -> None:
    plain, model, batch = CASE.build(), CASE.build(), CASE.batch()
    blocks.convert_blocks(model, emulate=True)  # rounds as a GPU does, on any device
    assert list(model.state_dict()) == list(plain.state_dict())
    kinds = {type(each).__name__ for block in blocks_of(model) for each in block.modules()}
    outside = set(model.modules()) - {m for block in blocks_of(model) for m in block.modules()}
    assert "Float8Linear" in kinds and "Linear" not in kinds
    assert not [each for each in outside if type(each).__name__ == "Float8Linear"]
    expected, found = (each.train()(dict(batch), progress=0.5).loss for each in (plain, model))
    found.backward()
    assert found != expected and float(found) == pytest.approx(float(expected), rel=0.02)
    assert all(each.grad is not None for each in model.vit.blocks.parameters())
    expected, found = (each.eval()(dict(batch), progress=0.5).loss for each in (plain, model))
    assert torch.equal(found, expected)


def test_narrow_layers_stay_and_so_do_keys_without_bias() -> None:
    assert blocks._is_wide(nn.Linear(48, 16), "") and not blocks._is_wide(nn.Linear(40, 16), "")
    model, batch = CASE.build(), CASE.batch()
    expected = model.eval()(dict(batch), progress=0.5).loss
    for block in model.vit.blocks:
        assert isinstance(block, Block)
        block.attn.qkv.__class__ = UnbiasedKeys
        nn.init.ones_(block.attn.qkv.bias.view(3, -1)[1])
    blocks.convert_blocks(model, emulate=True)
    assert type(model.vit.blocks[0].get_submodule("attn.qkv")) is UnbiasedKeys
    assert torch.equal(model.eval()(dict(batch), progress=0.5).loss, expected)  # it had none


@pytest.mark.parametrize(("capability", "lacks"), [((9, 0), False), ((8, 0), True)])
def test_which_gpus_can(
    capability: tuple[int, int], lacks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100")
    found = blocks.lacking_float8(cast(Device, type("Gpu", (), {"name": "gpu"})()))
    assert (found == "NVIDIA A100 has less than compute capability 8.9") is lacks


def test_a_cpu_says_that_it_cannot_and_trains_all_the_same(
    tiny: Path, run: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    options = MAE, "trainer.max_duration=3ba", "trainer.precision=auto"
    assert run(tiny, *options, "run_name=plain")[0] == 0
    code, output = run(tiny, *options, "trainer.float8=true", "trainer.attention=cudnn")
    assert code == 0 and "trainer.float8 = true has no effect: CPUs cannot multiply" in output
    assert "trainer.attention = cudnn has no effect" in output
    assert curve(tmp_path / "runs/tiny") == curve(tmp_path / "runs/plain")


def test_without_torchao_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    assert blocks.lacking_float8(DeviceCPU()) == "CPUs cannot multiply in float8"
    with pytest.raises(UserError, match=r"trainer.float8 needs torchao.*\[float8\]"):
        blocks.convert_blocks(CASE.build())
