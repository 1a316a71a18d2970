"""Places: coordinates in the frame, what moving and forgetting does, and what FSDP2 rounds."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map

from pospre.nn.build import build_encoder
from pospre.nn.places import Places, label_in, mirrored_boxes, view_places

CPU = torch.device("cpu")
SIDES = st.integers(1, 9)


def boxes(*corners: float) -> torch.Tensor:
    return torch.tensor([corners])


def test_a_whole_grid_has_the_centres_of_its_cells() -> None:
    found = Places((2, 3)).coordinates(CPU)
    assert found.shape == (1, 6, 2)
    rows, cols = [1 / 4, 3 / 4], [1 / 6, 3 / 6, 5 / 6]
    expected = torch.tensor([[row, col] for row in rows for col in cols])
    torch.testing.assert_close(found[0], expected)


def test_the_cells_of_a_view_lie_in_its_box() -> None:
    view = Places((2, 2)).within(boxes(0.5, 0.0, 1.0, 0.4))  # x0, y0, x1, y1
    expected = torch.tensor([[0.1, 0.625], [0.1, 0.875], [0.3, 0.625], [0.3, 0.875]])
    torch.testing.assert_close(view.coordinates(CPU)[0], expected)


@settings(max_examples=25)
@given(rows=SIDES, cols=SIDES)
def test_a_mirrored_box_mirrors_the_columns(rows: int, cols: int) -> None:
    upright = Places((rows, cols)).within(boxes(0.2, 0.1, 0.9, 0.6)).coordinates(CPU)
    mirrored = Places((rows, cols)).within(boxes(0.9, 0.1, 0.2, 0.6)).coordinates(CPU)
    columns = upright.unflatten(1, (rows, cols)).flip(2).flatten(1, 2)
    torch.testing.assert_close(mirrored, columns)


@settings(max_examples=25)
@given(rows=SIDES, cols=SIDES, seed=st.integers(0, 99))
def test_the_whole_frame_is_no_box_and_some_cells_are_those_of_all(
    rows: int, cols: int, seed: int
) -> None:
    grid, generator = (rows, cols), torch.Generator().manual_seed(seed)
    frame = boxes(0.0, 0.0, 1.0, 1.0).expand(3, -1)
    whole = Places(grid).within(frame).coordinates(CPU)
    torch.testing.assert_close(whole, Places(grid).coordinates(CPU).expand(3, -1, -1))
    cells = torch.rand(3, rows * cols, generator=generator).argsort(1)[:, : 1 + rows * cols // 2]
    some = Places(grid, cells).within(frame).coordinates(CPU)
    torch.testing.assert_close(some, torch.stack([whole[0, row] for row in cells]))


@settings(max_examples=25)
@given(grid=st.tuples(SIDES, SIDES), seed=st.integers(0, 99))
def test_forgotten_stays_forgotten_and_moved_ones_have_other_cells(
    grid: tuple[int, int], seed: int
) -> None:
    generator, count = torch.Generator().manual_seed(seed), grid[0] * grid[1]
    first, second = torch.rand(2, 3, count, generator=generator) < 0.5
    mark = torch.ones(1, 1, 4)
    places = Places(grid, torch.arange(count).expand(3, -1)).within(torch.rand(3, 4))
    once, twice = places.forget(first, mark), places.forget(first).forget(second, mark)
    assert places.known is None and once.known is not None and twice.known is not None
    assert torch.equal(once.known, ~first) and torch.equal(twice.known, ~(first | second))
    assert once.mark is twice.mark is mark
    order = torch.rand(3, count, generator=generator).argsort(1)
    moved = twice.move(order)
    assert moved.cells is order and moved.known is twice.known and moved.box is places.box
    expected = places.coordinates(CPU).gather(1, order.unsqueeze(-1).expand(-1, -1, 2))
    torch.testing.assert_close(moved.coordinates(CPU), expected)


def test_every_row_is_repeated() -> None:
    places = Places((1, 2), torch.tensor([[0, 1], [1, 0]]), mark=torch.ones(1, 1, 4))
    twice = places.forget(torch.tensor([[True, False], [False, False]]), places.mark).repeat(2)
    assert twice.cells is not None and twice.cells.tolist() == [[0, 1], [0, 1], [1, 0], [1, 0]]
    assert twice.known is not None and twice.known[:, 0].tolist() == [False, False, True, True]
    assert twice.mark is places.mark and twice.box is None


def test_views_lie_where_the_batch_says() -> None:
    box = torch.rand(2, 3, 4)
    found = view_places({"local/field_box": box}, "local", (4, 4))
    assert found.box is not None and torch.equal(found.box, box.flatten(0, 1))
    whole = view_places({"local/field_box": box}, "global", (4, 4))
    assert whole.grid == (4, 4) and whole.box is None and whole.cells is None


def test_fsdp_is_shown_the_mark_and_rounds_no_box(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = Places((4, 4)).within(boxes(0.123456, 0.2, 0.71234, 0.9))
    hidden = places.forget(torch.ones(1, 16, dtype=torch.bool), torch.ones(1, 1, 192))
    assert [leaf.shape for leaf in tree_leaves(hidden)] == [(1, 1, 192)]
    again = tree_map(lambda mark: mark + 1, hidden)
    assert torch.equal(again.mark, torch.full((1, 1, 192), 2.0)) and again.box is places.box
    encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=1)
    mesh, bf16 = init_device_mesh("cpu", (1,)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(encoder, mesh=mesh, mp_policy=bf16)
    seen: list[Places] = []
    monkeypatch.setattr(encoder.positions, "check", seen.append)
    monkeypatch.setattr(encoder.positions, "added", lambda tokens, places: tokens)
    encoder(torch.randn(1, 3, 32, 32), None, places)
    assert seen[0].box is places.box


@pytest.mark.parametrize(
    ("query", "grid", "expected"),
    [
        ((0.5, 0.25, 1.0, 0.75), (2, 2), [15, -1, -1, -1]),
        ((1.0, 0.25, 0.5, 0.75), (2, 2), [-1, 15, -1, -1]),  # mirrored
        ((0.25, 0.0, 0.75, 0.5), (4, 4), [*range(16)]),
        ((0.75, 0.0, 0.25, 0.5), (4, 4), [3, 2, 1, 0, 7, 6, 5, 4, 11, 10, 9, 8, 15, 14, 13, 12]),
    ],
)
def test_a_patch_has_the_cell_of_the_other_view_that_its_centre_lies_in(
    query: tuple[float, ...], grid: tuple[int, int], expected: list[int]
) -> None:
    reference = boxes(0.25, 0.0, 0.75, 0.5)
    assert label_in(reference, (4, 4), boxes(*query), grid)[0].tolist() == expected
    if grid == (2, 2):  # the centre lies on the border of two cells, which are open on the right
        return
    turned = mirrored_boxes(reference, torch.tensor([True]))  # cells are counted from its left
    found = label_in(turned, (4, 4), boxes(*query), grid)[0].tolist()
    assert found == [cell if cell < 0 else cell - cell % 4 + 3 - cell % 4 for cell in expected]
