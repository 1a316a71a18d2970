"""Files are shown when they are whole: with several writers, and after a failure."""

from pathlib import Path

import pytest

from pospre.atomic_file import atomic_open, write_atomic


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with atomic_open(path) as first:
        with atomic_open(path) as second:
            first.write(b"111")
            second.write(b"22")
        assert path.read_bytes() == b"22"
    assert path.read_bytes() == b"111"
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_atomic(path, b"before")
    with pytest.raises(KeyboardInterrupt), atomic_open(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
