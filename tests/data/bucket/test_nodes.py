"""Several machines, each with a cache of its own: what each of them fetches from the bucket."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pospre.data.loader import ViewLoader, build_loader
from pospre.data.order import epoch_order
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.recipe.recipe import recipe_from_dict
from pospre.training.data import build_data, describe_data_volume
from tests.data.buckets import ADDRESS, OPEN, used

BATCH = 8  # of all ranks


@pytest.fixture
def many(upload: Callable[..., Any], sharded: Callable[..., Path]) -> list[int]:
    """Serve sixteen shards or so of 160 samples; give their sizes."""
    path = sharded(160, 0.04)
    upload(path)
    sizes = [shard.stat().st_size for shard in path.glob("*.mds")]
    assert 12 <= len(sizes) <= 20
    return sizes


def node_loaders(
    folder: Path, node: int, nodes: int, *, ranks: int = 1, **options: Any
) -> list[ViewLoader]:
    """Return the loaders of one machine's ranks."""
    order = {} if options.get("order") == "random" else {"order": "windows", "window": 32}
    settings = {**order, "seed": 1, "num_workers": 1, **options}
    loaders = [
        build_loader(
            ADDRESS,
            views=[ViewGroup("view", 1, (8, 8))],
            batch_size=BATCH // (nodes * ranks),
            rank=rank,
            world_size=nodes * ranks,
            nodes=nodes,
            cache_dir=folder / f"node{node}",
            **settings,
        )
        for rank in range(node * ranks, (node + 1) * ranks)
    ]
    OPEN.extend(loader.reader for loader in loaders)  # type: ignore[misc]
    return loaders


def fetched(folder: Path, nodes: int, **options: Any) -> list[list[int]]:
    """Return the bytes that each machine fetches in each of two epochs."""
    found = []
    for node in range(nodes):
        (loader,) = node_loaders(folder, node, nodes, **options)
        before, epochs = 0, []
        for _ in range(2):
            for _ in loader:
                pass
            epochs.append(loader.reader.downloaded - before)  # type: ignore[attr-defined]
            before += epochs[-1]
        found.append(epochs)
    return found


@pytest.mark.parametrize(("order", "nodes"), [("windows", 4), ("random", 2)])
def test_each_machine_fetches_its_part_once(
    many: list[int], tmp_path: Path, order: str, nodes: int
) -> None:
    found = fetched(tmp_path, nodes, shard_groups=4, order=order)
    assert [second for _, second in found] == [0] * nodes
    cut = max(many)  # at most one at each border
    assert all(first <= sum(many) / nodes + 2 * cut for first, _ in found)
    assert sum(many) <= sum(first for first, _ in found) <= sum(many) + (nodes - 1) * cut


def test_a_cache_for_its_part_is_enough(many: list[int], tmp_path: Path) -> None:
    limit = int(sum(many) * 0.6)
    found = fetched(tmp_path / "shard_groups", 2, shard_groups=2, window=16, cache_limit=limit)
    assert all(first < limit and second == 0 for first, second in found)
    found = fetched(tmp_path / "none", 2, window=16, cache_limit=limit)
    assert all(first >= sum(many) and second > sum(many) / 4 for first, second in found)


def test_the_ranks_of_a_machine_keep_to_one_limit(many: list[int], tmp_path: Path) -> None:
    limit = int(sum(many) * 0.65)
    loaders = node_loaders(tmp_path, 0, 1, ranks=2, shard_groups=2, window=16, cache_limit=limit)
    most = 0
    for _ in zip(*loaders, strict=True):
        most = max(most, used(loaders[0].reader.path))
    assert limit / 2 < most <= limit
    assert sum(loader.reader.downloaded for loader in loaders) < sum(many) * 1.2  # type: ignore


def test_what_the_cache_lacks_room_for_is_refused(many: list[int], tmp_path: Path) -> None:
    limit = int(sum(many) * 0.4)
    said = r"less than the \d+ bytes of .* reads, but data.order = random"
    with pytest.raises(UserError, match=said):
        node_loaders(tmp_path, 0, 2, shard_groups=2, order="random", cache_limit=limit)
    with pytest.raises(UserError, match=r"data.window needs, 40 samples for each group read"):
        node_loaders(tmp_path, 0, 2, shard_groups=4, window=160, cache_limit=limit)
    node_loaders(tmp_path, 0, 4, shard_groups=4, order="random", cache_limit=limit)


def test_more_groups_than_shards_are_refused(bucket: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.shard_groups = 8, but .* has only 5 shards"):
        node_loaders(tmp_path, 0, 1, shard_groups=8)


def test_machines_that_share_groups_are_told(many: list[int], tmp_path: Path) -> None:
    with pytest.warns(
        UserWarning, match=r"4 machines share data\.shard_groups = 2, .* multiple of 4"
    ):
        node_loaders(tmp_path, 0, 4, shard_groups=2)


def test_an_order_of_other_shards_goes_on(many: list[int], tmp_path: Path) -> None:
    (loader,) = node_loaders(tmp_path, 0, 1)
    with pytest.warns(UserWarning, match=r"stays that of the 2 parts .* has \d+, so more may be"):
        loader.load_state_dict({"epoch": 1, "samples": 0, "parts": [50, 160]})
    assert np.array_equal(
        loader.epoch_samples(1), epoch_order(1, 1, np.array([50, 160]), "windows", 32)
    )


def test_the_first_lines_say_what_will_be_fetched(many: list[int], tmp_path: Path) -> None:
    (loader,) = node_loaders(tmp_path, 1, 2, shard_groups=4)
    said = describe_data_volume(loader)
    assert said is not None and said.startswith("machine 2 of 2 reads shard groups 3 to 4 of 4: ")
    assert ", of which none is in its cache" in said
    list(itertools.islice(loader, 20))
    said = describe_data_volume(loader)
    assert said is not None and ", of which all is in its cache" in said
    (loader,) = node_loaders(tmp_path, 1, 2)
    said = describe_data_volume(loader)
    assert said is not None and "data.shard_groups: 2 would let each machine download 1/2" in said


def test_a_recipe_s_machines_are_those_of_the_launcher(
    many: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    data = {"path": ADDRESS, "batch_size": 8, "order": "windows", "window": 32, "shard_groups": 4}
    recipe = recipe_from_dict(
        {
            "run_name": "run",
            "data": {**data, "cache_dir": str(tmp_path)},
            "encoder": {"name": "vit_tiny16", "image_size": 16},
            "algorithms": {"mae": {}},
            "trainer": {"max_duration": "1ep"},
        }
    )
    loader = build_data(recipe)
    OPEN.append(loader.reader)  # type: ignore[arg-type]
    assert (loader.rank, loader.nodes, loader.shard_groups) == (3, 2, 4)
    assert list(loader.reader.visits.shard_groups) == [2, 3]  # type: ignore[attr-defined]
