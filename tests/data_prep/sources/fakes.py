"""Small archives and images for the tests of sources, and what a source says of them."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from data_prep.sources.registry import open_source
from data_prep.sources.source import Source
from tests import refusals
from tests.data_prep import reading
from tests.data_prep.reading import read_samples
from tests.data_prep.sample_images import encoded, picture

JPEGS = [encoded(picture(number)) for number in range(8)]

Files = dict[str, bytes]


def tar_bytes(files: Files) -> bytes:
    """An uncompressed tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def gzipped(files: Files) -> bytes:
    """A .tar.gz with the same bytes for the same files."""
    return gzip.compress(tar_bytes(files), mtime=0)


def write_zip(path: Path, files: Files) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def text(content: Any) -> bytes:
    """Lines or JSON as the bytes of a file."""
    if isinstance(content, list) and all(isinstance(line, str) for line in content):
        return "".join(f"{line}\n" for line in content).encode()
    return json.dumps(content).encode()


def everything(source: Source) -> list[tuple[str, int, bytes]]:
    """Name, label and bytes of every item."""
    return [(item.name, item.label, source.read(item)) for item in source.items]


def labels(source: Source) -> dict[str, int]:
    return {item.name: item.label for item in source.items}


def opened(root: Path, kind: str, **options: Any) -> Source:
    """The source as it is found out by itself, and as it comes to another process."""
    source = open_source(root, **options)
    there: Source = pickle.loads(pickle.dumps(source))
    assert source.kind == kind and there == source
    return there


def refuses(said: str, root: Path, **options: Any) -> None:
    """Check that a source cannot be opened, and what is said of it."""
    refusals.refuses(said, lambda: open_source(root, **options), root if root.is_dir() else None)


def converted(root: Path, target: Path, *options: str) -> list[dict[str, Any]]:
    """The samples of a conversion, which is checked to the last bit."""
    return read_samples(reading.converted(root, target, "--verify", *options))
