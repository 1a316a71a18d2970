"""MDS shards straight into a bucket.

Every block's shard goes up as soon as it is finished and is then removed here; its record follows
in the folder ``.pospre`` of the same address. When all blocks are there, our description goes up
and, last of all, ``index.json``: before that no reader sees a data set.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from boto3.s3.transfer import TransferConfig

from data_prep.plan import Plan, parse_plan
from data_prep.publishing import Target, describe_shards, refuse_other
from data_prep.staging import is_alive
from data_prep.store import PLAN_NAME, Store, parse_record
from data_prep.tally import Record
from pospre.data.mds_reader import INDEX_NAME, SIDECAR_NAME
from pospre.errors import UserError
from pospre.object_store import Bucket

_WORK = ".pospre"
_SCRATCH = "pospre-convert-"
_TRIES = 10  # boto waits longer from try to try: over a minute in all
_THREADS = 16
_DELETED_AT_ONCE = 1000  # what S3 takes


class RemoteStore(Store):
    """The finished shards at an ``s3://`` address, and their records in a folder below it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        self.where = f"{self.uri}/{_WORK}"

    def begin(self, plan: Plan) -> None:
        """Note the plan, or compare it with what is there; refuse an address that is taken."""
        before = self.plan()
        if before is not None:
            self.check(plan, before)
            return
        with self.bucket() as bucket:
            others = [name for name in bucket.list() if name not in (INDEX_NAME, SIDECAR_NAME)]
            if others:
                raise UserError(
                    f"{self.uri} holds other things ({others[0]}); choose an empty prefix."
                )
            bucket.put(f"{_WORK}/{PLAN_NAME}", plan.as_json().encode())

    def plan(self) -> Plan | None:
        """Return the plan that is noted; None: nothing has begun."""
        with self.work() as work:
            if PLAN_NAME not in work.list():
                return None
            return parse_plan(read(work, PLAN_NAME), f"{self.where}/{PLAN_NAME}")

    def records(self) -> dict[int, Record]:
        """Return the records of the blocks whose shards are there in full."""
        with self.bucket() as bucket, self.work() as work:
            there = bucket.list()
            names = sorted(set(work.list()) - {PLAN_NAME})
            with ThreadPoolExecutor(_THREADS) as threads:
                texts = threads.map(lambda name: read(work, name), names)
                found = [
                    parse_record(text, f"{self.where}/{name}")
                    for name, text in zip(names, texts, strict=True)
                ]
        return {
            record.number: record
            for record in found
            if all(there.get(name) == size for name, size, _ in record.files)
        }

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Give a fresh folder in the system's place for temporary files."""
        _remove_stale()
        with tempfile.TemporaryDirectory(prefix=f"{_SCRATCH}{os.getpid()}-") as folder:
            yield Path(folder)

    def keep(self, folder: Path, record: Record) -> None:
        """Upload the shards of a block, in several pieces at once; then its record."""
        config = TransferConfig(max_concurrency=4)
        with self.bucket() as bucket:
            for name, size, _ in record.files:
                key = f"{bucket.key}/{name}".lstrip("/")
                bucket.client.upload_file(str(folder / name), bucket.name, key, Config=config)
                found = bucket.client.head_object(Bucket=bucket.name, Key=key)["ContentLength"]
                if found != size:
                    raise UserError(f"{self.uri}/{name} has {found} bytes instead of {size}.")
                (folder / name).unlink()
            text = json.dumps(record.as_json(), separators=(",", ":"))
            bucket.put(f"{_WORK}/{record.number:05d}.json", text.encode())

    def discard(self) -> None:
        """Remove the plan and the records; shards that nothing describes go with them."""
        with self.bucket() as bucket, self.work() as work:
            names = [f"{_WORK}/{name}" for name in work.list()]
            if names and INDEX_NAME not in bucket.list():
                names += [name for name in bucket.list() if name.startswith("shard.")]
            remove(bucket, names)

    @contextmanager
    def alone(self, name: str) -> Iterator[None]:
        """Buckets have no locks: two runs would write the same bytes under the same names."""
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
            if INDEX_NAME not in there:
                return False
            content = self._description(bucket, there)
        refuse_other(self.uri, content, made_from)
        for name, (size, _) in content["manifest"].items():
            if there.get(name) != size:
                state = f"has {there[name]} bytes instead of {size}" if name in there else "is gone"
                raise UserError(f"{self.uri}/{name} {state}; convert again with --overwrite.")
        return True

    def check_replaceable(self) -> None:
        """Remove an old data set, its index first, so that nobody reads half of it."""
        with self.store.bucket() as bucket:
            there = bucket.list()
            if INDEX_NAME in there:
                content = self._description(bucket, there)
                for names in ([INDEX_NAME], [SIDECAR_NAME], list(content["manifest"])):
                    remove(bucket, names)

    def publish(self, plan: Plan, records: Sequence[Record]) -> None:
        """Upload the descriptions, the index last; then remove the records."""
        index, description = describe_shards(plan, records)
        with self.store.bucket() as bucket:
            bucket.put(SIDECAR_NAME, description.encode())
            bucket.put(INDEX_NAME, index.encode())
        self.store.discard()

    def _description(self, bucket: Bucket, there: dict[str, int]) -> dict[str, Any]:
        if SIDECAR_NAME not in there:
            raise UserError(
                f"{self.uri} holds a data set that was not made by this command; choose another "
                "DST."
            )
        content: dict[str, Any] = json.loads(read(bucket, SIDECAR_NAME))
        return content


@cache
def _open(uri: str, endpoint: str | None, pid: int) -> Bucket:
    """Open an address once in every process: boto takes a tenth of a second for it."""
    return Bucket(uri, patience=_TRIES)


def read(bucket: Bucket, name: str) -> bytes:
    """Return a small object of a folder."""
    key = f"{bucket.key}/{name}".lstrip("/")
    body: bytes = bucket.client.get_object(Bucket=bucket.name, Key=key)["Body"].read()
    return body


def remove(bucket: Bucket, names: Sequence[str]) -> None:
    """Remove objects of a folder."""
    keys = [{"Key": f"{bucket.key}/{name}".lstrip("/")} for name in names]
    for start in range(0, len(keys), _DELETED_AT_ONCE):
        some = keys[start : start + _DELETED_AT_ONCE]
        bucket.client.delete_objects(Bucket=bucket.name, Delete={"Objects": some, "Quiet": True})


def _remove_stale() -> None:
    """Remove what workers that were killed have left on this machine."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*-*"):
        pid = folder.name.removeprefix(_SCRATCH).split("-")[0]
        if pid.isdigit() and not is_alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
