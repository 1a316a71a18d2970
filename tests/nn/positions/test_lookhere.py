"""LookHere: fields of view, slopes of heads and blocks, and that nothing unseen is attended."""

import math

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.nn.places import Places
from pospre.nn.positions.lookhere import FIELDS, LookHere, head_views
from pospre.nn.positions.scheme import TransformerDims
from tests.nn.positions.golden import GRID, PLACES

DIMS = TransformerDims(dim=96, num_heads=12, depth=3, grid=GRID)


def lookhere(dims: TransformerDims = DIMS, **options: object) -> LookHere:
    scheme = LookHere(dims, **options)  # type: ignore[arg-type]
    scheme.reset_parameters()
    return scheme


def as_read(bias: Tensor) -> list[float]:
    """Return −bias, ∞ where nothing is seen, rounded to four places."""
    return [math.inf if value < -1e30 else round(-value, 4) + 0.0 for value in bias.tolist()]


def row(text: str) -> list[float]:
    return [math.inf if each == "∞" else float(each) for each in text.split()]


@pytest.mark.parametrize(
    ("fields", "head", "wanted"),
    [
        ("halves-none", 0, ".7071 .5 .7071 1.118 .5 0 .5 1 ∞ ∞ ∞ ∞"),
        ("halves-none", 2, ".7071 .5 ∞ ∞ .5 0 ∞ ∞ .7071 .5 ∞ ∞"),
        ("eighths1-eighths2-none", 4, "∞ .5 .7071 ∞ ∞ 0 ∞ ∞ ∞ ∞ ∞ ∞"),
    ],
)
def test_fields_of_token_5(fields: str, head: int, wanted: str) -> None:
    scheme = lookhere(fields=fields, layer_slopes=(1.0, 1.0))
    assert as_read(scheme.distances(PLACES, 0)[0, head, 5]) == row(wanted)


def test_slopes_of_blocks_in_bf16() -> None:
    scheme = lookhere()
    first = scheme.distances(PLACES, 0)[0, 0, 5, :8].bfloat16()
    assert as_read(first) == row("1.0625 .75 1.0625 1.6797 .75 0 .75 1.5")
    seen = scheme.distances(PLACES, 0) > -1e30
    for layer, scale in ((1, 1.0), (2, 0.5)):
        other, own = scheme.distances(PLACES, layer), scheme.distances(PLACES, 0)
        torch.testing.assert_close(other[seen] * 1.5, own[seen] * scale)
    twice = lookhere(slope=2.0).distances(PLACES, 0)
    torch.testing.assert_close(twice[seen], 2 * scheme.distances(PLACES, 0)[seen])


def test_every_field_is_the_cells_on_its_side() -> None:
    """Count by angles: a key lies in a field if its direction does, borders included."""
    middles = {"up": 90, "down": 270, "left": 180, "right": 0}
    corners = {"up left": 135, "up right": 45, "down left": 225, "down right": 315}
    order = ("up", "down", "left", "right")
    wanted: dict[str, list[tuple[float, float]]] = {
        "halves": [(middles[name], 90) for name in order],
        "triangles": [(middles[name], 45) for name in order],
        "corners": [(angle, 45) for angle in corners.values()],
        "eighths1": [(112.5, 22.5), (247.5, 22.5), (157.5, 22.5), (22.5, 22.5)],
        "eighths2": [(67.5, 22.5), (292.5, 22.5), (202.5, 22.5), (337.5, 22.5)],
    }
    dims = DIMS._replace(num_heads=4, grid=(5, 5))
    for name, fields in wanted.items():
        seen = lookhere(dims, fields=name).distances(Places((5, 5)), 0)[0, :, 12] > -1e30
        for head, (middle, half) in enumerate(fields):
            for cell in range(25):
                down, across = cell // 5 - 2, cell % 5 - 2
                off = (math.degrees(math.atan2(-down, across)) - middle + 180) % 360 - 180
                expected = cell == 12 or abs(off) <= half + 1e-6
                assert bool(seen[head, cell]) == expected, (name, head, cell)


def test_heads_are_shared_out_in_fours() -> None:
    def runs(fields: str, heads: int) -> list[int]:
        found = head_views(fields, heads)
        assert len(found) == heads
        names, start, counts = fields.split("-"), 0, []
        for name in names:
            own = 0
            while start + own < heads and found[start + own][0] == FIELDS[name][own % 4]:
                own += 1
            counts.append(own)
            start += own
        return counts

    assert runs("halves-none", 12) == [8, 4] and runs("halves-none", 16) == [8, 8]
    assert runs("corners-triangles-none", 12) == [4, 4, 4]
    assert runs("corners-triangles-none", 16) == [8, 4, 4]
    assert runs("halves-none", 6) == [4, 2] and runs("corners", 16) == [16]
    assert runs("halves-corners-triangles-none", 16) == [4, 4, 4, 4]


def test_the_default_goes_with_any_number_of_heads() -> None:
    for heads, fields in ((12, "halves-none"), (6, "halves-none"), (3, "halves")):
        own = lookhere(DIMS._replace(num_heads=heads))
        assert own.heads == head_views(fields, heads)
    other = own.companion(DIMS)
    assert isinstance(other, LookHere) and other.heads == head_views("halves-none", 12)


def test_slopes_of_heads_begin_anew_with_each_name() -> None:
    def slopes(fields: str, heads: int) -> list[float]:
        return [slope for _, slope in head_views(fields, heads)]

    none = [0.25, 0.0625, 0.015625, 0.00390625]
    assert slopes("halves-none", 12) == [0.5] * 4 + [0.25] * 4 + none
    assert slopes("halves-none", 16)[8:] == [each for each in none for _ in range(2)]
    assert slopes("halves-none", 6) == [0.5] * 4 + none[:2]
    assert slopes("corners-triangles", 8) == [0.5] * 8


def test_what_is_unseen_has_weight_0_and_no_row_is_empty() -> None:
    dims = DIMS._replace(num_heads=8)
    scheme = lookhere(dims, fields="eighths1-eighths2")
    bias = scheme.distances(PLACES, 0)
    for kind in (torch.float32, torch.bfloat16, torch.float16):
        weights = (3 * torch.randn(bias.shape) + bias).to(kind).float().softmax(-1)
        assert weights[bias < -1e30].eq(0).all() and weights.isfinite().all()
    assert bias.diagonal(dim1=-2, dim2=-1).eq(0).all()
    told = Places(GRID, known=torch.arange(12)[None] != 3)
    terms = next(scheme.layer_terms(told))
    assert terms.bias is not None
    assert terms.bias[:, :, 3].eq(0).all() and terms.bias[:, :, :, 3].eq(0).all()
    assert torch.equal(terms.bias[:, :, 4:, 4:], bias[:, :, 4:, 4:])


def test_borders_of_fields_are_the_same_in_boxes() -> None:
    scheme = lookhere(DIMS._replace(grid=(9, 9)), fields="eighths1-eighths2-none")
    box = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1 / 9, 1 / 3, 4 / 9, 2 / 3]])
    whole = scheme.distances(Places((9, 9)).within(box[:1]), 0)
    torch.testing.assert_close(whole, scheme.distances(Places((9, 9)), 0))
    part = scheme.distances(Places((3, 3)).within(box[1:]), 0)
    cells = torch.tensor([[9 * row + col for row in (3, 4, 5) for col in (1, 2, 3)]])
    torch.testing.assert_close(part, scheme.distances(Places((9, 9), cells), 0))


def test_a_decoder_shares_the_fields_among_its_heads_or_says_why_not() -> None:
    scheme = lookhere(fields="corners-triangles-none", slope=2.0)
    other = scheme.companion(DIMS._replace(num_heads=16, depth=8))
    assert isinstance(other, LookHere)
    other.reset_parameters()
    assert other.slopes.tolist()[:8] == [1.0] * 4 + [0.5] * 4
    with pytest.raises(UserError, match=r"lookhere\.fields = .* names 3 .* decoder has 8 heads"):
        scheme.companion(DIMS._replace(num_heads=8))
