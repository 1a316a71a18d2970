"""A table of positions: read at its cells, at another grid, in boxes; and what is forgotten."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed
from torch import Tensor

from pospre.nn.build import build_encoder
from pospre.nn.places import Places
from pospre.nn.positions.scheme import TransformerDims
from pospre.nn.positions.table import Resampling, Table, resample_positions

DIMS = TransformerDims(8, 2, 1, (3, 4), has_class_token=True, num_registers=2)


@pytest.fixture
def table() -> Table:
    torch.manual_seed(0)
    made = Table(DIMS)
    made.reset_parameters()
    return made


def vectors(table: Table, places: Places) -> Tensor:
    found = table.embed(places)
    assert found is not None
    return found


def test_each_token_has_the_row_of_its_cell(table: Table) -> None:
    cells = torch.tensor([[5, 0, 11], [1, 1, 7]])
    own = table.pos_embed[0, 3:]
    assert torch.equal(vectors(table, Places((3, 4))), own[None])
    assert torch.equal(vectors(table, Places((3, 4), cells)), own[cells])
    tokens = torch.randn(2, 3, 8)
    assert torch.equal(table.added(tokens, Places((3, 4), cells)), tokens + own[cells])
    assert torch.equal(table.prefix(), table.pos_embed[:, :3])
    assert table.prefix()[:, 0].any() and not table.prefix()[:, 1:].any()


def test_a_forgotten_token_has_the_mark_or_nothing_in_place_of_its_row(table: Table) -> None:
    cells, tokens = torch.tensor([[5, 0, 11], [1, 1, 7]]), torch.randn(2, 3, 8)
    hidden = torch.tensor([[True, False, False], [False, True, True]])
    mark = torch.randn(1, 1, 8, requires_grad=True)
    places = Places((3, 4), cells)
    whole = table.added(tokens, places)
    for given, instead in ((mark, tokens + mark), (None, tokens)):
        found = table.added(tokens, places.forget(hidden, given))
        assert torch.equal(found, torch.where(hidden.unsqueeze(-1), instead, whole))
    (gradient,) = torch.autograd.grad(table.added(tokens, places.forget(hidden, mark)).sum(), mark)
    assert torch.equal(gradient, torch.full((1, 1, 8), 3.0))


def test_a_box_reads_the_table_as_torch_samples_a_picture(table: Table) -> None:
    box = torch.tensor([[0.1, 0.0, 0.7, 0.9], [0.8, 0.2, 0.1, 0.6], [-0.2, 0.3, 0.5, 1.1]])
    picture = table.pos_embed[0, 3:].unflatten(0, (3, 4)).permute(2, 0, 1).expand(3, -1, -1, -1)
    places = Places((5, 2)).within(box)
    points = places.coordinates(box.device).flip(-1).unflatten(1, (5, 2)) * 2 - 1
    for kind in ("bicubic", "bilinear"):
        table.resampling = kind
        theirs = F.grid_sample(picture, points, kind, "border", align_corners=False)
        ours = vectors(table, places)
        torch.testing.assert_close(ours, theirs.flatten(2).transpose(1, 2), atol=1e-6, rtol=1e-5)
        cells = torch.tensor([[3, 9], [0, 1], [8, 2]])
        some = vectors(table, Places((5, 2), cells).within(box))
        assert torch.equal(some, torch.stack([ours[row, cells[row]] for row in range(3)]))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(vectors(table, places), ours)


@pytest.mark.parametrize("change", ["none", "trained", "loaded"])
def test_an_enlarged_table_keeps_the_prefix_and_is_read_from_the_old_one(
    table: Table, change: str
) -> None:
    anew, other = change == "none", table.pos_embed.detach() + 0.01
    if change == "trained":
        table.pos_embed.data.copy_(other)
    elif change == "loaded":
        table.load_state_dict({"pos_embed": other})
    own, prefix, larger = table.at((3, 4)).clone(), table.prefix().clone(), table.at((6, 8))
    table.enlarge((6, 8), resampling="bicubic")
    assert table.grid == (6, 8) and table.pos_embed.requires_grad
    assert torch.equal(table.prefix(), prefix)
    assert torch.equal(table.pos_embed[0, 3:], larger) != anew
    if anew:
        assert float(table.pos_embed[0, 3:].std()) == pytest.approx(0.02, rel=0.1)
    assert vectors(table, Places((3, 4))).shape == (1, *own.shape)


@pytest.mark.parametrize("new", [(16, 16), (17, 23), (37, 40), (50, 9)])
def test_a_table_is_resampled_as_each_family_does(new: tuple[int, int]) -> None:
    table = torch.randn(37 * 37, 24, generator=torch.Generator().manual_seed(0))
    picture = table.view(1, 37, 37, 24).permute(0, 3, 1, 2)
    dino = [(count + 0.1) / 37 for count in new]
    published: dict[Resampling, torch.Tensor] = {
        "bicubic": F.interpolate(picture, new, mode="bicubic"),
        "offset": F.interpolate(picture, scale_factor=dino, mode="bicubic"),
        "antialiased": resample_abs_pos_embed(
            table[None], [*new], [37, 37], num_prefix_tokens=0
        ).permute(0, 2, 1),
    }
    for how, theirs in published.items():
        ours = resample_positions(table, (37, 37), new, how)
        torch.testing.assert_close(ours, theirs.flatten(2)[0].T, atol=1e-4, rtol=0)
    assert torch.equal(resample_positions(table, (37, 37), (37, 37), "offset"), table)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = resample_positions(table, (37, 37), new)
    assert torch.equal(mixed, resample_positions(table, (37, 37), new))


def test_views_of_another_size_get_the_table_resampled() -> None:
    encoder = build_encoder("vit_tiny16", image_size=(48, 64), depth=1, positions="learned")
    table = encoder.positions
    assert isinstance(table, Table)
    small = table.at((2, 2))
    picture = table.pos_embed[0, 1:].unflatten(0, (3, 4)).permute(2, 0, 1)[None]
    torchs = F.interpolate(picture, size=(2, 2), mode="bicubic")
    torch.testing.assert_close(small, torchs[0].flatten(1).T, atol=1e-6, rtol=1e-6)
    other = build_encoder("vit_tiny16", image_size=32, depth=1, positions="learned")
    whole = torch.cat([table.prefix(), small[None]], dim=1)
    other.load_state_dict({**encoder.state_dict(), "positions.pos_embed": whole})
    images = torch.randn(2, 3, 32, 32)
    assert encoder(images).shape == (2, 1 + 4, 192)
    torch.testing.assert_close(encoder(images), other(images), atol=1e-6, rtol=1e-5)
    constant = resample_positions(torch.ones(12, 5), (3, 4), (7, 2))
    torch.testing.assert_close(constant, torch.ones(14, 5))
