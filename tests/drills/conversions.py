"""A conversion into a bucket that is killed again and again.

Its shards must be those of one that nothing disturbed, to the bit.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.publish.description import as_text
from tests.conftest import write_images
from tests.data_prep.bucket import URI, as_in_a_folder, keys

_IMAGES = 48
_SIDES = (700, 600)
_SHARD_MB = "0.4"


class Conversions(NamedTuple):
    """What came of it.

    Attributes:
        killed: with how many objects in the bucket each process was killed.
        seconds: of the last one, which was not killed.
        faults: broken promises, in words.
    """

    killed: list[int]
    seconds: float
    faults: list[str]


def kill_conversions(folder: Path, client: Any, kills: int, seed: int) -> Conversions:
    """Convert noise into ``URI``; kill the process and its workers with -9 at random moments.

    The environment leads to the bucket ``bucket``, which ``client`` looks at.
    """
    draws = random.Random(f"{seed}/conversions")
    source = write_images(folder / "noise", _IMAGES, size=_SIDES)
    temporary = folder / "temporary"
    temporary.mkdir()
    assert _start(source, folder / "whole", temporary).wait() == 0
    killed: list[int] = []
    while True:
        start, process = time.monotonic(), _start(source, URI, temporary)
        wanted = len(keys(client)) + draws.randint(1, 3)
        while len(killed) < kills and len(keys(client)) < wanted and process.poll() is None:
            time.sleep(0.05)
        time.sleep(0.3 * draws.random())
        if len(killed) == kills or process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        killed.append(len(keys(client)))
    code = process.wait()
    faults = [] if code == 0 else [f"the conversion ended with exit code {code}"]
    if as_in_a_folder(client) != _files(folder / "whole"):
        faults.append("the shards are not those of the undisturbed conversion")
    left = sorted(path.name for path in temporary.iterdir())
    if left:
        faults.append(f"temporary files are left: {', '.join(left)}")
    return Conversions(killed, time.monotonic() - start, faults)


def _start(source: Path, target: Path | str, temporary: Path) -> "subprocess.Popen[bytes]":
    options = ["--format", "mds", "--workers", "2", "--shard-mb", _SHARD_MB]
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep.convert", str(source), str(target), *options],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(temporary)},
        start_new_session=True,
    )


def _files(folder: Path) -> dict[str, bytes]:
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    found["pospre.json"] = as_text(json.loads(found["pospre.json"])).encode()
    return found
