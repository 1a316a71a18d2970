"""The description of a converted data set: its content, origin and checksums."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from data_prep.plan.plan import Plan
from data_prep.plan.records import Moments, Record, spans_of
from pospre.data.stores.description import (
    SIDECAR_NAME,
    VERSION,
    Description,
    hash_of_labels,
    pack_sums,
    parse_description,
)
from pospre.data.stores.mds_index import INDEX_NAME
from pospre.errors import UserError

REMEDY = "Convert the images again with --overwrite."


class Files(Protocol):
    """The files of a folder, or the objects at an address, without sub-folders."""

    def locate(self, name: str) -> str:
        """Return a file's name for messages."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file by name."""

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless it exists; return whether it was written."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""


def describe(plan: Plan, records: Sequence[Record]) -> dict[str, Any]:
    """Return the description of a data set, without the checksums of its files."""
    labels = [label for record in records for label in record.labels]
    kept = sum(record.num_visible for record in records)
    marked = sum(record.num_marked for record in records)
    content: dict[str, Any] = {
        **plan.about,
        "format": f"pospre-{plan.format}",
        "version": VERSION,
        "samples": len(labels),
        "kept": kept,
        "marked": marked,
        "encoded": len(labels) - kept - marked,
        "skipped": [item for record in records for item in record.skipped],
        "made_from": plan.made_from,
        "labels_sha256": hash_of_labels(labels),
        "crc32c": pack_sums([value for record in records for value in record.crc32c]),
    }
    sides = [pair for record in records for pair in record.sides]
    if sides:
        content["max_pixels"] = max(width * height for width, height in sides)
    sums = [record.sums for record in records if record.sums is not None]
    if sums:
        moments = Moments(len(sums[0][1]))
        for entry in sums:
            moments.add_sums(entry)
        content["pixels" if sides else "features"] = moments.describe()
    channels = plan.made_from["settings"]["channels"]
    if channels != 3:
        content["channels"] = channels
    if any(record.deep for record in records):
        content["deep"] = _describe_deep(records)
    return content


def _describe_deep(records: Sequence[Record]) -> dict[str, Any]:
    """Return the samples of more than 8 bits by range, as spans of indices, inclusive."""
    ranges: dict[str, dict[str, Any]] = {}
    flat: list[int] = []
    first = 0
    for record in records:
        for number, text, guessed, is_flat in record.deep:
            entry = ranges.setdefault(text, {"guessed": False, "samples": []})
            entry["guessed"] |= guessed
            entry["samples"].append(first + number)
            if is_flat:
                flat.append(first + number)
        first += len(record.labels)
    for entry in ranges.values():
        entry["samples"] = spans_of(entry["samples"])
    return {"ranges": ranges, "nearly_one_grey": spans_of(flat)}


def describe_shards(plan: Plan, records: Sequence[Record]) -> dict[str, str]:
    """Return the texts of our description and of ``index.json``, as Streaming writes it."""
    files = {name: [size, digest] for record in records for name, size, digest in record.files}
    shards = [shard for record in records for shard in record.shards]
    return {
        SIDECAR_NAME: as_text({**describe(plan, records), "manifest": files}),
        INDEX_NAME: json.dumps({"version": 2, "shards": shards}, sort_keys=True),
    }


def as_text(content: dict[str, Any]) -> str:
    """Return a description as readable JSON, with the same bytes for the same content."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def description_path(destination: Path, data_format: str) -> Path:
    """Return the description's path: in the MDS folder, or beside the .beton."""
    if data_format == "mds":
        return destination / SIDECAR_NAME
    return destination.with_name(destination.name + ".json")


def read_description(destination: Path, data_format: str) -> Description:
    """Read the description of an existing data set; ``UserError`` if it is missing or damaged."""
    path = description_path(destination, data_format)
    if not path.exists():
        raise UserError(f"{path} is missing, so {destination} cannot be checked. {REMEDY}")
    return parse_description(path.read_bytes(), path, data_format, REMEDY)


def data_files(content: Description, name: str) -> dict[str, tuple[int, str]]:
    """Return bytes and SHA-256 of every data file by name; a ``.beton`` is named ``name``."""
    if content.manifest is not None:
        return dict(sorted(content.manifest.items()))
    return {name: (content.bytes or 0, content.sha256 or "")}


def check_sizes(files: Files, noted: Mapping[str, tuple[int, str]], remedy: str) -> None:
    """Refuse files that are missing or of another size than ``noted`` (see ``data_files``)."""
    there = files.sizes()
    for name, (size, _) in noted.items():
        if there.get(name) != size:
            state = f"has {there[name]} bytes instead of {size}" if name in there else "is missing"
            raise UserError(f"{files.locate(name)} {state}. {remedy}")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
