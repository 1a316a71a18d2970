"""One item of ``gpu_minutes.py``, in a process of its own.

    python -m tests.benchmarks.gpu_item ASKED      # on several ranks: composer -n N -m …

ASKED is a file that says what is done. A process that is ready to be timed writes ``ASKED.ready``
and waits for a line on its standard input. What came of it is in ``ASKED.out``; what goes wrong
as well, in one line.
"""

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from pospre.errors import UserError
from tests.benchmarks import gpu_cell, gpu_right, gpu_trials

KINDS = {
    "train": gpu_cell.measure,
    "right": gpu_right.right,
    "resumed": gpu_right.resumed,
    "ceilings": gpu_trials.ceilings,
    "overlap": gpu_trials.overlap,
    "auto": gpu_trials.auto,
}


def done(kind: str, asked: dict[str, Any], turn: gpu_cell.Turn) -> dict[str, Any]:
    """Return what comes of an item; what fails is a line under ``failed``."""
    try:
        with tempfile.TemporaryDirectory(prefix="pospre-gpu-") as folder:
            return KINDS[kind](asked, turn, Path(folder))
    except torch.OutOfMemoryError:
        return {"failed": "out of memory"}
    except Exception as error:  # whatever it is, the other items go on
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        name = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return {"failed": f"{name}{lines[0]}"[:300]}


def main(path: Path) -> int:
    """Do what a file asks for; rank 0 writes the outcome beside it."""
    item = json.loads(path.read_text(encoding="utf-8"))

    def turn() -> None:
        if dist.get_global_rank() == 0:
            path.with_suffix(".ready").touch()
            if not sys.stdin.readline():
                sys.exit(1)  # who has asked is gone
        dist.barrier()

    outcome = done(item["kind"], item["asked"], turn)
    if dist.get_global_rank() == 0:
        path.with_suffix(".out").write_text(json.dumps(outcome), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
