"""The destination of a data set, where its finished blocks are kept until all are there.

The plan is written first and removed last, and a block's record follows its files. So a conversion
may be killed at any time and resumed, and several processes and machines can work for one
destination.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from data_prep.plan.plan import Plan, difference
from data_prep.plan.records import Record, parse
from data_prep.publish.description import Files, check_sizes, data_files
from pospre.data.stores.description import Description
from pospre.errors import UserError

PLAN_NAME = "plan.json"
REMEDY = (
    "choose another DST, remove it, or replace it with data_prep.convert --overwrite, without "
    "--part."
)


class Destination(ABC):
    """The destination of a data set; its text is its name in messages. It is sent to workers."""

    partial: str  # name of the place of finished blocks, for messages
    data: Files  # shards of finished blocks
    work: Files  # their records and the plan
    files: Files  # the place of the data set's files

    @abstractmethod
    def description(self) -> Description | None:
        """Return the description of the complete data set there; None if the place is empty.

        ``UserError`` if something else is there.
        """

    def is_complete(self, made_from: dict[str, Any]) -> bool:
        """Return whether this exact conversion is there; refuse others, and incomplete ones."""
        content = self.description()
        if content is None:
            return False
        why = difference(content.made_from.model_dump(), made_from)
        if why is not None:
            raise UserError(f"{self} exists, {why}; {REMEDY}")
        noted = data_files(content, Path(str(self)).name)
        check_sizes(self.files, noted, "Copy it again or convert again with --overwrite.")
        return True

    def check_replaceable(self) -> None:  # noqa: B027 (any .beton file is a data set)
        """Refuse to remove anything but a data set: the name may be a typo."""

    def check_apart(self, source: Path) -> None:  # noqa: B027 (only disks can overlap)
        """Refuse a destination inside its own source."""

    def plan(self) -> Plan | None:
        """Return the recorded plan; None: not begun."""
        if PLAN_NAME not in self.work.sizes():
            return None
        (text,) = self.work.read([PLAN_NAME])
        return parse(Plan, text, self.work.locate(PLAN_NAME))

    def begin(self, plan: Plan) -> None:
        """Record the plan; ``UserError`` if that of an earlier run or another part differs."""
        before = self.plan()
        if before is None:
            self.check_free()
            if self.work.put_new(PLAN_NAME, plan.as_json()):
                return
            before = self.plan()  # of another process that began simultaneously
        if before is None:
            raise UserError(f"another conversion is running in {self.partial}; wait for it.")
        if plan.key != before.key:
            why = difference(before.made_from, plan.made_from) or "made by another version"
            raise UserError(
                f"{self.partial} has unfinished work of another conversion ({why}); finish that "
                "one, remove it, or choose another DST; data_prep.convert --overwrite, without "
                "--part, replaces it."
            )

    def adopt(self, plan: Plan) -> None:
        """Take over the blocks of an unfinished conversion whose files have not changed since.

        A conversion that shares no block with the plan is not touched.
        """
        before = self.plan()
        if before is None or before.key == plan.key or not plan.continues(before):
            return
        done = before.record_names & self.work.sizes().keys()
        if not done or done & plan.record_names:
            self.work.remove(sorted(done - plan.record_names))
            self.work.put(PLAN_NAME, plan.as_json())

    def records(self) -> dict[int, Record]:
        """Return the records of blocks whose files are complete, by number."""
        plan = self.plan()
        if plan is None:
            return {}
        sizes = self.data.sizes()
        names = sorted(plan.record_names & self.work.sizes().keys())
        listed = [
            parse(Record, text, self.work.locate(name))
            for name, text in zip(names, self.work.read(names), strict=True)
        ]
        return {
            record.number: record
            for record in listed
            if all(sizes.get(name) == size for name, size, _ in record.files)
        }

    @abstractmethod
    def check_free(self) -> None:
        """Refuse a place that is already in use."""

    @abstractmethod
    def scratch(self) -> AbstractContextManager[Path]:
        """Yield a new folder for the files of a block."""

    @abstractmethod
    def keep(self, folder: Path, record: Record) -> None:
        """Move the files of a finished block out of its scratch folder, then write its record."""

    @abstractmethod
    def discard(self) -> None:
        """Remove everything that this command has written there."""

    @abstractmethod
    def locked(self, *, shared: bool) -> AbstractContextManager[None]:
        """Lock the destination against other processes; those with parts share the lock."""

    @abstractmethod
    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Make the data set from the finished blocks, atomically."""
