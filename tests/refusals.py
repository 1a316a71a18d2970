"""What a mistake must come to: one error with the right words, and every file as it was."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pospre.errors import UserError, run_command
from tests.disk import snapshot


def found_in(folder: Path | None) -> tuple[list[Path], dict[str, bytes]]:
    """Return all paths below a folder, and the files' bytes."""
    return (sorted(folder.rglob("*")), snapshot(folder)) if folder else ([], {})


def refuses(
    words: str | Sequence[str],
    call: Callable[[], object],
    folder: Path | None = None,
    error: type[Exception] = UserError,
) -> str:
    """Check that a call raises an error with all words (patterns), and changes nothing in a folder.

    Returns the message.
    """
    before = found_in(folder)
    with pytest.raises(error) as caught:
        call()
    said = str(caught.value)
    for each in [words] if isinstance(words, str) else words:
        assert re.search(each, said), said
    assert "Traceback" not in said
    assert found_in(folder) == before
    return said


def fails(
    main: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str], *arguments: object
) -> str:
    """Check that a command ends with exit code 2 and one message; return what it prints there."""
    capsys.readouterr()
    assert run_command(lambda: main([str(argument) for argument in arguments])) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and "Traceback" not in said, said
    return said
