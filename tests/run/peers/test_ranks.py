"""The data of all ranks are compared before the first step."""

from typing import Any

import pytest
from composer.utils import dist

from pospre.run.peers.ranks import Note, check_data
from tests.evaluation.checkpoints import tiny_recipe
from tests.refusals import refuses

SHARDS = {"labels": "1" * 64, "checksums of the samples": "2" * 64}
FOLDER = {"labels": "1" * 64, "files (paths and sizes)": "3" * 64}


def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, *identities: dict[str, str]) -> None:
    """Compare ranks that have as many samples each, as rank 0 does."""

    def gather(told: Any) -> list[Any]:
        note: Note = told[0]
        notes = [Note(f"node{rank}", rank, note.facts) for rank in range(len(identities))]
        return list(zip(notes, identities, strict=True))

    monkeypatch.setattr(dist, "get_world_size", lambda: len(identities))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    check_data(tiny_recipe(tmp_path, "mae"), 24, identities[0])


def test_nodes_may_have_the_data_in_several_formats(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    check(monkeypatch, tmp_path, SHARDS, SHARDS)
    check(monkeypatch, tmp_path, SHARDS, FOLDER, SHARDS)


def test_a_node_with_as_many_other_images_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    other = {**FOLDER, "labels": "4" * 64}
    said = r"data\.path on node1 \(ranks 1 to 2\) holds other data than on node0 \(rank 0\): "
    said += r"the labels differ \(SHA-256 1{12} on rank 0, 4{12} there\)"
    refuses(said, lambda: check(monkeypatch, tmp_path, SHARDS, other, other, FOLDER))
