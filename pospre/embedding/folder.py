"""The folder of an embedding: rows written in place, and what is needed to go on after a kill.

All is written into ``OUT.partial``. A batch's numbers are written and flushed before its lines go
into the journal of this rank, so rows in a journal are complete. When the journals hold every row,
the rank that sees it first makes ``images.jsonl`` of them and renames the folder to ``OUT``.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from pospre.atomic_file import PARTIAL, atomic_open, flush, nearest_existing, sync, write_atomic
from pospre.embedding.layouts import Array, ArrayFile, npy_files, safetensors_files
from pospre.embedding.parquet import PARQUET, write_parquet
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

DESCRIPTION, LINES = "embedding.json", "images.jsonl"
_PLAN, _LOCK, _JOURNAL = "plan.json", "lock", "rows-*.jsonl"
_NAMES = ("model", "data")  # their hashes are compared
_ROOM = 1.1  # free bytes for every byte
_LINE = 350  # bytes of a line of images.jsonl, about
_FLUSH = 1.0  # seconds of work that a power cut may cost


class Folder:
    """Writes rows of arrays into a folder that gets its name when complete.

    Attributes:
        out: its name.
        is_complete: whether all rows are written and the folder has its name.
        done: bool (rows,), the rows that earlier starts and other ranks have written.
    """

    def __init__(
        self, out: Path, plan: Mapping[str, Any], arrays: Sequence[Array], file_format: str
    ) -> None:
        """Check what is there.

        Args:
            out: the folder.
            plan: what the result depends on; the content of ``embedding.json``.
            arrays: the arrays to write, all with the same number of rows.
            file_format: ``npy``, ``safetensors`` or ``parquet``.

        Raises:
            UserError: there is something else, or a result of another plan.
        """
        self.out, self.work = out, out.with_name(out.name + PARTIAL)
        self.plan: dict[str, Any] = json.loads(json.dumps(plan))
        self.arrays, self._format = arrays, file_format
        self.rows = arrays[0].shape[0]
        self.files = (safetensors_files if file_format == "safetensors" else npy_files)(arrays)
        self.done = np.zeros(self.rows, bool)
        self._opened: dict[str, int] = {}
        self._journal: BinaryIO | None = None
        self._pending: list[bytes] = []
        self._flushed = 0.0
        self.is_complete = (out / DESCRIPTION).is_file()
        if self.is_complete:
            self._compare(out / DESCRIPTION, out)
        elif out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(
                f"OUT {out} exists, but is no folder of this command; give another name, or "
                "remove it."
            )
        elif (self.work / _PLAN).exists():
            self._compare(self.work / _PLAN, self.work)

    @property
    def num_bytes(self) -> int:
        """Bytes of the result, about."""
        return sum(file.size for file in self.files) + self.rows * _LINE

    def check_room(self) -> None:
        """Raise a ``UserError`` if the disk lacks room for 1.1 times what is yet to be written."""
        there = sum(path.stat().st_blocks * 512 for path in self.work.glob("*"))
        times = 2 if self._format == "parquet" else 1  # parquet is made of the arrays at the end
        needed = _ROOM * self.num_bytes * times - there
        disk = nearest_existing(self.out.absolute().parent)
        free = shutil.disk_usage(disk).free
        if needed > free:
            raise UserError(
                f"OUT {self.out} needs {gigabytes(needed)} free (1.1 times its size), but the disk "
                f"of {disk} has {gigabytes(free)}; write elsewhere, or less: features=cls,mean, "
                "dtype=float16, fewer layers."
            )

    def open(self, rank: int, ranks: int) -> None:
        """Prepare the files, and read which rows are done; ranks may do so at the same time.

        Raises:
            UserError: it cannot be written, or another process writes this rank's rows.
        """
        with self._naming():
            self.work.mkdir(parents=True, exist_ok=True)
            if (self.work / DESCRIPTION).is_file():  # killed between the last two steps
                self._compare(self.work / DESCRIPTION, self.work)
                self._publish()
                return
            if not (self.work / _PLAN).exists():
                write_atomic(self.work / _PLAN, _text(self.plan))
            journal = self.work / f"rows-{rank}-of-{ranks}.jsonl"
            self._journal = journal.open("r+b" if journal.exists() else "w+b")
            self._hold(self._journal)
            ends = [start + size for _, start, size in _lines(journal)]
            self._journal.truncate(max(ends, default=0))  # a kill may have cut the last line
            self._journal.seek(0, os.SEEK_END)
            for file in self.files:
                self._opened[file.name] = self._prepared(file)
            for path in self.work.glob(_JOURNAL):
                self.done[[row for row, *_ in _lines(path)]] = True

    def write(self, first: int, values: Mapping[str, np.ndarray], lines: Sequence[bytes]) -> None:
        """Write consecutive rows from ``first`` on: an array (n, …) by name, and n lines."""
        with self._naming():
            rows = range(first, first + len(lines))
            for file in self.files:
                for part in file.parts:
                    own = range(max(rows.start, part.rows.start), min(rows.stop, part.rows.stop))
                    if len(own):
                        at = part.offset + (own.start - part.rows.start) * part.array.row_bytes
                        some = values[part.array.name][own.start - first : own.stop - first]
                        _write_all(self._opened[file.name], some, at)
            self._pending += lines
            self.done[rows.start : rows.stop] = True
            if time.monotonic() - self._flushed > _FLUSH:
                self._flush()

    def close(self) -> bool:
        """Finish this rank's rows; return whether this rank completed the folder."""
        with self._naming():
            if self._journal is None:  # ``open`` completed it
                return True
            self._flush()
            self._journal.close()
            for number in self._opened.values():
                os.close(number)
            try:
                lock = (self.work / _LOCK).open("w")
            except FileNotFoundError:  # another rank has completed it
                return False
            with lock:
                with suppress(OSError):  # a disk without locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                return self.work.exists() and self._finish()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the complete ``images.jsonl``."""
        with (self.out / LINES).open("rb") as file:
            for line in file:
                yield parse_object(line)

    def _finish(self) -> bool:
        spans: dict[int, tuple[Path, int, int]] = {}
        for path in self.work.glob(_JOURNAL):
            spans.update({row: (path, start, size) for row, start, size in _lines(path)})
        if len(spans) < self.rows:
            return False
        with atomic_open(self.work / LINES) as target:
            journals = {path: path.open("rb") for path, *_ in spans.values()}
            for row in range(self.rows):
                path, start, size = spans[row]
                journals[path].seek(start)
                target.write(journals[path].read(size))
            flush(target)
            for file in journals.values():
                file.close()
        if self._format == "parquet":
            write_parquet(self.work, self.arrays, self.work / LINES)
        os.replace(self.work / _PLAN, self.work / DESCRIPTION)
        self._publish()
        return True

    def _publish(self) -> None:
        """Remove what only the work needed, and give the folder its name."""
        kept = {LINES, DESCRIPTION}
        kept |= {PARQUET} if self._format == "parquet" else {file.name for file in self.files}
        for path in self.work.iterdir():
            if path.name not in kept:
                path.unlink()
        os.replace(self.work, self.out)  # also takes the place of an empty folder
        sync(self.out.absolute().parent)
        self.is_complete = True

    def _prepared(self, file: ArrayFile) -> int:
        """Return the opened file of the full size; each rank writes the same header."""
        number = os.open(self.work / file.name, os.O_RDWR | os.O_CREAT, 0o666)
        if os.fstat(number).st_size != file.size:
            os.ftruncate(number, file.size)
        _write_all(number, np.frombuffer(file.header, np.uint8), 0)
        return number

    def _flush(self) -> None:
        assert self._journal is not None
        for number in self._opened.values():
            os.fsync(number)
        self._journal.write(b"".join(self._pending))
        flush(self._journal)
        self._pending, self._flushed = [], time.monotonic()

    def _hold(self, journal: BinaryIO) -> None:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process writes {journal.name}; wait for it, or give another OUT."
            ) from None
        except OSError:  # a disk without locks
            pass

    def _compare(self, path: Path, folder: Path) -> None:
        """Raise a ``UserError`` that names the first difference from the plan in a file."""
        try:
            noted = parse_object(path.read_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove {folder}.") from error
        for key, wanted in self.plan.items():
            if noted.get(key) != wanted and key not in _NAMES:
                before, now = (_short(each) for each in (noted.get(key), wanted))
                raise UserError(
                    f"{folder} holds rows with {key} {before}, but now it is {now}; give another "
                    f"OUT, or remove {folder}."
                )

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"{self.work} cannot be written ({error.strerror or error}); make room, or give "
                "another OUT. The same command continues from the rows that are complete."
            ) from error


def gigabytes(number: float) -> str:
    """Return a number of bytes in words."""
    unit, name = (1e9, "GB") if number >= 1e9 else (1e6, "MB")
    return f"{number / unit:,.{1 if number >= unit else 3}f} {name}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}…"


def _text(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2) + "\n").encode()


def _lines(journal: Path) -> Iterator[tuple[int, int, int]]:
    """Yield row, start and size of each whole line; another rank may be writing the last one."""
    start = 0
    with suppress(ValueError, KeyError), journal.open("rb") as file:  # until a line that was cut
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield parse_object(line)["row"], start, len(line)
            start += len(line)


def _write_all(number: int, values: np.ndarray, offset: int) -> None:
    content = values.reshape(-1).view(np.uint8).data
    while content:  # not through a memory map: on a full disk it would end the process
        written = os.pwrite(number, content, offset)
        content, offset = content[written:], offset + written
