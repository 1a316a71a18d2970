"""Files that are compared or damaged by hand, and a disk that is full."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def snapshot(root: Path) -> dict[str, bytes]:
    """Return the content of every file below a folder, by its path in it."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def flip(path: Path, place: int, bits: int = 4) -> None:
    """Flip bits of a byte of a file; a negative place counts from the end."""
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Write bytes over those of a file, from an offset on."""
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Let the system refuse files of more than ``size`` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
