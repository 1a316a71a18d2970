"""SimMIM: counts, invariants, options, bad input."""

from typing import Any

import torch

from pospre.algorithms.simmim import SimMIM
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.masking import cell_patches
from pospre.nn.vit import as_vit
from tests.algorithms.cases import random_views, tiny_model


def model_and_batch():
    model = tiny_model(SimMIM(mask_cell=16), image_size=48, depth=2)
    return model, model.draw(random_views(side=48))


def test_published_counts_are_30_of_49_cells_and_120_of_196_patches():
    with torch.device("meta"):
        model = PretrainModel(build_encoder("vit_tiny16", depth=1), [SimMIM()], seed=0)
    inputs = {"index": torch.arange(3), "epoch": torch.zeros(3, dtype=torch.int64)}
    model.draw(inputs)
    assert inputs["view/visible"].shape == (3, 76)
    assert inputs["view/hidden"].shape == (3, 120)
    assert inputs["view/masked"].sum(1).tolist() == [120] * 3
    cells = inputs["view/masked"].unflatten(1, (7, 2, 7, 2)).float().mean((2, 4))
    assert set(cells.flatten().tolist()) == {0.0, 1.0}
    assert cells.sum((1, 2)).tolist() == [30] * 3


def test_oblong_cells_hold_their_patches_row_by_row():
    patches = cell_patches(torch.tensor([[0, 3]]), (2, 6), (1, 3))
    assert patches.tolist() == [[0, 1, 2, 9, 10, 11]]


def test_visible_pixels_change_the_prediction_but_not_the_target():
    model, inputs = model_and_batch()
    before = model(inputs)["simmim"]
    images = inputs["view/image"].clone()
    shown = ~inputs["view/masked"].view(4, 1, 1, 6, 6)
    shown = shown.repeat_interleave(8, -1).repeat_interleave(8, -2).expand_as(images)
    images[shown] ^= 255
    after = model(inputs | {"view/image": images})["simmim"]
    assert torch.equal(after["target"], before["target"])
    assert not torch.equal(after["predicted"], before["predicted"])


def test_the_loss_is_the_published_sum_over_masked_pixels_and_channels():
    model, inputs = model_and_batch()
    outputs = model(inputs)
    predicted, target = outputs["simmim"]["predicted"], outputs["simmim"]["target"]
    masked_pixels = inputs["view/masked"].sum() * 64
    expected = (predicted - target).abs().sum() / (masked_pixels + 1e-5) / 3
    torch.testing.assert_close(model.loss(outputs, inputs)["simmim"], expected)


def test_beit_initialisation_is_cut_at_one_deviation_and_shrinks_with_depth():
    encoder = as_vit(build_encoder("vit_tiny16", image_size=48, depth=4, init="beit"))
    assert encoder.cls_token is not None and encoder.cls_token.abs().max() <= 0.02
    blocks: Any = encoder.blocks
    assert blocks[0].attn.qkv.weight.abs().max() <= 0.02
    for depth, block in enumerate(blocks, start=1):
        for last in (block.attn.proj, block.mlp.fc2):
            largest = 0.02 / (2 * depth) ** 0.5
            assert 0.95 * largest < last.weight.abs().max() <= largest * (1 + 1e-6)
