"""Two networks on this machine that one cable joins, where the kernel lets a test make them."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def two_networks() -> Iterator[dict[str, str]]:
    """Yield the network namespaces of two nodes by their addresses; none where not allowed.

    Each has a loopback of its own: a node that gives out 127.0.0.1 is not found by the other one.
    """
    names = [f"pospre{os.getpid()}{end}" for end in "ab"]
    ends = [f"ps{os.getpid()}{end}" for end in "ab"]  # at most 15 characters
    addresses = ["10.77.0.1", "10.77.0.2"]
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, addresses, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            for device in (end, "lo"):
                _ip("-n", name, "link", "set", device, "up")
        found = dict(zip(addresses, names, strict=True))
    except (OSError, subprocess.CalledProcessError):
        found = {}
    try:
        yield found
    finally:
        for name in names:
            if Path("/run/netns", name).exists():
                _ip("netns", "delete", name)  # the cable goes with it


def _ip(*words: str) -> None:
    program = shutil.which("ip", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or "ip"
    subprocess.run([program, *words], check=True, capture_output=True)
