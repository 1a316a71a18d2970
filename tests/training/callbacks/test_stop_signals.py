"""SIGTERM and Ctrl-C: the step is finished and saved, and the same command resumes from there."""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from pospre.errors import Stopped, run_command, stoppable
from pospre.run.checkpoints import uploads as uploading
from pospre.training.callbacks.stop_signals import StopSignals
from tests.data.flaky_s3 import use_bucket
from tests.processes import LIMIT, started
from tests.run.checkpoints.checkpoint_files import CONTENT, write_checkpoint
from tests.training.tiny_runs import LONG, Run, command, curve, environment, wait_for_step

LONG_RUN = (*LONG, "trainer.keep_checkpoints=1")


def saved_steps(folder: Path) -> list[int]:
    checkpoints = (folder / "checkpoints").iterdir()
    return [int(path.name.partition("-ba")[2]) for path in checkpoints]


@pytest.mark.parametrize(
    ("number", "code", "name"), [(signal.SIGTERM, 75, "SIGTERM"), (signal.SIGINT, 130, "Ctrl-C")]
)
def test_stopped_and_gone_on_is_the_same_curve(
    number: signal.Signals, code: int, name: str, tiny: Path, run: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    with started(command(tiny, *LONG_RUN), env=environment()) as process:
        wait_for_step(4, folder, process)
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == code and "Traceback" not in errors
    (told,) = re.findall(rf"stopped by {name} after step (\d+) of 600, saved in (\S+);", errors)
    step = int(told[0])
    assert curve(folder)[-1][0] == step and saved_steps(folder) == [step]
    assert (Path(told[1]) / "manifest.json").is_file() and "the same command resumes" in errors
    length = f"trainer.max_duration={step + 2}ba"
    assert run(tiny, *LONG_RUN, length)[0] == 0
    assert run(tiny, *LONG_RUN, length, "run_name=whole")[0] == 0
    assert curve(folder) == curve(tmp_path / "runs" / "whole")


def one_rank(launcher: psutil.Process) -> None:
    launcher.children()[-1].terminate()


def the_launcher(launcher: psutil.Process) -> None:
    launcher.terminate()  # it has a traceback of its own, and passes the signal on


def ctrl_c(launcher: psutil.Process) -> None:
    os.killpg(launcher.pid, signal.SIGINT)  # all at once, as a terminal does


@pytest.mark.parametrize(("stop", "code"), [(one_rank, 75), (the_launcher, 75), (ctrl_c, 130)])
def test_two_ranks_stop_after_the_same_step(
    stop: Callable[[psutil.Process], None], code: int, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    with started(command(tiny, *LONG_RUN, ranks=2), env=environment()) as process:
        wait_for_step(3, folder, process)
        stop(psutil.Process(process.pid))
        output, errors = process.communicate(timeout=LIMIT)  # until the ranks have ended
    assert process.returncode == code, errors
    assert "Traceback" not in output and "pospre/train" not in errors
    (told,) = re.findall(r"after step (\d+) of 600, saved in", errors)
    assert curve(folder)[-1][0] == int(told) and saved_steps(folder) == [int(told)]


def test_a_signal_before_the_first_step(tiny: Path) -> None:
    with started(command(tiny, *LONG_RUN), env=environment()) as process:
        assert process.stdout is not None
        assert "data: 24 samples of" in process.stdout.readline()
        assert "Ctrl-C saves and stops" in process.stdout.readline()
        process.terminate()
        _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 75 and "stopped by SIGTERM" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("raised", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped by Ctrl-C in the evaluations"),
        (SystemExit(130), 130, "stopped by Ctrl-C in the evaluations"),
        (SystemExit(143), 75, "stopped by SIGTERM in the evaluations"),
    ],
)
def test_a_signal_outside_of_the_training(
    raised: BaseException, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        with stoppable("in the evaluations"):
            raise raised

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert run_command(main) == code
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == f"{words}\n"


def test_a_stopped_run_does_not_wait_long_for_a_bucket_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes calls, and never answers
        use_bucket(monkeypatch, f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("POSPRE_GRACE", "3")
        checkpoint = tmp_path / "ep0-ba2"
        write_checkpoint(CONTENT, checkpoint)
        with pytest.raises(Stopped), uploading.Uploads(tmp_path, "s3://bucket/run") as uploads:
            uploads.offer(checkpoint)
            start = time.monotonic()
            raise Stopped(signal.SIGTERM, "")
        assert 2.5 < time.monotonic() - start < 60
    said = capsys.readouterr()
    assert "gives up after 3 s" in said.out
    assert "warning: the last checkpoint is not in s3://bucket/run" in said.err
    assert f"It is complete at {checkpoint}; run the command again to upload it" in said.err


def test_another_exit_is_left_alone() -> None:
    with pytest.raises(SystemExit) as left, stoppable("never said"):
        sys.exit(3)
    assert left.value.code == 3


def test_the_second_ctrl_c_stops_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    monkeypatch.setattr(os, "_exit", left.append)
    signals = StopSignals()
    signals._note(signal.SIGTERM, None)
    signals._note(signal.SIGTERM, None)
    signals._note(signal.SIGINT, None)  # as the launcher sends one after the other
    signals._note(signal.SIGTERM, None)
    assert left == []
    signals._note(signal.SIGINT, None)
    assert left == [130]


def test_the_handlers_before_come_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    signals = StopSignals()
    signals.fit_start(None, None)  # type: ignore[arg-type]
    assert signal.getsignal(signal.SIGINT) == signals._note
    signals.give_back()
    assert before == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
