"""Where finished blocks are kept until the data set is complete: the same for disks and buckets.

The plan is written first and removed last, and a block's record follows its files. So a conversion
may be killed at any moment and goes on from there, and several processes and machines fill one
store together.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from data_prep.distribute.plan import Plan, difference, parse_plan
from data_prep.distribute.records import Record, parse_record
from pospre.errors import UserError

PLAN_NAME = "plan.json"


class Files(Protocol):
    """The files of a folder, or the objects below an address, without those of sub-folders."""

    def locate(self, name: str) -> str:
        """Return what messages call a file."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file by name."""

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""

    def put(self, name: str, content: bytes) -> None:
        """Write a small file, at once or not at all."""

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file unless it is there; tell whether it was written."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""


class Store(ABC):
    """Keeps the finished blocks of one conversion. It travels to the workers.

    Attributes:
        where: what messages call it.
        data: shards or pieces.
        blocks: their records.
        work: the plan.
    """

    where: str
    data: Files
    blocks: Files
    work: Files

    def plan(self) -> Plan | None:
        """Return the plan that is noted; None: nothing has begun."""
        if PLAN_NAME not in self.work.sizes():
            return None
        (text,) = self.work.read([PLAN_NAME])
        return parse_plan(text, self.work.locate(PLAN_NAME))

    def begin(self, plan: Plan) -> None:
        """Note the plan, or compare it with what an earlier run or another part has noted.

        Raises:
            UserError: they differ, or something else is there.
        """
        before = self.plan()
        if before is None:
            self.check_free()
            if self.work.put_new(PLAN_NAME, plan.as_json()):
                return
            before = self.plan()  # of somebody who began at the same moment
        if before is None:
            raise UserError(f"another conversion is at work in {self.where}; wait for it.")
        if plan.key != before.key:
            why = difference(before.made_from, plan.made_from) or "made by another version"
            raise UserError(
                f"{self.where} holds unfinished work of another conversion ({why}); finish that "
                "one, remove it, or choose another DST; data_prep.convert --overwrite, without "
                "--part, replaces it."
            )

    def adopt(self, plan: Plan) -> None:
        """Take over what was begun before the source changed: blocks whose own files are the same.

        What shares nothing with the plan stays as it is.
        """
        before = self.plan()
        if before is None or before.key == plan.key or not plan.continues(before):
            return
        records = self.records()
        stale = [record for record in records.values() if not plan.owns(record)]
        if len(stale) < len(records) or not records:
            self.blocks.remove([self.record_name(record.number, record.key) for record in stale])
            self.work.put(PLAN_NAME, plan.as_json())

    def records(self) -> dict[int, Record]:
        """Return the records of the blocks whose files are there in full, by number."""
        plan = self.plan()
        if plan is None:
            return {}
        sizes = self.data.sizes()
        named = {self.record_name(number, key) for number, key in enumerate(plan.block_keys)}
        names = sorted(named & self.blocks.sizes().keys())
        found = [
            parse_record(text, self.blocks.locate(name))
            for name, text in zip(names, self.blocks.read(names), strict=True)
        ]
        return {
            record.number: record
            for record in found
            if all(sizes.get(name) == size for name, size, _ in record.files)
        }

    @abstractmethod
    def record_name(self, number: int, key: str) -> str:
        """Return the name of a block's record."""

    @abstractmethod
    def check_free(self) -> None:
        """Refuse a place that something else has taken."""

    @abstractmethod
    def scratch(self) -> AbstractContextManager[Path]:
        """Give a fresh folder for the files of a block."""

    @abstractmethod
    def keep(self, folder: Path, record: Record) -> None:
        """Take the files of a finished block out of its scratch folder, then note its record."""

    def settle(self, record: Record) -> None:  # noqa: B027 (what is far away is settled)
        """Make sure that the files of a finished block are on the disk."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what this command has put there."""

    @abstractmethod
    def alone(self, name: str) -> AbstractContextManager[None]:
        """Make sure that nobody else does the work called ``name`` meanwhile.

        While somebody does the work ``locks.WHOLE``, nobody does any other.
        """
