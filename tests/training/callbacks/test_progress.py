"""The progress bar: on terminals of every width, and as lines where there is no terminal."""

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from composer.core import Timestamp

from pospre.training.callbacks import progress

STEPS = 40


def train(bar: progress.ProgressBar, steps: int = STEPS) -> None:
    """Take the callback through a run of 40 steps in 4 epochs."""
    state: Any = SimpleNamespace(
        timestamp=Timestamp(), previous_timestamp=None, total_loss_dict={"loss/train/total": 12.5}
    )
    logger: Any = None
    bar.fit_start(state, logger)
    for step in range(steps):
        state.previous_timestamp = state.timestamp
        state.timestamp = state.timestamp.to_next_batch(samples=4096)
        bar.batch_end(state, logger)
        if step % 10 == 9:
            state.timestamp = state.timestamp.to_next_epoch()
    bar.fit_end(state, logger)
    bar.close(state, logger)


def on_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a terminal of so many columns (0: unknown) shows, one state after another."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(
        theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24 if columns else 0, columns, 0, 0)
    )
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.extend(_pieces(ours)))
    reader.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        train(progress.ProgressBar(STEPS))
    reader.join()
    os.close(ours)
    return [text for text in re.split(r"[\r\n]+", b"".join(seen).decode()) if text.strip()]


def _pieces(terminal: int) -> Iterator[bytes]:
    """Give what is written to a terminal until its other end is closed."""
    with suppress(OSError):
        while piece := os.read(terminal, 4096):
            yield piece


@pytest.mark.parametrize("columns", [60, 80, 0, 200])
def test_the_bar_fits_and_says_the_time_left(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = on_terminal(columns, monkeypatch)
    assert all(len(text) <= min(columns or 80, 100) for text in shown)
    last = r"00:00 left 100%\|█+\| epoch 4, loss 12\.5000, \d+ images/s"
    assert re.fullmatch(last, shown[-1])


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause, lines in ((1e9, 1), (0.0, STEPS + 1)):
        monkeypatch.setattr(progress, "PAUSE", pause)
        log = io.StringIO()
        monkeypatch.setattr(sys, "stderr", log)
        train(progress.ProgressBar(STEPS))
        said = log.getvalue()
        assert "\r" not in said and said.count("\n") == lines
        last = r"00:00 left, step 40/40, epoch 4, loss 12\.5000, \d+ images/s"
        assert re.fullmatch(last, said.splitlines()[-1])
