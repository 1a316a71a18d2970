"""The shards of a block beside those that Streaming's own writer makes."""

import json
from pathlib import Path

import numpy as np
import pytest
from streaming import MDSWriter

from data_prep.plan.records import Record
from data_prep.publish import shards
from data_prep.publish.shards import block_writer
from data_prep.sources.source import Item

COLUMNS = {"image": "bytes", "label": "int", "path": "str"}


def test_the_same_bytes_as_streaming(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    samples = [generator.bytes(n) for n in generator.integers(0, 3000, 40)]
    limit = 20_000  # several shards
    monkeypatch.setattr(shards, "_USUAL_SHARD", limit)
    stock = MDSWriter(
        columns=COLUMNS, out=str(tmp_path / "stock"), size_limit=limit, hashes=["sha256"]
    )
    record = Record(7, "key")
    with stock, block_writer(tmp_path / "ours", {"image": "bytes"}, 9_000, record) as write:
        for number, data in enumerate(samples):
            stock.write({"image": data, "label": number, "path": f"{number}.jpg"})
            write(Item(f"{number}.jpg", number, 0, ""), {"image": data})
    index = json.loads((tmp_path / "stock" / "index.json").read_text())["shards"]
    assert len(index) > 3
    names = [name for name, _, _ in record.files]
    assert names[:2] == ["shard.00007.mds", "shard.00007.00001.mds"]
    for entry, shard in zip(index, record.shards, strict=True):
        there, here = entry["raw_data"].pop("basename"), shard["raw_data"].pop("basename")
        assert (tmp_path / "stock" / there).read_bytes() == (tmp_path / "ours" / here).read_bytes()
        assert entry == shard


def test_no_empty_shard_before_a_sample_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "_USUAL_SHARD", 1000)
    record = Record(0, "key")
    with block_writer(tmp_path, {"image": "bytes"}, 0, record) as write:
        for number, size in enumerate((3000, 10, 3000)):
            write(Item(f"{number}.jpg", 0, 0, ""), {"image": bytes(size)})
    assert [shard["samples"] for shard in record.shards] == [1, 1, 1]
    assert record.files[0][0] == "shard.00000.mds"
