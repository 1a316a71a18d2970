"""Files are shown when they are whole: with several writers, and after a failure."""

from pathlib import Path

import pytest

from pospre.whole_file import shown_when_whole, write_whole


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    with shown_when_whole(path) as first:
        with shown_when_whole(path) as second:
            first.write(b"111")
            second.write(b"22")
        assert path.read_bytes() == b"22"
    assert path.read_bytes() == b"111"
    assert list(tmp_path.iterdir()) == [path]


def test_one_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_whole(path, b"before")
    with pytest.raises(KeyboardInterrupt), shown_when_whole(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
