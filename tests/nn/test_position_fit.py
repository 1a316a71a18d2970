"""Biases in the place of other positions: golden numbers, and what a fit finds again."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.nn.build import build_encoder
from pospre.nn.places import Places
from pospre.nn.position_fit import fit_biases, patch_logits
from pospre.nn.positions import build_positions
from pospre.nn.positions.scheme import Scheme, TransformerDims, centred

LOGITS = torch.tensor([[3.0, 1, 0], [2, 4, 1], [0, 2, 5]])


def fitted(positions: Any, logits_NN: Tensor, grid: tuple[int, int]) -> Scheme:
    dims = TransformerDims(4, 1, 1, grid, has_class_token=True)
    scheme = build_positions(positions, dims)
    with torch.no_grad():
        for each in scheme.parameters():
            each.fill_(7)
    scheme.fit(centred(logits_NN[None]), 0, grid)
    return scheme


@pytest.mark.parametrize(
    ("logits", "slope"),
    [
        (LOGITS, 2.1),
        (LOGITS - torch.eye(3), 1.5),
        (-LOGITS, 0),  # never towards what is far
        (torch.tensor([[0.0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]]), 0.5),
        (torch.tensor([[0.0, -0.5, -1], [-0.5, 0, -0.5], [-1, -0.5, 0]])
         + torch.tensor([3.0, -1, 2]) + torch.tensor([[5.0], [0], [-7]]), 0.5),
    ],
)  # fmt: skip
def test_slopes_by_least_squares(logits: Tensor, slope: float) -> None:
    scheme = fitted({"alibi": {"slopes": "learned"}}, logits, (1, 3))
    assert float(scheme.get_parameter("slope")) == pytest.approx(slope, abs=1e-6)


def test_slopes_on_a_torus() -> None:
    dims = TransformerDims(4, 1, 1, (2, 3))
    plain = build_positions({"torus": {"slopes": "constant"}}, dims)
    plain.reset_parameters()
    distance = plain.distances(Places((2, 3)), 0)
    assert distance is not None and float(distance.min()) == pytest.approx(-1)  # √2 cells
    scheme = fitted({"torus": {"slopes": "learned"}}, 3 * distance[0, 0], (2, 3))
    assert float(scheme.get_parameter("slope")) == pytest.approx(3, abs=1e-5)


def test_a_relative_table_has_the_mean_of_each_offset() -> None:
    table = fitted("relative", LOGITS, (1, 3)).get_parameter("tables.0").flatten()
    expected = torch.tensor([-1.333333, -1, 2, -0.333333, -2, 0, 0, 0])  # query − key; prefix
    torch.testing.assert_close(table, expected, rtol=0, atol=1e-5)


def small(positions: Any) -> Any:
    torch.manual_seed(0)
    return build_encoder("vit_tiny16", image_size=48, depth=2, positions=positions)


@pytest.mark.parametrize("kind", ["alibi", "torus", "relative"])
def test_a_fit_finds_the_biases_again(kind: str) -> None:
    """The original has other biases of the same scheme, in its first block alone."""
    positions: Any = kind if kind == "relative" else {kind: {"slopes": "learned"}}
    original, encoder = small(positions), small(positions)
    encoder.load_state_dict(original.state_dict())
    own = [*original.positions.parameters()]
    with torch.no_grad():
        if kind == "relative":
            for each in own:
                each[: 5 * 5].normal_()
        else:
            own[0].copy_(torch.tensor([[0.5, 1, 2], [0.1, 0.2, 0.3]]))
    images = torch.randn(8, 3, 48, 48)
    share = fit_biases(encoder, original, images)
    assert share > 0.9
    before, after = (centred(patch_logits(each, images)[0]) for each in (original, encoder))
    assert (after - before).square().sum() < 0.05 * before.square().sum()
    if kind != "relative":
        found = encoder.get_parameter("positions.slope")[0]
        torch.testing.assert_close(found, own[0][0], rtol=0, atol=1e-4)


def test_nothing_is_left_of_a_table_in_a_bag_of_patches() -> None:
    """The share that biases explain of a random table is small, but not negative."""
    original = small("learned")
    with torch.no_grad():
        original.positions.pos_embed.normal_()
    encoder = small("relative")
    own = {k: v for k, v in original.state_dict().items() if not k.startswith("positions.")}
    encoder.load_state_dict(own, strict=False)
    assert 0 <= fit_biases(encoder, original, torch.randn(8, 3, 48, 48)) < 0.9


@pytest.mark.parametrize("positions", ["torus", "none", {"torus": {"slopes": "learned"}}])
def test_no_place_is_absolute(positions: Any) -> None:
    """Exact: shifted by whole patches, the features shift too, and the class token stays."""
    encoder = small(positions).eval()
    images = torch.randn(2, 3, 48, 64)
    with torch.no_grad():
        plain, moved = (encoder(each) for each in (images, images.roll((16, 32), (2, 3))))
    torch.testing.assert_close(moved[:, 0], plain[:, 0], rtol=0, atol=1e-4)
    patches = plain[:, 1:].unflatten(1, (3, 4)).roll((1, 2), (1, 2)).flatten(1, 2)
    torch.testing.assert_close(moved[:, 1:], patches, rtol=0, atol=1e-4)
