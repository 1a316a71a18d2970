"""What the lives of a run wrote down, read back and put together over their ranks."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROPERTIES = {
    "index": "sample ids",
    "epoch": "sample ids",
    "label": "sample ids",
    "box": "boxes",
    "field_box": "boxes",
    "flip": "flips",
    "image": "pixels",
}
DRAWN = ("sample ids", "boxes", "flips", "masks", "pixels")


def property_of(key: str) -> str:
    """Return which property of a certificate a batch's key belongs to."""
    return _PROPERTIES.get(key.rpartition("/")[2], "masks")


@dataclass
class Step:
    """A step that was trained to its end.

    Attributes:
        number: counted from 1.
        rows: a hash for each sample of the batch over all ranks, in order, by property.
        losses: averages over the ranks, with the metrics of the training step.
        parameters: a hash of the weights after it, if it was taken.
    """

    number: int
    rows: dict[str, str]
    losses: dict[str, float]
    parameters: str | None


@dataclass
class LifeRecord:
    """What one life wrote down.

    Attributes:
        start: the step it went on from; None where it ended before that.
        steps: those that it finished.
        end: hashes of the final state, of a life that came to the end.
        coupled: what looks at all samples of a forward at once; empty for nothing.
        first: when its first step began, in seconds of the machine's clock.
        seconds: that each of its steps took.
    """

    start: int | None = None
    steps: list[Step] = field(default_factory=list)
    end: dict[str, Any] | None = None
    coupled: str = ""
    first: float = 0.0
    seconds: list[float] = field(default_factory=list)


def read_life(paths: Sequence[Path]) -> LifeRecord:
    """Return the record of a life from its ranks' files, rank 0 first.

    A step counts as finished when all ranks have written it.
    """
    ranks = [list(map(json.loads, _whole_lines(path))) for path in paths]
    record, begun_at = LifeRecord(), 0.0
    for line in ranks[0]:
        if "start" in line:
            record.start, record.coupled = line["start"], line["coupled"]
        elif "begun" in line:
            begun_at = line["at"]
            record.first = record.first or begun_at
        elif "step" in line:
            record.seconds.append(line["at"] - begun_at)
        elif "end" in line:
            record.end = line
    by_rank = [{line["step"]: line for line in lines if "step" in line} for lines in ranks]
    for number in sorted(set.intersection(*map(set, by_rank))):
        record.steps.append(_joined(number, [steps[number] for steps in by_rank]))
    return record


def _joined(number: int, lines: list[dict[str, Any]]) -> Step:
    rows = {name: "".join(line["rows"][name] for line in lines) for name in lines[0]["rows"]}
    losses = {name: float.fromhex(value) for name, value in lines[0]["losses"].items()}
    return Step(number, rows, losses, lines[0]["parameters"])


def _whole_lines(path: Path) -> list[bytes]:
    """Return the lines of a file without the one that a kill cut short."""
    content = path.read_bytes() if path.exists() else b""
    return content.split(b"\n")[:-1]
