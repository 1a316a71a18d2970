"""Reference curves from short seeded runs of a recipe, and a check of another run against them.

Steps are divided into equal windows; a curve's value in a window is the mean of its logged values.
The deviation is between the reference's seeds (n − 1 in the denominator). It is the larger of the
window's own and the root mean square over the curve's windows, because a few seeds can agree by
chance in one. A run with a seed of the reference must stay within half a deviation of that seed's
values: its data, masks and initial weights are the same, so only rounding may differ. A run with
another seed must stay within five deviations of the seeds' mean.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev

from pydantic import BaseModel, Field, ValidationError, model_validator

from pospre.errors import UserError
from pospre.output import format_table
from pospre.reporting.compare import curve_keys, last_step, mean_between, recipe_rows
from pospre.reporting.plots import format_value
from pospre.reporting.run import Run

WINDOWS = 5
SAME_SEED, OTHER_SEED = 0.5, 5.0  # half the width of the bands, in deviations
LEAST_RUNS = 3
_DIGITS = 5
_OWN = ("run_name", "seed", "trainer.run_folder", "trainer.save_folder")  # differ between runs


class Reference(BaseModel):
    """Curves of one recipe's runs with several seeds."""

    seeds: list[int] = Field(min_length=LEAST_RUNS)
    # limits of the windows in steps: each includes its last step, not its first
    edges: list[int] = Field(min_length=2)
    # for each loss and metric its values in every window, for each seed
    curves: dict[str, list[list[float]]]

    @model_validator(mode="after")
    def _check_shapes(self) -> "Reference":
        for key, rows in self.curves.items():
            if [len(row) for row in rows] != [len(self.edges) - 1] * len(self.seeds):
                raise ValueError(f"{key} has not one value for each seed and window")
        return self

    def bands(self, key: str, seed: int) -> list[tuple[float, float]]:
        """Return the lowest and highest allowed value of a curve in every window."""
        windows = list(zip(*self.curves[key], strict=True))
        deviations = [stdev(values) for values in windows]
        spread = math.sqrt(fmean(deviation**2 for deviation in deviations))
        known = seed in self.seeds
        middles = self.curves[key][self.seeds.index(seed)] if known else map(fmean, windows)
        width = SAME_SEED if known else OTHER_SEED
        reaches = (width * max(deviation, spread) for deviation in deviations)
        return [(m - r, m + r) for m, r in zip(middles, reaches, strict=True)]


@dataclass(frozen=True)
class Check:
    """A window of a curve and its band; ``value`` is None if nothing was logged."""

    curve: str
    first: int
    last: int
    value: float | None
    low: float
    high: float

    @property
    def steps(self) -> str:
        """The window's steps, in words."""
        return f"{self.first + 1}–{self.last}"

    @property
    def is_inside(self) -> bool:
        """Whether the value is within the band."""
        return self.value is not None and self.low <= self.value <= self.high


def make_reference(runs: Sequence[Run]) -> Reference:
    """Return the reference of runs of the same length that differ only in the seed."""
    if len(runs) < LEAST_RUNS:
        raise UserError(
            f"a reference needs at least {LEAST_RUNS} runs with different seeds; there are "
            f"{len(runs)}."
        )
    for key, *values in recipe_rows(runs):
        if key not in _OWN:
            given = ", ".join(dict.fromkeys(values))
            raise UserError(f"runs of a reference may differ only in their seed; {key} is {given}.")
    seeds = [int(run.setting("seed") or 0) for run in runs]
    if len({*seeds}) < len(seeds):
        raise UserError(f"a reference needs runs with different seeds; these have {seeds}.")
    lasts = {last_step(run) for run in runs}
    if len(lasts) > 1 or min(lasts) < WINDOWS:
        raise UserError(
            f"a reference needs runs of the same length, of at least {WINDOWS} steps; these have "
            f"{', '.join(map(str, sorted(lasts)))}."
        )
    (last,) = lasts
    edges = [round(last * number / WINDOWS) for number in range(WINDOWS + 1)]
    keys = curve_keys(runs[0].records)
    if sum(key.startswith("loss/") for key in keys) == 2:  # one term is the total
        keys.remove("loss/total")
    curves = {key: [_values(run, key, edges) for run in runs] for key in keys}
    return Reference(seeds=seeds, edges=edges, curves=curves)


def check_run(run: Run, reference: Reference) -> list[Check]:
    """Return every window of the reference's curves with the value of a run of this length."""
    last = last_step(run)
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
    seed = int(run.setting("seed") or 0)
    return [
        Check(key, first, end, mean_between(run.records, key, first, end), low, high)
        for key in reference.curves
        for (first, end), (low, high) in zip(
            pairwise(reference.edges), reference.bands(key, seed), strict=True
        )
    ]


def read_reference(path: Path) -> Reference:
    """Read a reference."""
    try:
        return Reference.model_validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"--reference {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"--reference {path} is not one: {key}: {first['msg']}; make one with "
            "--write-reference."
        ) from error


def to_text(reference: Reference) -> str:
    """Return the reference as JSON, with a line for each seed."""
    curves = ",\n".join(
        f'  "{key}": [\n' + ",\n".join(f"   {json.dumps(values)}" for values in rows) + "]"
        for key, rows in reference.curves.items()
    )
    head = f'{{"seeds": {reference.seeds},\n "edges": {reference.edges},\n "curves": {{\n'
    return f"{head}{curves}}}}}\n"


def reference_text(checks: Sequence[Check], name: str) -> str:
    """Return a table of a run and the reference's bands, and the verdict."""
    rows = [
        [
            check.curve,
            check.steps,
            "–" if check.value is None else format_value(check.value),
            format_value(check.low),
            format_value(check.high),
            "" if check.is_inside else "outside",
        ]
        for check in checks
    ]
    header = ["curve", "steps", name, "low", "high", ""]
    count, outside = len(checks), [check for check in checks if not check.is_inside]
    verdict = f"{name} stays in the band: {count} of {count} windows"
    if outside:
        first = min(outside, key=lambda check: check.last)
        where = f"first {first.curve} at steps {first.steps}"
        verdict = f"{name} leaves the band in {len(outside)} of {count} windows, {where}"
    return format_table("Compared with the reference", header, rows, [verdict])


def _values(run: Run, key: str, edges: Sequence[int]) -> list[float]:
    """Return a curve's values in the windows; all must be finite."""
    values = []
    for first, last in pairwise(edges):
        value = mean_between(run.records, key, first, last)
        if value is None or not math.isfinite(value):
            raise UserError(
                f"a reference needs finite values; {key} of {run.folder} has none at steps "
                f"{first + 1} to {last} (is trainer.log_interval larger than a window?)"
            )
        values.append(float(f"{value:.{_DIGITS}g}"))
    return values
