"""Reference curves: where seeded short runs of a recipe go, and whether another run stays there.

The steps are cut into equal windows. In each, the band of a curve is the mean over the reference's
seeds of the window's mean ± ``width`` deviations. The deviation is that between seeds (n − 1 in the
denominator), the larger of the window's own and of the root mean square over the curve's windows:
a few seeds can agree by chance in one window. Every value of a band is in the file.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from pydantic import BaseModel, Field, ValidationError

from pospre.errors import UserError
from pospre.report.compare.runs import curve_keys, mean_between, recipe_rows
from pospre.report.run import Run

WINDOWS = 5
WIDTH = 5.0
LEAST_RUNS = 3
_DIGITS = 5
_OWN = ("run_name", "seed", "trainer.run_folder", "trainer.save_folder")  # what each run has


class Band(BaseModel):
    """A curve's mean and deviation between seeds in every window."""

    mean: list[float] = Field(min_length=1)
    deviation: list[float] = Field(min_length=1)


class Reference(BaseModel):
    """Where the runs of one recipe with several seeds went.

    Attributes:
        seeds: of the runs.
        edges: steps between which the windows lie: after the first of two, up to the second.
        width: of the band, in deviations.
        curves: losses and metrics.
    """

    seeds: list[int]
    edges: list[int] = Field(min_length=2)
    width: float
    curves: dict[str, Band]


@dataclass(frozen=True)
class Check:
    """A window of a curve beside its band; ``value`` is None where nothing was logged."""

    curve: str
    first: int
    last: int
    value: float | None
    low: float
    high: float

    @property
    def is_inside(self) -> bool:
        """Whether the value is a number in the band."""
        return self.value is not None and self.low <= self.value <= self.high


def make_reference(runs: Sequence[Run]) -> Reference:
    """Return the reference of runs that differ in nothing but the seed.

    Raises:
        UserError: too few runs, other differences, unequal lengths, or a value that is not finite.
    """
    if len(runs) < LEAST_RUNS:
        raise UserError(
            f"a reference needs at least {LEAST_RUNS} runs of other seeds; there are {len(runs)}."
        )
    foreign = [row for row in recipe_rows(runs) if row.label not in _OWN]
    if foreign:
        values = ", ".join(dict.fromkeys(foreign[0].cells))
        raise UserError(
            f"a reference is of runs that differ in their seed; {foreign[0].label} is {values}."
        )
    seeds = [int(run.setting("seed") or 0) for run in runs]
    if len({*seeds}) < len(seeds):
        raise UserError(f"a reference needs runs of other seeds; these have {seeds}.")
    lasts = {_last_step(run) for run in runs}
    if len(lasts) > 1 or min(lasts) < WINDOWS:
        raise UserError(
            f"a reference needs runs of the same length, of at least {WINDOWS} steps; these have "
            f"{', '.join(map(str, sorted(lasts)))}."
        )
    (last,) = lasts
    edges = [round(last * number / WINDOWS) for number in range(WINDOWS + 1)]
    curves = {key: _band(runs, key, edges) for key in curve_keys(runs[0].records)}
    return Reference(seeds=seeds, edges=edges, width=WIDTH, curves=curves)


def check_run(run: Run, reference: Reference) -> list[Check]:
    """Return every window of the reference's curves with what the run has there.

    Raises:
        UserError: the run is shorter than the reference, or has none of its curves.
    """
    last = _last_step(run)
    if last < reference.edges[-1]:
        raise UserError(
            f"{run.folder} has {last} steps, the reference {reference.edges[-1]}; train it as long."
        )
    logged = curve_keys(run.records)
    if not any(key in logged for key in reference.curves):
        raise UserError(
            f"{run.folder} has nothing in common with the reference: it logged "
            f"{', '.join(logged) or 'no loss'}, the reference is of {', '.join(reference.curves)}."
        )
    checks = []
    for key, band in reference.curves.items():
        spread = math.sqrt(fmean(value**2 for value in band.deviation))
        for (first, end), mean, own in zip(
            pairwise(reference.edges), band.mean, band.deviation, strict=True
        ):
            reach = reference.width * max(own, spread)
            value = mean_between(run.records, key, first, end)
            checks.append(Check(key, first, end, value, mean - reach, mean + reach))
    return checks


def read_reference(path: Path) -> Reference:
    """Read a reference.

    Raises:
        UserError: there is no such file, or it is no reference.
    """
    try:
        return Reference.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--reference {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"--reference {path} is none: {key}: {first['msg']}; --write-reference makes one."
        ) from error


def to_text(reference: Reference) -> str:
    """Return a reference as JSON, a line for each list."""
    plain = reference.model_dump()
    curves = ",\n".join(
        f'  "{key}": {{"mean": {json.dumps(band["mean"])},\n'
        f'   "deviation": {json.dumps(band["deviation"])}}}'
        for key, band in plain.pop("curves").items()
    )
    head = ",\n ".join(f'"{key}": {json.dumps(value)}' for key, value in plain.items())
    return f'{{{head},\n "curves": {{\n{curves}}}}}\n'


def _band(runs: Sequence[Run], key: str, edges: Sequence[int]) -> Band:
    band = Band.model_construct(mean=[], deviation=[])
    for first, last in pairwise(edges):
        found = [mean_between(run.records, key, first, last) for run in runs]
        values = [math.nan if value is None else value for value in found]
        if not all(map(math.isfinite, values)):
            raise UserError(
                f"a reference needs finite values; {key} of a run has none at steps {first + 1} "
                f"to {last} (is trainer.log_interval larger than a window?)"
            )
        band.mean.append(_rounded(fmean(values)))
        band.deviation.append(_rounded(stdev(values)))
    return band


def _last_step(run: Run) -> int:
    return int(run.records[-1]["step"]) if run.records else 0


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
