"""Copies the small files of a run into its bucket, and back if they are missing."""

import re
from pathlib import Path

from pospre.atomic_file import PARTIAL, write_atomic
from pospre.model.pretext_task import PRETEXT_TASKS
from pospre.object_store import Bucket
from pospre.untrusted_json import parse_steps

_NAMES = ("recipe.yaml", PRETEXT_TASKS, "metrics.jsonl", "watch.jsonl", "report.html")
_FOLDERS = ("evaluation", "bad_steps")
_RESTORED = re.compile(r"watch\.jsonl|evaluation/\w+\.jsonl?")


def mirror_run(run_folder: Path, remote: Bucket) -> None:
    """Copy a run's small files into its bucket: everything but the checkpoints."""
    paths = [run_folder / name for name in _NAMES]
    for folder in _FOLDERS:
        paths += sorted(path for path in (run_folder / folder).rglob("*") if path.is_file())
    with remote as bucket:
        for path in paths:
            if path.exists() and path.suffix != PARTIAL:
                bucket.put(path.relative_to(run_folder).as_posix(), path.read_bytes())


def remove_mirrored(remote: str) -> None:
    """Delete a run's small files from its bucket."""
    with Bucket(remote) as bucket:
        for name in bucket.list(below=True):
            if name in _NAMES or name.startswith(tuple(f"{folder}/" for folder in _FOLDERS)):
                bucket.delete(name)


def restore_run(run_folder: Path, remote: str) -> None:
    """Fetch a run's measurements if its bucket is ahead of its local folder."""
    target = run_folder / "metrics.jsonl"
    with Bucket(remote) as bucket:
        theirs = bucket.find(target.name)
        ours = target.read_bytes() if target.exists() else b""
        if theirs is None or _last_step(theirs) <= _last_step(ours):
            return
        write_atomic(target, theirs)
        measured = [f"evaluation/{name}" for name in bucket.list("evaluation")]
        for name in filter(_RESTORED.fullmatch, ["watch.jsonl", *measured]):
            content = bucket.find(name)
            if content is not None:
                (run_folder / name).parent.mkdir(exist_ok=True)
                write_atomic(run_folder / name, content)


def _last_step(metrics: bytes) -> int:
    """Return the last step in a metrics file, 0 if there is none."""
    steps = parse_steps(metrics)
    return int(steps[-1]["step"]) if steps else 0
