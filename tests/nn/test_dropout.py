"""Dropout from the samples' keys: rate, mean and variance, and what it does not depend on."""

from dataclasses import replace

import pytest
import torch

from pospre.algorithms.droppos import DropPos
from pospre.batch import Batch
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.nn.block import dropout, dropout_keys
from pospre.nn.build import build_encoder
from pospre.nn.vit import Encoder, as_vit

KEYS = torch.arange(64) * 7919


def small(rate: float = 0.5, depth: int = 2) -> Encoder:
    torch.manual_seed(0)
    made = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=depth, dropout=rate)
    return as_vit(made)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.999999])
def test_rate_mean_and_variance(rate: float) -> None:
    ones = torch.ones(64, 99, 33)
    dropped = dropout(ones, KEYS, rate, index=0)
    exact = min(round(rate * 2**16), 2**16 - 1) / 2**16
    assert exact == pytest.approx(rate, abs=2**-16)
    deviation = (exact * (1 - exact) / ones.numel()) ** 0.5
    assert float((dropped == 0).float().mean()) == pytest.approx(exact, abs=4 * deviation)
    assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - exact)])
    if rate < 0.9:
        assert float(dropped.mean()) == pytest.approx(1, rel=0.01)
        assert float(dropped.var()) == pytest.approx(exact / (1 - exact), rel=0.01)


def test_every_element_is_dropped_alike_and_alone() -> None:
    kept = (dropout(torch.ones(64, 99, 33), KEYS, 0.5, index=0) > 0).float()
    for axes in ((0, 1), (0, 2), (1, 2)):
        mean = kept.mean(axes)
        assert float((mean - 0.5).abs().max()) < 5 * 0.5 / (kept.numel() / mean.numel()) ** 0.5
    centred = (kept - 0.5).flatten(1)
    for step in (1, 2, 3, 4, 33):  # within a word of draws and beyond, within a token and beyond
        product = (centred[:, step:] * centred[:, :-step]).mean()
        assert abs(float(product)) < 0.25 * 4 / kept.numel() ** 0.5


def test_only_the_key_and_the_place_count() -> None:
    tokens = torch.randn(64, 10, 8)
    whole = dropout(tokens, KEYS, 0.5, index=1)
    assert torch.equal(dropout(tokens[5:8], KEYS[5:8], 0.5, index=1), whole[5:8])
    masks = [
        dropout(torch.ones(64, 10, 8), key, 0.5, index=place) > 0
        for key in (KEYS, dropout_keys(KEYS, 0), dropout_keys(KEYS, 1))
        for place in (0, 1, 2)
    ]
    for number, mask in enumerate(masks):
        for other in masks[:number]:
            assert float((mask == other).float().mean()) == pytest.approx(0.5, abs=0.03)
    half = dropout(tokens.bfloat16(), KEYS, 0.5, index=1)
    assert half.dtype == torch.bfloat16 and torch.equal(half == 0, whole == 0)


def test_the_encoder_drops_by_key_only() -> None:
    encoder = small()
    images = torch.randn(6, 3, 32, 32)
    keys = KEYS[:6]
    torch.manual_seed(1)
    first = encoder(images, keys_B=keys)
    torch.manual_seed(2)
    assert torch.equal(encoder(images, keys_B=keys), first)
    torch.testing.assert_close(encoder(images[2:4], keys_B=keys[2:4]), first[2:4])
    bare = encoder(images)
    assert not torch.allclose(bare, first) and torch.equal(bare, small(0.0)(images))
    first.sum().backward()


def test_every_pass_and_view_drops_on_its_own_and_evaluations_drop_nothing() -> None:
    model = PretrainModel(small(), [DropPos(mask_ratio=0.0, decoder_depth=1)], seed=3)
    model.layout = replace(
        model.layout, passes={"student": EncoderPass(), "affinity": EncoderPass(grad=False)}
    )
    image = torch.randn(1, 1, 3, 32, 32).expand(2, 2, -1, -1, -1)
    batch: Batch = {"index": torch.tensor([4, 5]), "epoch": torch.zeros(2, dtype=torch.int64)}
    rows = [*model.run_pass("student", image, batch), *model.run_pass("affinity", image, batch)]
    for number, row in enumerate(rows):
        assert not any(torch.allclose(row, other, atol=0.1) for other in rows[:number])
    model.eval()
    passed = model.run_pass("student", image, batch)
    torch.testing.assert_close(passed[0], model.encoder(image[0, :1])[0], atol=1e-5, rtol=1e-5)


def test_compiled_it_is_the_same() -> None:
    encoder, images = small(depth=1), torch.randn(4, 3, 32, 32)
    compiled = torch.compile(encoder, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(images, keys_B=KEYS[:4]), encoder(images, keys_B=KEYS[:4]), atol=1e-5, rtol=1e-5
    )
