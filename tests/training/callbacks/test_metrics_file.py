"""Names in ``metrics.jsonl``, and what a resumed run does to the file."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from composer.core import State, Time, Timestamp
from composer.loggers import Logger

from pospre.training.callbacks.metrics import MetricsFile, drop_after, read_lines


def test_later_and_damaged_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    drop_after(path, 2)
    assert not path.exists()
    flipped = b'{"stfp": 1}\n{"step": 1, "l\xefss": 2}\n'
    path.write_bytes(b'{"step": 1}\n' + flipped + b'{"step": 2}\n{"step": 3}\n{"st')
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("duration", ["2ep", "6ba", "45sp"])
def test_the_last_step_has_a_line(duration: str, tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl", interval=4)
    for step in range(1, 7):  # two epochs of three steps of eight samples
        time = Timestamp(
            epoch=(step - 1) // 3, batch=step, batch_in_epoch=(step - 1) % 3 + 1, sample=8 * step
        )
        state: Any = SimpleNamespace(
            timestamp=time,
            max_duration=Time.from_timestring(duration),
            dataloader_len=Time.from_batch(3),
            total_loss_dict={"loss/train/total": 1.0},
            device=SimpleNamespace(name="cpu"),
        )
        state.get_elapsed_duration = partial(State.get_elapsed_duration, state)
        file.batch_end(state, Logger.__new__(Logger))
    assert [line["step"] for line in read_lines(file.path)] == [1, 4, 6]
