"""Finished blocks → the data set: its description, and everything in its place at once."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

from data_prep.distribute.plan import Plan, difference
from data_prep.distribute.store import LocalStore, Store
from data_prep.distribute.tally import Record
from data_prep.encode.deep_report import describe_deep
from data_prep.encode.moments import Moments
from data_prep.publish import description as sidecar
from data_prep.publish.staging import (
    clean_parents,
    remove_stale_partials,
    replace_folder,
    replace_pair,
)
from pospre.data.stores.description import SIDECAR_NAME, VERSION, pack_sums
from pospre.data.stores.mds import is_mds
from pospre.data.stores.mds_index import INDEX_NAME
from pospre.errors import UserError
from pospre.object_store import check_writable, is_remote

_REMEDY = (
    "choose another DST, remove it, or replace it with data_prep.convert --overwrite, without "
    "--part."
)


class Target(ABC):
    """Where a data set goes.

    Attributes:
        store: keeps the finished blocks until then.
    """

    store: Store

    @abstractmethod
    def exists(self) -> bool:
        """Tell whether a complete data set is there."""

    @abstractmethod
    def is_complete(self, made_from: dict[str, Any]) -> bool:
        """Tell whether this very conversion is there; False also when nothing is there.

        Raises:
            UserError: something else is there.
        """

    @abstractmethod
    def check_replaceable(self) -> None:
        """Refuse to remove what is no data set: the name may be a slip."""

    def check_apart(self, source: Path) -> None:  # noqa: B027 (only disks can overlap)
        """Refuse a destination inside its own source."""

    def clean_parents(self) -> AbstractContextManager[None]:
        """Remove the folders made on the way if nothing comes of it."""
        return nullcontext()

    @abstractmethod
    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Put the data set in its place."""


def open_target(destination: str | Path, data_format: str) -> Target:
    """Return the target for a destination.

    Raises:
        UserError: the name does not suit the format, or the bucket cannot be written.
    """
    name = str(destination)
    if is_remote(name):
        if data_format != "mds":
            raise UserError(f"{name}: only MDS shards go straight to a bucket; use --format mds.")
        from data_prep.publish.bucket import RemoteTarget

        check_writable(name)  # wrong addresses are said at once, not after ten tries
        return RemoteTarget(name)
    if "://" in name:
        raise UserError(f"{name} is of a kind that is not written; give a path or s3://….")
    path = Path(destination)
    is_beton = path.suffix == ".beton"
    if is_beton != (data_format == "ffcv"):
        remedy = "end in .beton" if data_format == "ffcv" else "be a folder, not a .beton"
        raise UserError(f"DST {path} must {remedy} for --format {data_format}.")
    if path.exists() and path.is_dir() == is_beton:
        kind = "folder" if is_beton else "file"
        raise UserError(f"DST {path} is a {kind}; choose another name.")
    return LocalBeton(path) if is_beton else LocalShards(path)


def refuse_other(where: object, content: dict[str, Any], made_from: dict[str, Any]) -> None:
    """Compare a data set's description with the conversion that is wanted.

    Raises:
        UserError: they differ.
    """
    why = difference(content["made_from"], made_from)
    if why is not None:
        raise UserError(f"{where} exists, {why}; {_REMEDY}")


def describe(plan: Plan, records: Sequence[Record]) -> dict[str, Any]:
    """Return the description of a data set, but for its checksums."""
    num_samples = sum(len(record.labels) for record in records)
    num_kept = sum(record.num_kept for record in records)
    num_marked = sum(record.num_marked for record in records)
    content = {
        "format": f"pospre-{plan.format}",
        "version": VERSION,
        "samples": num_samples,
        "classes": plan.classes,
        "kept": num_kept,
        "marked": num_marked,
        "encoded": num_samples - num_kept - num_marked,
        "ignored": plan.num_ignored,
        "skipped": [item for record in records for item in record.skipped],
        "made_from": plan.made_from,
    }
    sides = [pair for record in records for pair in record.sides]
    if sides:
        content["max_pixels"] = max(width * height for width, height in sides)
    if plan.ignored:
        content["ignored_examples"] = plan.ignored
    for key in ("annotation", "annotation_classes", "split_rule", "titles"):
        if getattr(plan, key) is not None:
            content[key] = getattr(plan, key)
    sums = [record.sums for record in records if record.sums is not None]
    if sums:
        moments = Moments(len(sums[0][1]))
        for entry in sums:
            moments.add_sums(entry)
        content["pixels" if sides else "features"] = moments.describe()
    channels = plan.made_from["settings"]["channels"]
    if channels != 3:
        content["channels"] = channels
    if any(record.deep for record in records):
        content["deep"] = describe_deep(records)
    content["crc32c"] = pack_sums([value for record in records for value in record.crc32c])
    return content


def describe_shards(plan: Plan, records: Sequence[Record]) -> tuple[str, str]:
    """Return the texts of ``index.json``, as Streaming writes it, and of our description."""
    shards = [shard for record in records for shard in record.shards]
    index = json.dumps({"version": 2, "shards": shards}, sort_keys=True)
    files = [entry for record in records for entry in record.files]
    manifest = {name: [size, digest] for name, size, digest in files}
    return index, sidecar.as_text({**describe(plan, records), "manifest": manifest})


class _LocalTarget(Target):
    data_format: str

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store: LocalStore = LocalStore(path, are_final=self.data_format == "mds")

    def __str__(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return sidecar.sidecar_path(self.path, self.data_format).exists() and self.path.exists()

    def is_complete(self, made_from: dict[str, Any]) -> bool:
        path = self.path
        if not path.exists() or (path.is_dir() and not any(path.iterdir())):
            return False
        if not self.exists():
            raise UserError(f"{path} exists and was not made by this command; {_REMEDY}")
        content = sidecar.read_sidecar(path)
        refuse_other(path, content, made_from)
        sidecar.check_sizes(path, content)
        return True

    def check_apart(self, source: Path) -> None:
        inside = source.resolve()
        for path in (self.path, self.store.folder, self.store.lock):
            target = path.resolve()
            if target == inside or inside in target.parents or target in inside.parents:
                raise UserError(
                    f"DST {self.path}, with {self.store.folder.name} beside it, and SRC {source} "
                    "must lie apart."
                )

    def clean_parents(self) -> AbstractContextManager[None]:
        return clean_parents(self.path)


class LocalShards(_LocalTarget):
    """A folder of MDS shards."""

    data_format = "mds"

    def check_replaceable(self) -> None:
        """Refuse to remove a folder that holds anything beside shards and their descriptions."""
        for path in sorted(self.path.iterdir()) if self.path.is_dir() else ():
            is_own = path.name in (INDEX_NAME, SIDECAR_NAME) or path.suffix == ".mds"
            if not is_own or not path.is_file() or not is_mds(self.path):
                raise UserError(
                    f"{self.path} is a folder that holds something else than a data set "
                    f"({path.name}); --overwrite would remove it. Choose another DST, or remove it "
                    "yourself."
                )

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Describe the shards where they are, then rename their folder."""
        self.check_replaceable()  # hours have passed
        index, description = describe_shards(plan, records)
        names = {name for record in records for name, _, _ in record.files}
        for path in self.store.data.iterdir():  # left by a kill between a block and its record
            if path.name not in names:
                path.unlink()
        (self.store.data / SIDECAR_NAME).write_text(description)
        (self.store.data / INDEX_NAME).write_text(index)
        replace_folder(self.store.data, self.path)
        self.store.discard()
        with suppress(UserError, OSError):  # another process's, who knows
            remove_stale_partials(self.path)


class LocalBeton(_LocalTarget):
    """A ``.beton`` file."""

    data_format = "ffcv"

    def is_complete(self, made_from: dict[str, Any]) -> bool:
        """Look also at a description without its file: it may be something else."""
        if not self.path.exists() and sidecar.sidecar_path(self.path, self.data_format).exists():
            sidecar.read_sidecar(self.path)
        return super().is_complete(made_from)

    def check_replaceable(self) -> None:
        """A file is replaced whatever it holds: its name ends in ``.beton``."""

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Put the pieces together, then rename file and description."""
        from data_prep.publish.writers.ffcv import DamagedPiece, write_beton

        data = self.store.data / sidecar.BETON_NAME
        annotated = plan.annotation is not None
        try:
            num_bytes, digest = write_beton(
                data, self.store.data, records, plan.limit, annotated=annotated
            )
        except DamagedPiece as error:
            raise UserError(
                f"{error} has changed since it was written; remove it and convert again."
            ) from error
        description = self.store.data / SIDECAR_NAME
        checksums = {"bytes": num_bytes, "sha256": digest}
        description.write_text(sidecar.as_text({**describe(plan, records), **checksums}))
        # The description first: without the file beside it, it means nothing to a reader.
        beside = sidecar.sidecar_path(self.path, self.data_format)
        replace_pair((description, beside), (data, self.path))
        self.store.discard()
