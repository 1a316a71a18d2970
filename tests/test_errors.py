"""How a command ends, and what a message suggests."""

import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from pospre.errors import UserError, printable, run_command, suggestion
from pospre.output import format_table


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:119] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 30000000768 bytes."
        ),
    ],
)
def test_memory_that_does_not_suffice_is_one_message(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        raise error

    assert run_command(main) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: not enough memory (") and text.count("\n") == 1
    assert ("30000000768 bytes" in text) == (type(error) is RuntimeError)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_is_one_line(
    number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        signal.raise_signal(number)
        return 0

    ctrl_c = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_command(main) == code
    finally:
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, ctrl_c)
    text = capsys.readouterr().err
    assert text.startswith("stopped by ") and "run the same command again\n" in text


def test_a_rank_that_has_said_its_mistake_keeps_its_code_though_the_launcher_ends_it() -> None:
    script = (
        "import os, signal, sys\n"
        "from pospre.errors import UserError, run_command\n"
        "def main(): raise UserError('no data')\n"
        "code = run_command(main)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "sys.exit(code)"
    )
    rank = {**os.environ, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=rank, check=False)
    assert done.returncode == 2


def test_other_errors_keep_their_traceback() -> None:
    def main() -> int:
        raise RuntimeError("a bug of ours")

    with pytest.raises(RuntimeError, match="a bug of ours"):
        run_command(main)


def test_long_messages_and_long_paths_are_cut(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = str(UserError("key 'x' is " + "9" * 100_000 + "; give fewer"))
    assert len(said) < 4100 and said.startswith("key 'x' is 9") and said.endswith("9; give fewer")
    assert run_command(lambda: len((tmp_path / ("x" * 5000)).read_bytes())) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: [Errno 36] File name too long") and len(said) < 5000


def test_hundreds_of_names_are_not_listed() -> None:
    names = [f"name{number:03}" for number in range(300)]
    assert suggestion("zzz", names).endswith("name039, and 260 more.")
    assert suggestion("zzz", names[:3]) == " Known: name000, name001, name002."
    assert suggestion("name0001", names) == " Did you mean 'name001'?"


def test_what_a_message_quotes_cannot_obey_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[2J\x1b]0;title\x07\rb\x9bc\u202ed\udcff ä.jpg"

    def main() -> int:
        raise UserError(f"{name} is damaged\n\tsecond line")

    assert run_command(main) == 2
    said = capsys.readouterr().err
    shown = r"a\x1b[2J\x1b]0;title\x07\rb\x9bc\u202ed\udcff ä.jpg"
    assert said == f"error: {shown} is damaged\n\tsecond line\n"
    assert printable(f"{name}\n") == shown + r"\n"
    assert f"warning: {UserError(name)}" == f"warning: {shown}"
    assert name not in format_table("title", ["name", name], [[name, "1"]])


def test_a_warning_cannot_obey_the_terminal_either() -> None:
    assert run_command(lambda: 0) == 0
    shown = warnings.formatwarning("a\x1b[2J\udcff", UserWarning, "f.py", 3, "line")
    assert shown == "f.py:3: UserWarning: a\\x1b[2J\\udcff\n  line\n"
