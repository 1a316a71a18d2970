"""MDS shards straight into a bucket.

Every block's shard goes up as soon as it is finished and is then removed here; its record follows
in the folder ``.pospre`` of the same address. When all blocks are there, our description goes up
and, last of all, ``index.json``: before that no reader sees a data set.

A block's key is in the names of its shard and record, so nothing else is written to these names: a
data set that is replaced stays whole and readable until the new ``index.json`` is up, and is only
then removed.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from boto3.s3.transfer import TransferConfig

from data_prep.distribute.plan import Plan, parse_plan
from data_prep.distribute.store import PLAN_NAME, Store, parse_record
from data_prep.distribute.tally import Record
from data_prep.publish import description as sidecar
from data_prep.publish.publishing import Target, describe_shards, refuse_other
from data_prep.publish.staging import is_alive
from pospre.data.stores.mds import INDEX_NAME, SIDECAR_NAME
from pospre.errors import UserError
from pospre.object_store import Bucket

_WORK = ".pospre"
_SCRATCH = "pospre-convert-"
_TRIES = 10  # boto waits longer from try to try: over a minute in all
_THREADS = 16
_UNFINISHED = re.compile(r"shard\.[0-9a-f]{16}\.\d{5}(\.\d{5})?\.mds")
_REMEDY = "remove the data set there, or choose another DST"


class RemoteStore(Store):
    """The finished shards at an ``s3://`` address, and their records in a folder below it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.where = f"{self.uri}/{_WORK}"

    def begin(self, plan: Plan) -> None:
        """Note the plan, or compare it with what is there; refuse an address that is taken."""
        before = self.plan()
        if before is None:
            self._check_free()
            with self.work() as work:
                if work.put_new(PLAN_NAME, plan.as_json().encode()):
                    return
            before = self.plan()  # of somebody who began at the same moment
        if before is None:
            raise UserError(f"another conversion is at work in {self.uri}; wait for it.")
        self.check(plan, before)

    def _check_free(self) -> None:
        with self.bucket() as bucket:
            there = bucket.list()
            ours = {INDEX_NAME, SIDECAR_NAME, *(_listed(bucket, there) or ())}
            for name in there:
                if name not in ours and not _UNFINISHED.fullmatch(name):
                    raise UserError(
                        f"{self.uri} holds other things ({name}); choose an empty prefix."
                    )

    def plan(self) -> Plan | None:
        """Return the plan that is noted; None: nothing has begun."""
        with self.work() as work:
            if PLAN_NAME not in work.list():
                return None
            return parse_plan(work.read(PLAN_NAME), f"{self.where}/{PLAN_NAME}")

    def records(self) -> dict[int, Record]:
        """Return the records of the blocks whose shards are there in full."""
        plan = self.plan()
        if plan is None:
            return {}
        with self.bucket() as bucket, self.work() as work:
            there = bucket.list()
            own = (_record_name(number, key) for number, key in enumerate(plan.block_keys))
            names = sorted({*own}.intersection(work.list()))
            with ThreadPoolExecutor(_THREADS) as threads:
                texts = threads.map(work.read, names)
                found = [
                    parse_record(text, f"{self.where}/{name}")
                    for name, text in zip(names, texts, strict=True)
                ]
        return {
            record.number: record
            for record in found
            if all(there.get(name) == size for name, size, _ in record.files)
        }

    def _replace_plan(self, plan: Plan, stale: list[Record]) -> None:
        with self.work() as work:
            work.remove([_record_name(record.number, record.key) for record in stale])
            work.put(PLAN_NAME, plan.as_json().encode())

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a fresh folder in the system's place for temporary files."""
        _remove_stale()
        with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
            yield Path(folder)

    def keep(self, folder: Path, record: Record) -> None:
        """Upload the shards of a block, in several pieces at once; then its record."""
        config = TransferConfig(max_concurrency=4)
        names = [name for name, _, _ in record.files]
        _rename(record)
        with self.bucket() as bucket:
            for here, (name, size, _) in zip(names, record.files, strict=True):
                key = bucket.path(name)
                bucket.client.upload_file(str(folder / here), bucket.name, key, Config=config)
                found = bucket.client.head_object(Bucket=bucket.name, Key=key)["ContentLength"]
                if found != size:
                    raise UserError(f"{self.uri}/{name} has {found} bytes instead of {size}.")
                (folder / here).unlink()
            text = json.dumps(record.as_json(), separators=(",", ":"))
            bucket.put(f"{_WORK}/{_record_name(record.number, record.key)}", text.encode())

    def discard(self) -> None:
        """Remove the shards that no index lists, and the records; the plan goes last."""
        with self.bucket() as bucket, self.work() as work:
            names = work.list()
            if not names:
                return
            there = bucket.list()
            listed = _listed(bucket, there)
            if listed is not None:
                bucket.remove([n for n in there if _UNFINISHED.fullmatch(n) and n not in listed])
            work.remove([name for name in names if name != PLAN_NAME])
            work.remove([PLAN_NAME])

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Buckets have no locks.

        Two runs of one conversion write the same bytes under the same names; what another has done
        meanwhile is looked at before the index goes up.
        """
        yield

    def bucket(self) -> Bucket:
        """Open the address."""
        return _open(self.uri, os.environ.get("S3_ENDPOINT_URL"), os.getpid())

    def work(self) -> Bucket:
        """Open the folder of the records."""
        return _open(self.where, os.environ.get("S3_ENDPOINT_URL"), os.getpid())


class RemoteTarget(Target):
    """MDS shards at an ``s3://`` address."""

    def __init__(self, uri: str) -> None:
        self.store: RemoteStore = RemoteStore(uri)
        self.uri = self.store.uri
        self._replaced: dict[str, Any] | None = None

    def __str__(self) -> str:
        return self.uri

    def exists(self) -> bool:
        """Tell whether an index is there: it goes up last."""
        with self.store.bucket() as bucket:
            return INDEX_NAME in bucket.list()

    def is_complete(self, made_from: dict[str, Any]) -> bool:
        """Compare the description in the bucket, and the sizes of all shards."""
        with self.store.bucket() as bucket:
            there = bucket.list()
            content = self._description(bucket, there)
            if content is None:
                return False
            refuse_other(self.uri, content, made_from)
            if _listed(bucket, there) != set(content["manifest"]):
                return False  # killed between description and index
        sizes = {name: size for name, (size, _) in content["manifest"].items()}
        self._check_sizes(there, sizes, "convert again with --overwrite")
        return True

    def check_replaceable(self) -> None:
        """Refuse to replace what was not made by this command; remember what may be replaced."""
        with self.store.bucket() as bucket:
            self._replaced = self._description(bucket, bucket.list())

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Upload the descriptions, the index last; then remove what they replace."""
        index, description = describe_shards(plan, records)
        sizes = {name: size for record in records for name, size, _ in record.files}
        with self.store.bucket() as bucket:
            there = bucket.list()
            before = self._description(bucket, there)
            if before not in (None, self._replaced, json.loads(description)):
                raise UserError(
                    f"{self.uri} holds another data set; choose another DST, or replace it with "
                    "--overwrite."
                )
            noted = self.store.plan()
            if noted is None or noted.key != plan.key:
                raise UserError(
                    f"another conversion has taken {self.uri} over; choose another DST for one of "
                    "them."
                )
            self._check_sizes(there, sizes, "run the same command again")
            old = _listed(bucket, there) or set()
            bucket.put(SIDECAR_NAME, description.encode())
            bucket.put(INDEX_NAME, index.encode())
            bucket.remove(sorted(name for name in old if name in there and name not in sizes))
        self.store.discard()

    def _description(self, bucket: Bucket, there: Mapping[str, int]) -> dict[str, Any] | None:
        """Return the description of the data set that is there; None: there is none."""
        if INDEX_NAME not in there:
            return None
        if SIDECAR_NAME not in there:
            raise UserError(
                f"{self.uri} holds a data set that was not made by this command; choose another "
                "DST."
            )
        where = f"{self.uri}/{SIDECAR_NAME}"
        return sidecar.parse_sidecar(bucket.read(SIDECAR_NAME), where, "mds", _REMEDY)

    def _check_sizes(self, there: Mapping[str, int], sizes: Mapping[str, int], remedy: str) -> None:
        for name, size in sizes.items():
            if there.get(name) != size:
                state = f"has {there[name]} bytes instead of {size}" if name in there else "is gone"
                raise UserError(f"{self.uri}/{name} {state}; {remedy}.")


@cache
def _open(uri: str, endpoint: str | None, pid: int) -> Bucket:
    """Open an address once in every process: boto takes a tenth of a second for it."""
    return Bucket(uri, patience=_TRIES)


def _record_name(number: int, key: str) -> str:
    return f"{key}.{number:05d}.json"


def _rename(record: Record) -> None:
    """Put a block's key into the names of its shards."""

    def fresh(name: str) -> str:
        return f"shard.{record.key}.{name.removeprefix('shard.')}"

    record.files = [(fresh(name), size, digest) for name, size, digest in record.files]
    for shard in record.shards:
        shard["raw_data"]["basename"] = fresh(shard["raw_data"]["basename"])


def _listed(bucket: Bucket, there: Mapping[str, int]) -> set[str] | None:
    """Return the shards of the data set that is there; None: nobody can tell."""
    if INDEX_NAME not in there:
        return set()
    try:
        shards = json.loads(bucket.read(INDEX_NAME))["shards"]
        return {shard["raw_data"]["basename"] for shard in shards}
    except (ValueError, TypeError, KeyError):
        return None


def _remove_stale() -> None:
    """Remove what workers that were killed have left on this machine."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = folder.name.removeprefix(_SCRATCH).split("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
