"""Blocks that are computed again: the same losses and gradients."""

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.training.scale.blocks import blocks_of, recompute_blocks
from tests.algorithms.cases import Case, written

# with a bias of attention, which each block is told; the others are told nothing
DROPPING = Case(
    ("supervised",), encoder={"drop_path": 0.5, "dropout": 0.3, "positions": "relative"}
)
CASES = (DROPPING, Case(("ijepa", "stop")), Case(("dinov2", "masked_position")))


def gradients(
    model: PretrainModel, algorithms: list[PretrainAlgorithm], batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the loss and every gradient of a step in training."""
    inputs = written(model.train(), algorithms, batch)
    loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    named = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **named}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_blocks_give_the_same_and_keep_less(case: Case, offload: bool) -> None:
    plain, kept = case.build(), case.build()
    recompute_blocks(kept[0], offload=offload)
    assert list(kept[0].state_dict()) == list(plain[0].state_dict())
    (expected, all_bytes), (found, few_bytes) = (
        counted(model, algorithms, case.batch()) for model, algorithms in (plain, kept)
    )
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    assert few_bytes < 0.6 * all_bytes


def counted(
    model: PretrainModel, algorithms: list[PretrainAlgorithm], batch: dict[str, Tensor]
) -> tuple[dict[str, Tensor], int]:
    """Return ``gradients``, and the bytes that the forward pass kept for them."""
    kept: list[int] = []

    def count(value: Tensor) -> Tensor:
        kept.append(value.nbytes)
        return value

    with saved_tensors_hooks(count, lambda value: value):
        found = gradients(model, algorithms, batch)
    return found, sum(kept)


def test_a_block_is_run_twice_where_it_is_trained_and_the_teachers_once() -> None:
    model, algorithms = CASES[1].build()
    runs: dict[str, int] = {}
    for name, module in model.named_modules():
        if module in blocks_of(model):
            module.attn.register_forward_hook(
                lambda *_, name=name: runs.update({name: runs.get(name, 0) + 1})
            )
    recompute_blocks(model, offload=False)
    gradients(model, algorithms, CASES[1].batch())
    assert {name.split(".")[0]: count for name, count in runs.items()} == {
        "encoder": 2,
        "objectives": 2,
        "teacher": 1,
    }


def test_swin_has_blocks_too() -> None:
    from pospre.nn.options import EncoderOptions
    from pospre.nn.swin.encoder import SwinEncoder

    encoder = SwinEncoder(EncoderOptions("swin_tiny", image_size=256, init="trunc_normal"))
    found = [module for module in encoder.modules() if encoder.fsdp_wrap_fn(module)]
    assert len(found) == encoder.depth and all(isinstance(block, nn.Module) for block in found)
