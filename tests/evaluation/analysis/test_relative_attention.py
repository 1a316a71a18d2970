"""Attention by offset: known maps, plain loops over pairs, and a whole evaluation."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pospre.evaluation.analysis.relative_attention import by_offset, near_attention
from tests.evaluation.analysis.small import Analyse, small_recipe


def random_maps(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).double().softmax(-1)


def test_any_attention_is_the_mean_over_pairs() -> None:
    rows, columns = 3, 4
    maps = random_maps(2, 3, 12, 12)
    found = by_offset(maps.mean(0), (rows, columns))
    pairs: dict[tuple[int, int], list[float]] = {}
    near = np.zeros(2)
    for query, key in np.ndindex(12, 12):
        down, across = key // columns - query // columns, key % columns - query % columns
        pairs.setdefault((down, across), []).append(float(maps[:, 1, query, key].mean()))
        if max(abs(down), abs(across)) <= 1:
            near += maps[:, 1, query, key].numpy() / 12
    assert len(pairs) == found[0].numel()
    for (down, across), values in pairs.items():
        place = (1, rows - 1 + down, columns - 1 + across)
        assert float(found[place]) == pytest.approx(np.mean(values))
    own, around = near_attention(maps, (rows, columns))
    assert around[:, 1].tolist() == pytest.approx(near.tolist())
    torch.testing.assert_close(own, maps.diagonal(dim1=2, dim2=3).mean(-1))


def test_evaluation_sorts_heads_and_keeps_the_maps(analyse: Analyse, tmp_path: Path) -> None:
    results = analyse("relative_attention", small_recipe(), batch_size=4, num_heads=2)
    assert (results["grid"], results["samples"]) == ([4, 4], 6)
    with np.load(tmp_path / "relative_attention" / results["maps"]) as archive:
        maps = {int(name.removeprefix("layer_")): archive[name] for name in archive.files}
    for row in results["layers"]:
        heads = row["heads"]
        assert sorted(head["head"] for head in heads) == [0, 1, 2, 3]
        entropies = [head["entropy"] for head in heads]
        assert entropies == sorted(entropies)
        for head in heads:
            map_RC = maps[row["layer"]][head["head"]]
            assert map_RC.shape == (7, 7) and 0 < head["own"] < head["near"] < 1
            assert map_RC[3, 3] == pytest.approx(head["own"], rel=1e-5)
            down, across = head["peak"]
            assert map_RC[3 + down, 3 + across] == map_RC.max()
    near = [head["near"] for row in results["layers"] for head in row["heads"]]
    assert results["near"] == pytest.approx(np.mean(near)) and results["near_se"] > 0
    again = analyse("relative_attention", small_recipe(), batch_size=6, folder=False, layers="2")
    assert [head["head"] for head in again["layers"][0]["heads"]] == [
        head["head"] for head in results["layers"][1]["heads"]
    ]
