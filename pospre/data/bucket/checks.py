"""Verification of a shard against the data set's description.

Compressed shards are decompressed after the download, into no more bytes than ``index.json`` says.
"""

import hashlib
from pathlib import Path

from pospre.data.stores.mds import load_shard
from pospre.data.stores.mds_index import FileEntry, ShardEntry
from pospre.errors import UserError


def unpack(path: Path, entry: ShardEntry) -> str:
    """Decompress a download into the shard; return what is wrong with it."""
    problem = difference(path, entry.stored)
    if not problem and entry.packed:
        try:
            _decompress(path, entry)
        except Exception as error:  # of cramjam, which is imported late
            return f"it cannot be decompressed into {entry.raw.size} bytes ({error})"
        problem = difference(path, entry.raw)
    if problem:
        return problem
    try:
        load_shard(path, entry, "")
    except UserError:
        return "its start does not match index.json"
    return ""


def _decompress(path: Path, entry: ShardEntry) -> None:
    """Replace a file by its content; raise an error before that exceeds its recorded size."""
    import cramjam

    kinds = {
        "br": cramjam.brotli.decompress_into,
        "bz2": cramjam.bzip2.decompress_into,
        "gz": cramjam.gzip.decompress_into,
        "snappy": cramjam.snappy.decompress_raw_into,
        "zstd": cramjam.zstd.decompress_into,
    }
    kind = str(entry.compression).partition(":")[0]  # a level may follow
    if kind not in kinds:
        raise ValueError(f"{kind!r} is none of {', '.join(kinds)}")
    content = bytearray(entry.raw.size)
    size = kinds[kind](path.read_bytes(), content)
    path.write_bytes(memoryview(content)[:size])


def difference(path: Path, entry: FileEntry) -> str:
    """Return how a file differs from its description."""
    size = path.stat().st_size
    if size != entry.size:
        return f"it has {size} bytes instead of {entry.size}"
    for algorithm, expected in entry.hashes.items():
        try:
            actual = _digest(path, algorithm)
        except (OSError, ValueError) as error:  # a bad disk, or an unknown hash
            return f"its {algorithm} cannot be computed ({error})"
        if actual != expected:
            return f"its {algorithm} differs"
    return ""


def _digest(path: Path, algorithm: str) -> str:
    """Return a file's digest by any algorithm that Streaming writes; ``ValueError`` for others."""
    import xxhash

    if algorithm in xxhash.algorithms_available:
        kind = getattr(xxhash, algorithm)
    elif algorithm.startswith("shake_"):
        raise ValueError(f"{algorithm} has no fixed length")
    else:
        kind = algorithm
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()
