"""Multi-block masks: fixed counts and every edge in ours, the published habits in ``official``."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pospre import draws
from pospre.algorithms.ijepa.blocks import ATTEMPTS, BlockMasks, Blocks, draw_blocks, draw_official

PUBLISHED = Blocks((14, 14), 4, (0.15, 0.2), (0.75, 1.5), (0.85, 1.0), 29, 49)


def keys(count: int, epoch: int = 0) -> Tensor:
    return draws.sample_keys(0, epoch, torch.arange(count), 0, "ijepa/blocks")


def all_tokens(masks: BlockMasks) -> Tensor:
    return torch.cat([masks.context.flatten(1), masks.targets.flatten(1)], dim=1)


@pytest.mark.parametrize("grid", [(8, 8), (14, 14), (16, 16), (6, 20)])
def test_counts_are_fixed_and_context_and_targets_are_disjoint(grid: tuple[int, int]) -> None:
    num = grid[0] * grid[1]
    blocks = replace(PUBLISHED, grid=grid, target_tokens=int(0.15 * num), context_tokens=num // 4)
    masks = draw_blocks(keys(512), blocks)
    assert masks.context.shape == (512, num // 4)
    assert masks.targets.shape == (512, 4, int(0.15 * num))
    for index in (masks.context, masks.targets):
        assert int(index.min()) >= 0 and int(index.max()) < num
        assert (index.diff(dim=-1) > 0).all()  # sorted, and none twice
    assert not (masks.context[:, :, None] == masks.targets.flatten(1)[:, None]).any()


def test_every_token_is_context_and_target_at_times_also_the_last_row_and_column() -> None:
    masks = draw_blocks(keys(2048), PUBLISHED)
    for index in (masks.context, masks.targets):
        assert len(index.unique()) == 196
    context = torch.bincount(masks.context.flatten(), minlength=196).view(14, 14).float()
    torch.testing.assert_close(context[0].mean(), context[-1].mean(), rtol=0.05, atol=0)
    torch.testing.assert_close(context[:, 0].mean(), context[:, -1].mean(), rtol=0.05, atol=0)


def test_scale_and_ratio_are_independent_and_differ_between_blocks() -> None:
    masks = draw_blocks(keys(256), PUBLISHED)
    heights = (masks.targets // 14).amax(-1) - (masks.targets // 14).amin(-1) + 1
    assert set(heights.unique().tolist()) >= {5, 6, 7}
    assert (heights.amax(1) > heights.amin(1)).float().mean() > 0.5


def test_whole_layouts_are_drawn_again_and_at_last_the_targets_share_one_spot() -> None:
    tight = replace(PUBLISHED, context_tokens=100)
    masks = draw_blocks(keys(256), tight)
    again, crowded = (masks.failed > 0).float().mean(), masks.failed == ATTEMPTS
    assert again > 0.5 and crowded.any() and not crowded.all()
    assert masks.context.shape == (256, 100)
    assert not (masks.context[:, :, None] == masks.targets.flatten(1)[:, None]).any()
    reach = (masks.targets // 14).amax((1, 2)) - (masks.targets // 14).amin((1, 2))
    assert (reach[crowded] < 8).all() and (reach[~crowded] >= 8).any()


def test_published_block_sizes_and_places() -> None:
    sizes = set()
    for epoch in range(60):
        masks = draw_official(keys(4, epoch), PUBLISHED)
        rows, cols = masks.targets // 14, masks.targets % 14
        high, wide = (a.amax(-1) - a.amin(-1) + 1 for a in (rows, cols))
        assert (high == high[0, 0]).all() and (wide == wide[0, 0]).all()
        assert int((high * wide)[0, 0]) == masks.targets.shape[2]
        sizes.add((int(high[0, 0]), int(wide[0, 0])))
        assert int((all_tokens(masks) // 14).max()) <= 12  # never the last row
        assert int((all_tokens(masks) % 14).max()) <= 12  # nor the last column
        assert (masks.context.diff(dim=-1) > 0).all()
        assert not (masks.context[:, :, None] == masks.targets.flatten(1)[:, None]).any()
    assert sizes == {(5, 6), (6, 5), (6, 6), (7, 5), (8, 5)}


def test_published_context_block_is_always_the_same_corner() -> None:
    alone = [draw_official(keys(1, epoch), PUBLISHED) for epoch in range(200)]
    for masks in alone:
        corner = torch.zeros(14, 14, dtype=torch.bool)
        corner[:13, :13] = True
        corner.view(-1)[masks.targets.flatten()] = False
        assert torch.equal(masks.context[0], corner.flatten().nonzero()[:, 0])
    assert sum(masks.context.shape[1] for masks in alone) / 200 == pytest.approx(83, abs=4)


def test_published_redraws_relax_the_last_targets_first() -> None:
    # on a small grid four blocks often leave ten tokens or fewer of a context block
    crowded = Blocks((10, 10), 4, (0.3, 0.4), (0.75, 1.5), (0.3, 0.4), 30, 25)
    masks = draw_official(keys(256), crowded)
    relaxed = masks.failed >= 20
    assert relaxed.any() and masks.context.shape[1] > 10
    context = masks.context[:, :, None]
    first = (context == masks.targets[:, None, 0]).any((1, 2))
    last = (context == masks.targets[:, None, 3]).any((1, 2))
    assert not last[~relaxed].any() and last[relaxed].any()
    assert not first[masks.failed < 80].any()
