"""Ranks in processes of their own, some of which are killed or stopped, on one node and on two."""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.processes import LAUNCHER, LIMIT, free_port, started
from tests.run.peers.networks import two_networks
from tests.training.tiny_runs import (
    LONG,
    ROOT,
    Run,
    command,
    curve,
    environment,
    wait_for_save,
    wait_for_step,
)

LOSING = (
    *LONG,
    "trainer.save_interval=2ba",
    "trainer.keep_checkpoints=2",
    "trainer.peer_timeout=6",
)
HOST = socket.gethostname()


def ranks(launcher: "subprocess.Popen[str]") -> list[psutil.Process]:
    return sorted(psutil.Process(launcher.pid).children(), key=lambda child: child.pid)


@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (psutil.Process.kill, "ended without notice"),
        (psutil.Process.suspend, r"has not answered for \d+ s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_lost_rank_is_named(
    lose: Callable[[psutil.Process], None], words: str, tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "tiny"
    with started(command(tiny, *LOSING, ranks=2), env=environment()) as launcher:
        wait_for_save(folder, launcher)
        first, second = ranks(launcher)
        start = time.monotonic()
        lose(second)
        psutil.wait_procs([first], timeout=LIMIT)
        assert time.monotonic() - start < 60
        with suppress(psutil.NoSuchProcess):
            second.kill()  # the launcher would do that, after 30 s
        output, errors = launcher.communicate(timeout=LIMIT)
    assert launcher.returncode == 75, errors
    told = re.search(rf"error: rank 1 on {HOST} {words}.*resumes from (\S+)\n", errors)
    assert told and (Path(told[1]) / "manifest.json").is_file() and told[1].startswith(str(folder))
    assert "Traceback" not in output + errors and "gloo" not in output + errors


def nodes(recipe: Path, *overrides: str, ssh: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of two nodes of one rank each, and its environment."""
    launch = ["bash", str(ROOT / "yamls/launch/ssh.sh"), str(recipe), *overrides]
    return launch, {
        **environment(),
        "PATH": f"{ssh}:{os.environ['PATH']}",
        "HOSTS": (ssh / "hosts").read_text(),
        "DIR": str(ssh),
        "MASTER_PORT": str(free_port()),
    }


@pytest.fixture
def ssh(tmp_path: Path) -> Iterator[Path]:
    """Give a folder with an ``ssh`` that stays on this machine, and what a node needs.

    Where that is allowed, each node is in a network of its own.
    """
    folder = tmp_path / "node"
    (folder / ".venv/bin").mkdir(parents=True)
    composer = folder / ".venv/bin/composer"  # whose ranks are forks: torch is imported once
    composer.write_text(f'#!/bin/sh\nexec {sys.executable} {LAUNCHER} "$@"\n')
    composer.chmod(0o755)
    with two_networks() as networks:
        (folder / "hosts").write_text(" ".join(networks) or "127.0.0.1 localhost")
        enter = "\n".join(
            f'[ "$host" = {host} ] && exec ip netns exec {name} bash -c "$*"'
            for host, name in networks.items()
        )
        (folder / "ssh").write_text(f'#!/bin/bash\nhost=$1\nshift\n{enter}\nexec bash -c "$*"\n')
        (folder / "ssh").chmod(0o755)
        yield folder


def test_two_nodes_are_one_process_and_one_without_its_launcher_stops_both(
    tiny: Path, ssh: Path, run: Run, tmp_path: Path
) -> None:
    launch, surroundings = nodes(tiny, *LOSING, ssh=ssh)
    with started(launch, env=surroundings) as script:
        wait_for_step(4, tmp_path / "runs" / "tiny", script)
        launchers = [one for one in below(script, LAUNCHER) if one.parent().name() == "bash"]
        assert len(launchers) == 2
        launchers[1].kill()
        output, errors = script.communicate(timeout=LIMIT)
    assert script.returncode == 75 and "Traceback" not in output + errors, errors
    assert errors.count("the launcher is gone: stopping as on SIGTERM") == 1
    (step,) = re.findall(r"stopped by SIGTERM after step (\d+) of 600, saved in", errors)
    assert run(tiny, *LOSING, "run_name=one", f"trainer.max_duration={step}ba")[0] == 0
    one, two = (curve(tmp_path / "runs" / name) for name in ("one", "tiny"))
    assert len(one) == len(two) == int(step)
    for (_, loss, rate), (_, other_loss, other_rate) in zip(one, two, strict=True):
        assert other_loss == pytest.approx(loss, rel=1e-4) and other_rate == rate


def below(script: "subprocess.Popen[str]", program: str) -> list[psutil.Process]:
    """Return the processes of a program that a script has started, oldest first."""
    found = psutil.Process(script.pid).children(recursive=True)
    named = [one for one in found if any(program in word for word in one.cmdline()[:2])]
    return sorted(named, key=lambda one: (one.create_time(), one.pid))
