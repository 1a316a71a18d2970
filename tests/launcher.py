"""Composer's launcher as it is, but for Composer: importing that takes it 7 s, and it uses none.

It is started as ``python tests/launcher.py -n 2 …``, as ``composer -n 2 …`` would be.
"""

import importlib.util
import runpy
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def stand_in(name: str) -> ModuleType:
    """Return a module all of whose names are strings; ``composer.utils`` can do what is asked."""
    module = ModuleType(name)
    module.__dict__.update(__getattr__=lambda key: key, __path__=[], get_free_tcp_port=free_port)
    return module


def leave(number: int, _: object) -> None:
    sys.exit(128 + number)  # as composer.core.engine has it


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGINT, leave)
    spec = importlib.util.find_spec("composer")
    assert spec is not None and spec.origin is not None
    names = ("composer", "composer.utils", "composer.loggers", "composer.loggers.mosaicml_logger")
    sys.modules.update({name: stand_in(name) for name in (*names, "torch")})
    runpy.run_path(str(Path(spec.origin).parent / "cli" / "launcher.py"), run_name="__main__")
