"""The small files of a run in its bucket: beside its checkpoints, and back where they are gone."""

import json
from pathlib import Path

from pospre.atomic_file import write_atomic
from pospre.model.question import QUESTIONS
from pospre.object_store import Bucket

_NAMES = ("recipe.yaml", QUESTIONS, "metrics.jsonl", "watch.jsonl", "report.html")
_FOLDERS = ("evaluation", "bad_steps")


def mirror_run(run_folder: Path, remote: Bucket) -> None:
    """Copy a run's small files into its bucket: all but its checkpoints."""
    paths = [run_folder / name for name in _NAMES]
    for folder in _FOLDERS:
        paths += sorted(path for path in (run_folder / folder).rglob("*") if path.is_file())
    with remote as bucket:
        for path in paths:
            if path.exists():
                bucket.put(path.relative_to(run_folder).as_posix(), path.read_bytes())


def restore_metrics(run_folder: Path, remote: str) -> None:
    """Fetch the metrics of a run whose bucket is further than its local folder; warnings, too."""
    target = run_folder / "metrics.jsonl"
    with Bucket(remote) as bucket:
        names = bucket.list()
        if target.name not in names:
            return
        theirs = bucket.read(target.name)
        ours = target.read_bytes() if target.exists() else b""
        if _last_step(theirs) > _last_step(ours):
            write_atomic(target, theirs)
            if "watch.jsonl" in names:
                write_atomic(target.with_name("watch.jsonl"), bucket.read("watch.jsonl"))


def _last_step(metrics: bytes) -> int:
    """Return the last step that a metrics file tells of, 0 without any."""
    for line in reversed(metrics.splitlines()):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):  # a kill came in the middle of this line
            continue
    return 0
