"""Data sets on this machine, or on a disk shared by several.

``DST.partial`` contains the plan, the records of finished blocks and their files; each file is
written atomically.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from data_prep.plan.plan import Plan
from data_prep.plan.records import RECORD, Record
from data_prep.publish import atomic
from data_prep.publish.atomic import locked
from data_prep.publish.description import (
    as_text,
    describe,
    describe_shards,
    description_path,
    read_description,
    sha256,
)
from data_prep.publish.destination import PLAN_NAME, REMEDY, Destination
from pospre.atomic_file import atomic_open
from pospre.data.stores.description import SIDECAR_NAME, Description
from pospre.data.stores.mds import is_mds
from pospre.data.stores.mds_index import INDEX_NAME
from pospre.errors import UserError

_BETON_NAME = "data.beton"  # while it is being written


class LocalFiles:
    """``description.Files``: the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def locate(self, name: str) -> str:
        """Return the path of a file."""
        return str(self.folder / name)

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every file by name; empty if there is no folder."""
        sizes = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with suppress(FileNotFoundError):  # renamed by another process
                if path.is_file():
                    sizes[path.name] = path.stat().st_size
        return sizes

    def read(self, names: Sequence[str]) -> list[bytes]:
        """Return the contents of small files."""
        return [(self.folder / name).read_bytes() for name in names]

    def put(self, name: str, content: bytes) -> None:
        """Write a small file atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_open(self.folder / name) as file:
            file.write(content)

    def put_new(self, name: str, content: bytes) -> bool:
        """Write a small file."""
        self.put(name, content)
        return True

    def remove(self, names: Sequence[str]) -> None:
        """Remove files."""
        for name in names:
            (self.folder / name).unlink()


class LocalDestination(Destination):
    """A path, and the folder ``DST.partial`` beside it."""

    data_format: str
    data: LocalFiles

    def __init__(self, path: Path) -> None:
        self.path = path
        self.folder = path.with_name(f"{path.name}.partial")
        self.lock = path.with_name(f"{path.name}.partial.lock")
        self.partial = str(self.folder)
        self.work = LocalFiles(self.folder)
        self.data = LocalFiles(self.folder / "data")
        self.files = LocalFiles(path if self.data_format == "mds" else path.parent)

    def __str__(self) -> str:
        return str(self.path)

    def description(self) -> Description | None:
        """Return the description in the folder or beside the file."""
        beside = description_path(self.path, self.data_format)
        if beside.exists():
            content = read_description(self.path, self.data_format)
            return content if self.path.exists() else None
        if self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
            raise UserError(f"{self.path} exists and was not made by this command; {REMEDY}")
        return None

    def check_apart(self, source: Path) -> None:
        """Refuse a destination inside its own source, or around it."""
        inside = source.resolve()
        for path in (self.path, self.folder, self.lock):
            target = path.resolve()
            if target == inside or inside in target.parents or target in inside.parents:
                raise UserError(
                    f"DST {self.path}, with {self.folder.name} beside it, and SRC {source} must "
                    "not contain each other."
                )

    def check_free(self) -> None:
        """Refuse a folder without a plan that is not empty: it belongs to something else."""
        for path in self.folder.iterdir() if self.folder.exists() else ():
            if not path.name.startswith(f"{PLAN_NAME}."):  # an unfinished plan
                raise UserError(
                    f"{self.folder} is needed for finished blocks, but contains something else "
                    f"({path.name}); move it away or choose another DST."
                )

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a new folder on the same disk."""
        with tempfile.TemporaryDirectory(prefix="block-", dir=self.folder) as folder:
            yield Path(folder)

    def keep(self, folder: Path, record: Record) -> None:
        """Move the files of a block to their place, the record last."""
        self.data.folder.mkdir(exist_ok=True)
        for name, _, _ in record.files:
            (folder / name).replace(self.data.folder / name)
        self.work.put(record.name, record.as_json())

    def discard(self) -> None:
        """Remove the plan and its files; also the folder, unless it contains more."""
        names = self.work.sizes()
        if PLAN_NAME in names:
            for path in (*self.folder.glob("block-*"), self.data.folder):
                shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                self.work.remove([name for name in names if RECORD.fullmatch(name)])
                self.work.remove([PLAN_NAME])
        with suppress(OSError):
            self.folder.rmdir()

    def locked(self, *, shared: bool) -> AbstractContextManager[None]:
        """Hold a lock that is released when this process ends, however it ends."""
        return locked(self.lock, self.path, shared=shared)


class LocalShards(LocalDestination):
    """A folder of MDS shards."""

    data_format = "mds"

    def check_replaceable(self) -> None:
        """Refuse to remove a folder with anything besides shards and their descriptions."""
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            is_own = path.name in (INDEX_NAME, SIDECAR_NAME) or path.suffix == ".mds"
            if not is_own or not path.is_file() or not is_mds(self.path):
                raise UserError(
                    f"{self.path} is a folder with more than a data set ({path.name}); --overwrite "
                    "would remove it. Choose another DST, or remove it yourself."
                )

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Write the descriptions beside the shards, then rename their folder."""
        self.check_replaceable()  # hours have passed
        data, names = self.data, {name for record in records for name, _, _ in record.files}
        data.remove([name for name in data.sizes() if name not in names])  # from a killed run
        for name, text in describe_shards(plan, records).items():
            data.put(name, text.encode())
        atomic.replace_folder(data.folder, self.path)
        self.discard()


class LocalBeton(LocalDestination):
    """A ``.beton`` file."""

    data_format = "ffcv"

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Make the file from the shards, then rename file and description."""
        from data_prep.publish.beton import write_beton

        shards = self.data.folder
        data, described = shards / _BETON_NAME, shards / SIDECAR_NAME
        write_beton(data, shards, records)
        file = {"bytes": data.stat().st_size, "sha256": sha256(data)}
        self.data.put(SIDECAR_NAME, as_text({**describe(plan, records), **file}).encode())
        # the description first: readers ignore it without the file
        beside = description_path(self.path, self.data_format)
        atomic.replace_pair((described, beside), (data, self.path))
        self.discard()
