import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_prep.plan.plan import Block, Share, cut_blocks, parse_share, ranges
from pospre.errors import UserError


def cut(sizes: list[int], shard_mb: float | None) -> list[Block]:
    return cut_blocks([f"{number}.jpg" for number in range(len(sizes))], sizes, shard_mb)


SIZES = st.lists(st.integers(0, 200_000), min_size=1, max_size=300)


@given(sizes=SIZES, shard_mb=st.none() | st.floats(1e-6, 10.0))
def test_blocks_cover_all_items_in_order(sizes: list[int], shard_mb: float | None) -> None:
    blocks = cut(sizes, shard_mb)
    assert [block.number for block in blocks] == list(range(len(blocks)))
    covered = [index for block in blocks for index in range(block.start, block.stop)]
    assert covered == list(range(len(sizes)))
    assert all(block.start < block.stop for block in blocks)


@given(sizes=SIZES, count=st.integers(1, 20))
def test_shares_cover_all_blocks_in_order(sizes: list[int], count: int) -> None:
    blocks = cut(sizes, 0.05)
    if count > len(blocks):
        with pytest.raises(UserError, match=rf"at most {len(blocks)} parts; a smaller --shard-mb"):
            Share(1, count).of(blocks)
        return
    shares = [Share(number, count).of(blocks) for number in range(1, count + 1)]
    assert [block for share in shares for block in share] == blocks
    assert all(shares)


def test_blocks_are_about_equal() -> None:
    blocks = cut([100_000] * 3000, None)
    sizes = [block.stop - block.start for block in blocks]
    assert len(blocks) == 64 and min(sizes) >= 35 and max(sizes) <= 59  # 47, give or take a quarter
    assert len(cut([100_000] * 100, None)) == 3  # of four megabytes at least
    assert len(cut([100_000] * 100_000, None)) == 150  # of 64 MiB at most
    assert len(cut([100_000] * 100, 2.0)) == 5
    # unknown sizes, and tiny files
    assert len(cut([0] * 100_000, None)) == 150
    assert len(cut([10] * 1_000_000, None)) > 60


@pytest.mark.parametrize("gone", [0, 5000, 9999])
def test_few_blocks_change_when_an_item_goes(gone: int) -> None:
    names, sizes = [f"{n}.jpg" for n in range(10_000)], [80_000 + n % 40_000 for n in range(10_000)]

    def named(names: list[str], sizes: list[int]) -> set[tuple[str, ...]]:
        return {tuple(names[b.start : b.stop]) for b in cut_blocks(names, sizes, 8.0)}

    before = named(names, sizes)
    left = [n for n in range(10_000) if n != gone]
    now = named([names[n] for n in left], [sizes[n] for n in left])
    assert len(before) == 107 and len(now & before) >= 90


def test_parts_are_read_and_ranges_written() -> None:
    assert parse_share("3/16") == Share(3, 16)
    for text in ("", "3", "0/4", "5/4", "1/0", "-1/4", "a/b", "1/2/3"):
        with pytest.raises(UserError, match=r"must be k/n"):
            parse_share(text)
    assert ranges([0, 1, 2, 6]) == "1-3, 7" and ranges([]) == ""
