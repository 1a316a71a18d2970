"""What a certificate is asked for, and what it says."""

from dataclasses import asdict, dataclass
from typing import Any

from pospre.certificate.compare import TOLERANCE, Verdict
from pospre.certificate.legs import Leg


@dataclass(frozen=True)
class Request:
    """What a certificate is asked for.

    Attributes:
        recipe: YAML file.
        overrides: ``key=value`` of it.
        steps: length of the runs.
        save_every: steps between checkpoints.
        kills: of the killed run.
        ranks: numbers of ranks in turn; one number: no run on several.
        also: further overrides under which every second life of a run of their own goes on.
        seed: of the moments.
    """

    recipe: str
    overrides: tuple[str, ...] = ()
    steps: int = 12
    save_every: int = 2
    kills: int = 4
    ranks: tuple[int, ...] = (1, 2, 1)
    also: tuple[tuple[str, ...], ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Column:
    """A disturbed run and what was found."""

    leg: Leg
    ends: list[str]
    seconds: float
    verdicts: list[Verdict]


@dataclass(frozen=True)
class Certificate:
    """What was run, and a verdict for every property of every disturbed run."""

    request: Request
    columns: list[Column]
    seconds: float

    @property
    def is_green(self) -> bool:
        """Whether every property of every run holds."""
        return all(verdict.holds for column in self.columns for verdict in column.verdicts)

    def dump(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"green": self.is_green, "tolerance": TOLERANCE, **asdict(self)}
