"""Where finished blocks are kept until the data set is complete: here, a folder beside it.

``DST.partial`` holds the plan, a record and the file of every finished block. A block appears in it
at once or not at all, so a conversion that was killed goes on from there, and several processes and
machines fill one folder together.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_prep.distribute.locks import locked
from data_prep.distribute.plan import Plan, difference, parse_plan
from data_prep.distribute.tally import Record
from data_prep.publish.staging import sync
from pospre.errors import UserError

PLAN_NAME = "plan.json"
_UNFINISHED_PLAN = re.compile(re.escape(PLAN_NAME) + r"\.\d+")


class Store(ABC):
    """Keeps the finished blocks of one conversion. It travels to the workers."""

    where: str

    @abstractmethod
    def begin(self, plan: Plan) -> None:
        """Note the plan, or compare it with what an earlier run or another part has noted."""

    @abstractmethod
    def plan(self) -> Plan | None:
        """Return the plan that is noted; None: nothing has begun."""

    def adopt(self, plan: Plan) -> None:
        """Take over what was begun before the source changed: blocks whose own files are the same.

        What shares nothing with the plan stays as it is.
        """
        before = self.plan()
        if before is None or before.key == plan.key or not plan.continues(before):
            return
        records = self.records()
        stale = {number for number, record in records.items() if not plan.owns(record)}
        if stale != records.keys() or not records:
            self._replace_plan(plan, [records[number] for number in stale])

    @abstractmethod
    def _replace_plan(self, plan: Plan, stale: list[Record]) -> None:
        """Forget some blocks, then note another plan."""

    @abstractmethod
    def records(self) -> dict[int, Record]:
        """Return the records of the finished blocks, by number."""

    @abstractmethod
    def scratch(self) -> contextlib.AbstractContextManager[Path]:
        """Give a fresh folder for the files of a block."""

    @abstractmethod
    def keep(self, folder: Path, record: Record) -> None:
        """Take the files of a finished block out of its scratch folder."""

    def settle(self, record: Record) -> None:  # noqa: B027 (what is far away is settled)
        """Make sure that the files of a finished block are on the disk."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what this command has put there."""

    @abstractmethod
    def alone(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Make sure that nobody else does the work called ``name`` meanwhile.

        While somebody does the work ``locks.WHOLE``, nobody does any other.
        """

    def check(self, plan: Plan, before: Plan) -> None:
        """Compare a plan with the one that is noted.

        Raises:
            UserError: they differ.
        """
        if plan.key == before.key:
            return
        why = difference(before.made_from, plan.made_from) or "made by another version"
        raise UserError(
            f"{self.where} holds unfinished work of another conversion ({why}); finish that one, "
            "remove it, or choose another DST; data_prep.convert --overwrite, without --part, "
            "replaces it."
        )


def parse_record(text: str | bytes, where: str) -> Record:
    """Read the record of a block.

    Raises:
        UserError: it is damaged.
    """
    try:
        record = Record(**json.loads(text))
        if not len(record.labels) == len(record.num_bytes) == len(record.crc32c):
            raise ValueError("as many labels as samples and checksums")
        return record
    except (ValueError, TypeError) as error:
        raise UserError(f"{where} is damaged; remove it and convert again.") from error


class LocalStore(Store):
    """The folder ``DST.partial``.

    Args:
        destination: of the data set.
        are_final: whether the files of the blocks are those of the data set.
    """

    def __init__(self, destination: Path, *, are_final: bool = True) -> None:
        self.destination, self._are_final = destination, are_final
        self.folder = destination.with_name(f"{destination.name}.partial")
        self.lock = destination.with_name(f"{destination.name}.partial.lock")
        self.where = str(self.folder)
        self.data, self._blocks = self.folder / "data", self.folder / "blocks"

    def begin(self, plan: Plan) -> None:
        """Note the plan, or compare it with what is there.

        The plan comes first and goes last: a folder that holds anything else alone is not ours.
        """
        before = self.plan()
        if before is None:
            self._check_free()
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write(self.folder / PLAN_NAME, plan.as_json())
        else:
            self.check(plan, before)
        for folder in (self.data, self._blocks):
            folder.mkdir(exist_ok=True)

    def _check_free(self) -> None:
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if not _UNFINISHED_PLAN.fullmatch(path.name):
                raise UserError(
                    f"{self.folder} would keep the finished blocks, but holds something else "
                    f"({path.name}); move it away or choose another DST."
                )

    def plan(self) -> Plan | None:
        """Return the plan that is noted; None: nothing has begun."""
        path = self.folder / PLAN_NAME
        return parse_plan(path.read_bytes(), str(path)) if path.exists() else None

    def records(self) -> dict[int, Record]:
        """Return the records of the blocks whose files are there in full."""
        found = [parse_record(p.read_bytes(), str(p)) for p in sorted(self._blocks.glob("*.json"))]
        return {record.number: record for record in found if self._is_whole(record)}

    def _replace_plan(self, plan: Plan, stale: list[Record]) -> None:
        for record in stale:
            self._record_path(record).unlink()
        self._write(self.folder / PLAN_NAME, plan.as_json())

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a fresh folder on the same disk."""
        folder = Path(tempfile.mkdtemp(prefix="block-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def keep(self, folder: Path, record: Record) -> None:
        """Move the files of a block to their place; the record goes last."""
        for name, _, _ in record.files:
            (folder / name).replace(self.data / name)
        text = json.dumps(record.as_json(), separators=(",", ":"))
        self._write(self._record_path(record), text)

    def settle(self, record: Record) -> None:
        """Write what the system still holds in memory, unless it is going to be copied."""
        for name, _, _ in record.files if self._are_final else ():
            sync(self.data / name)

    def discard(self) -> None:
        """Remove the plan and all that belongs to it; the folder too, unless it holds more."""
        if (self.folder / PLAN_NAME).exists():
            for path in (*self.folder.glob("block-*"), self._blocks, self.data):
                shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.folder / PLAN_NAME).unlink()
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Hold a lock that ends with this process, however it ends."""
        busy = f"is writing {self.destination} right now; wait for it."
        with locked(self.lock, name, busy):
            yield

    def _is_whole(self, record: Record) -> bool:
        """Tell whether a block's files have their sizes; after a power cut they may not."""
        for name, size, _ in record.files:
            path = self.data / name
            if not path.is_file() or path.stat().st_size != size:
                return False
        return True

    def _record_path(self, record: Record) -> Path:
        return self._blocks / f"{record.number:05d}.json"

    def _write(self, path: Path, text: str) -> None:
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            fresh.write_text(text)
            fresh.replace(path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise
