"""Where a data set goes: what is there already, and how the finished blocks take its place."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_prep.distribute.plan import Plan, difference
from data_prep.distribute.records import Record
from data_prep.publish.description import check_sizes, data_files
from data_prep.publish.store import Files, Store
from pospre.errors import UserError

REMEDY = (
    "choose another DST, remove it, or replace it with data_prep.convert --overwrite, without "
    "--part."
)


class Target(ABC):
    """Where a data set goes; its text is what messages call it.

    Attributes:
        store: keeps the finished blocks until then.
        files: among which those of the data set will be.
    """

    store: Store
    files: Files

    @abstractmethod
    def description(self) -> dict[str, Any] | None:
        """Return the description of the complete data set that is there, None where there is none.

        Raises:
            UserError: something else is there.
        """

    def is_complete(self, made_from: dict[str, Any]) -> bool:
        """Tell whether this very conversion is there; False also when nothing is there.

        Raises:
            UserError: something else is there, or files of it are missing.
        """
        content = self.description()
        if content is None:
            return False
        why = difference(content["made_from"], made_from)
        if why is not None:
            raise UserError(f"{self} exists, {why}; {REMEDY}")
        noted = data_files(content, Path(str(self)).name)
        check_sizes(self.files, noted, "copy it again or convert again with --overwrite")
        return True

    @abstractmethod
    def check_replaceable(self) -> None:
        """Refuse to remove what is no data set: the name may be a slip."""

    def check_apart(self, source: Path) -> None:  # noqa: B027 (only disks can overlap)
        """Refuse a destination inside its own source."""

    @abstractmethod
    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Put the data set in its place."""
