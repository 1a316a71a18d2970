"""Mixed rotary positions: golden numbers, timm as the oracle, and how frequencies start."""

import math

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingMixed, apply_rot_embed_cat
from torch import Tensor

from pospre.nn.places import Places
from pospre.nn.positions.rotary_mixed import RotaryMixed
from pospre.nn.positions.scheme import TransformerDims, rotate
from tests.nn.positions.golden import DIMS, GRID, PLACES, check, checksum, queries, turned

TWO = TransformerDims(dim=32, num_heads=2, depth=2, grid=GRID)


def golden() -> RotaryMixed:
    scheme = RotaryMixed(TWO)
    with torch.no_grad():
        scheme.freqs.copy_(scheme.directed(torch.tensor([[0.3, 1.1], [2.0, 4.5]])))
    return scheme


def test_frequencies_of_given_directions() -> None:
    across, down = golden().freqs[:, 0, 0]
    wave, other = ".955336 .537225 .302104 .169886", ".29552 .166183 .093452 .052552"
    check(across, f"{wave} " + " ".join(f"-{each}" for each in other.split()))
    check(down, f"{other} {wave}")


def test_angles_and_turned_queries() -> None:
    scheme = golden()
    check(
        scheme.angles(PLACES, 0)[0, 1, 11],
        "3.143203 1.767553 .993968 .558949 -1.76643 -.993337 -.558594 -.314121",
    )
    check(
        scheme.angles(PLACES, 1)[0, 0, 5],
        ".493151 .277319 .155948 .087696 -1.325444 -.745352 -.419142 -.235701",
    )
    query = turned(scheme, queries().expand(1, 2, -1, -1), layer=1, interleaved=True)
    check(torch.tensor(checksum(query)), "-1.739389")


def test_frequencies_start_in_directions_that_are_drawn() -> None:
    scheme = RotaryMixed(TransformerDims(dim=384, num_heads=6, depth=12, grid=(14, 14)))
    torch.manual_seed(0)
    scheme.reset_parameters()
    across, down = scheme.freqs.detach().unflatten(-1, (2, 16))
    magnitude = 10 ** (-torch.arange(16) / 16)
    torch.testing.assert_close(across.hypot(down), magnitude.expand(12, 6, 2, 16))
    angle = torch.atan2(down, across)
    torch.testing.assert_close(angle, angle[..., :1].expand_as(angle))  # one of each head
    turn = (angle[:, :, 1] - angle[:, :, 0]) % (2 * math.pi)
    torch.testing.assert_close(turn, torch.full_like(turn, math.pi / 2))
    drawn = angle[:, :, 0, 0].flatten()
    assert len(drawn.unique()) == 72 and drawn.cos().mean().abs() < 0.25
    before = scheme.freqs.clone()
    scheme.reset_parameters()
    assert not torch.equal(before, scheme.freqs)


@pytest.mark.parametrize("grid", [(14, 14), (5, 9)])
def test_equals_timm(grid: tuple[int, int]) -> None:
    dims = TransformerDims(dim=128, num_heads=2, depth=3, grid=(14, 14))
    theirs = RotaryEmbeddingMixed(128, depth=3, num_heads=2, grid_indexing="xy")
    scheme = RotaryMixed(dims)
    with torch.no_grad():
        scheme.freqs.copy_(theirs.freqs)
    tokens = torch.randn(2, 2, grid[0] * grid[1], 64, generator=torch.Generator().manual_seed(0))
    order = tokens.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)

    def ours(angle: Tensor) -> Tensor:
        turned = rotate(order, (angle.cos(), angle.sin()))
        return turned.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    embeds, found = theirs.get_embed([*grid]), [*scheme.layer_terms(Places(grid))]
    for layer in range(3):
        wanted = apply_rot_embed_cat(tokens, embeds[layer])
        angle = scheme.angles(Places(grid), layer)
        swapped = angle.unflatten(2, grid).transpose(2, 3).flatten(2, 3)
        other_layer = scheme.angles(Places(grid), (layer + 1) % 3)
        unordered = rotate(tokens, (angle.cos(), angle.sin()))
        for wrong in (tokens, ours(swapped), ours(other_layer), unordered):
            assert (wrong - wanted).abs().max() > 0.5
        torch.testing.assert_close(ours(angle), wanted, rtol=0, atol=1e-5)
        rotation = found[layer].rotation
        assert rotation is not None and torch.equal(rotation[0], angle.cos())


def test_a_decoder_has_frequencies_of_its_own_which_learn() -> None:
    scheme = RotaryMixed(DIMS, base=7.0)
    other = scheme.companion(TWO)
    assert isinstance(other, RotaryMixed)
    other.reset_parameters()
    assert other.base == 7.0 and other.freqs.shape == (2, 2, 2, 8)
    sum(other.angles(PLACES, layer).sum() for layer in range(2)).backward()  # type: ignore[union-attr]
    assert other.freqs.grad is not None and other.freqs.grad.ne(0).all()
