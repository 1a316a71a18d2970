"""What a data set brings beside labels is stored with the samples."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from data_prep.distribute import conversion, preparation
from data_prep.files.archives import DamagedItem
from data_prep.plan.records import Settings
from data_prep.sources.image_folder import file_item
from data_prep.sources.source import Item, Source
from pospre.data.opening import open_reader
from tests.data_prep.reading import FORMATS, destination
from tests.data_prep.sample_images import encoded, picture, write_files


@dataclass(frozen=True)
class Annotated(Source):
    """A folder that notes every image's name; of one nothing, and of one it is damaged."""

    annotation: ClassVar[str | None] = "json"

    def annotate(self, item: Item) -> bytes | None:
        if item.name == "2.jpg":
            raise DamagedItem("its mask is cut off")
        return None if item.name == "1.jpg" else json.dumps({"name": item.name}).encode()


def read_annotations(path: Path) -> list[bytes]:
    if path.is_dir():
        from streaming.base.format import reader_from_json

        shards = json.loads((path / "index.json").read_text())["shards"]
        readers = [reader_from_json(str(path), "", shard) for shard in shards]
        return [reader[i]["annotation"] for reader in readers for i in range(len(reader))]
    from ffcv.reader import Reader

    data = path.read_bytes()
    found = [record[2] for record in Reader(str(path)).metadata]
    return [data[int(entry["ptr"]) : int(entry["ptr"] + entry["size"])] for entry in found]


@pytest.mark.parametrize("data_format", FORMATS)
def test_annotations_are_stored(
    tmp_path: Path, data_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{number}.jpg": encoded(picture(number)) for number in range(5)}
    root = write_files(tmp_path / "photos", files)
    source = Annotated(root, tuple(file_item(root, name, -1) for name in sorted(files)))
    monkeypatch.setattr(preparation, "open_source", lambda *_, **__: source)
    target = destination(tmp_path, data_format)
    summary = conversion.convert(
        root, target, Settings(format=data_format, shard_mb=0.002), num_workers=2
    )
    assert summary is not None
    assert summary.skipped == [{"path": "2.jpg", "reason": "its mask is cut off"}]
    names = ["0.jpg", "1.jpg", "3.jpg", "4.jpg"]
    wanted = [b"" if name == "1.jpg" else b'{"name": "%s"}' % name.encode() for name in names]
    assert read_annotations(target) == wanted
    reader = open_reader(target)
    assert [reader.read(i).encoded.numpy().tobytes() for i in range(4)] == [
        files[name] for name in names
    ]
    place = target / "pospre.json" if target.is_dir() else Path(f"{target}.json")
    assert json.loads(place.read_text())["annotation"] == "json"
