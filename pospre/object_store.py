"""S3 for this package: list, read, fetch, put, delete, and a quick check before training.

The endpoint comes from ``S3_ENDPOINT_URL`` or boto's ``AWS_ENDPOINT_URL``; key, secret and region
come from boto's own variables and files.
"""

import io
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, BinaryIO, NamedTuple

# boto3 comes with the extra s3 and is slow to import: it is imported when a bucket is opened
from pospre.attempts import attempts
from pospre.bucket_errors import (
    ENDPOINTS,
    MISSING,
    NOT_KNOWN,
    Garbled,
    as_user_error,
    check_variables,
    code_of,
    is_credential_fault,
    shown,
    without_passwords,
)
from pospre.errors import Unreachable, UserError, needing

_THERE_ALREADY = ("PreconditionFailed", "412", "ConditionalRequestConflict", "409")
_PATIENCE = 300.0
_CHECKED = 3  # attempts of a check: a server may be busy once
_AT_ONCE = 10  # requests, as many as boto keeps connections
_SMALL = 1 << 30  # bytes: the metrics of the longest runs have fewer
_PIECE = 64 << 20  # bytes per request: boto's 8 MB mean 72 requests for a ViT-S with AdamW


class Stored(NamedTuple):
    """An object in a bucket."""

    size: int  # bytes
    tag: str  # its ETag, which changes with its content; empty if the server has none
    time: str  # when it was last modified

    @property
    def stamp(self) -> str:
        """A text that changes with the content."""
        return f"{self.size} {self.tag or self.time}"


def is_remote(uri: str) -> bool:
    """Return whether ``uri`` is in a bucket; ``UserError`` for ``s3:/bucket``, a typing error."""
    is_address = uri.startswith("s3://")
    if uri.startswith("s3:/") and not is_address:
        raise UserError(f"'{uri}' has one slash after s3:; write s3://bucket/folder")
    return is_address


@cache
def _descriptions(folders: str | None) -> Any:
    """Return boto's description of S3, read once: reading it for each bucket takes 0.05 s."""
    from botocore.loaders import create_loader

    return create_loader(folders)


def split(uri: str) -> tuple[str, str]:
    """Return the bucket and the key of ``s3://bucket/key``; ``UserError`` if no bucket is named."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise UserError(f"'{uri}' has no bucket name; write s3://bucket/folder")
    return bucket, key.strip("/")


def s3_patience() -> float:
    """Return the seconds to keep trying: ``POSPRE_S3_PATIENCE``, or five minutes."""
    return seconds_in("POSPRE_S3_PATIENCE", _PATIENCE)


def seconds_in(variable: str, default: float) -> float:
    """Return the seconds in an environment variable; ``UserError`` if it has no such number."""
    noted = os.environ.get(variable) or str(default)
    try:
        seconds = float(noted)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UserError(f"{variable} is {noted!r}; give a number of seconds, such as {default:g}.")
    return seconds


class Bucket:
    """The objects under one ``s3://`` address; every failure is a ``UserError`` naming it.

    ``patience`` is the number of boto's attempts: few for a check, many for data that must arrive.
    An attempt fails after ``timeout`` seconds without a byte; default: few, for a check. Once it
    ``has_answered``, the credentials were right.
    """

    def __init__(self, uri: str, *, patience: int = 5, timeout: float | None = None) -> None:
        self.uri = uri
        self.name, self.key = split(uri)
        self.endpoint = os.environ.get("S3_ENDPOINT_URL") or None
        self._options = {
            "connect_timeout": 3,
            "read_timeout": timeout or (5 if patience <= _CHECKED else 60),
            "retries": {"total_max_attempts": patience, "mode": "standard"},
        }
        self._is_refused = self.has_answered = False
        self.connect()

    def connect(self) -> None:
        """Read the credentials again: their file may be replaced during a run."""
        with needing("s3", self.uri):
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError, InvalidRegionError
            from botocore.session import Session
        check_variables()
        config = Config(**self._options)
        try:
            core = Session()
            loader = _descriptions(core.get_config_variable("data_path"))
            core.register_component("data_loader", loader)
            session = boto3.Session(botocore_session=core)
            loader.search_paths[:] = dict.fromkeys(loader.search_paths)  # each session adds one
            self.client: Any = session.client("s3", endpoint_url=self.endpoint, config=config)
        except InvalidRegionError as error:
            raise UserError(f"{self.uri}: {error}; check AWS_DEFAULT_REGION") from error
        except BotoCoreError as error:
            raise UserError(f"{self.uri}: {without_passwords(error)}") from error
        except ValueError as error:
            name = next((name for name in ENDPOINTS if os.environ.get(name)), ENDPOINTS[0])
            raise UserError(
                f"{name} is '{shown(os.environ.get(name, ''))}'; write it as http://host:port"
            ) from error

    def __enter__(self) -> "Bucket":
        if self._is_refused:
            self.connect()
            self._is_refused = False
        return self

    def __exit__(self, _: Any, error: BaseException | None, trace: Any) -> None:
        self._is_refused = is_credential_fault(error)
        known = as_user_error(error, self.uri) if error is not None else None
        if known is not None:
            raise known from error
        self.client.close()

    def path(self, name: str) -> str:
        """Return the key of an object of this folder."""
        return f"{self.key}/{name}".lstrip("/")

    def list(self, folder: str = "", *, below: bool = False) -> dict[str, int]:
        """Return the size in bytes of every object in this folder (and ``below``), by name."""
        return {name: item.size for name, item in self.look(folder, below=below).items()}

    def look(self, folder: str = "", *, below: bool = False) -> dict[str, Stored]:
        """Describe every object in this folder (and ``below``), by name.

        With ``folder``, list that folder in this one; names are relative to it. Empty objects whose
        name ends in a slash are no objects: consoles and some servers make them for folders.
        ``Garbled`` if the list cannot be parsed.
        """
        from botocore.parsers import ResponseParserError

        prefix = f"{self.path(folder).strip('/')}/".lstrip("/")
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix, **({} if below else {"Delimiter": "/"})
        )
        try:
            items = [item for page in pages for item in page.get("Contents", [])]
            return {
                item["Key"].removeprefix(prefix): _stored(item, item["Size"])
                for item in items
                if item["Size"] or not item["Key"].endswith("/")
            }
        except (KeyError, ValueError, ResponseParserError) as error:
            raise Garbled(f"{self.uri}: the list of objects is damaged ({error})") from error

    def look_at(self, name: str) -> Stored:
        """Describe one object; this needs no permission to list the bucket."""
        answer = self.client.head_object(Bucket=self.name, Key=self.path(name))
        return _stored(answer, answer["ContentLength"])

    def download(self, target: BinaryIO, name: str = "") -> None:
        """Write this object, or one of this folder, into an open file, in several parts."""
        from boto3.s3.transfer import TransferConfig

        options = TransferConfig(multipart_chunksize=_PIECE, preferred_transfer_client="classic")
        key = self.path(name) if name else self.key
        self.client.download_fileobj(self.name, key, target, Config=options)

    def fetch(self, name: str) -> bytes:
        """Return a large object of this folder."""
        self.download(target := io.BytesIO(), name)
        return target.getvalue()

    def read(self, name: str) -> bytes:
        """Return a small object of this folder; ``UserError`` if it is not small."""
        answer = self.client.get_object(Bucket=self.name, Key=self.path(name))
        size = answer["ContentLength"]
        if size > _SMALL:
            raise UserError(
                f"s3://{self.name}/{self.path(name)} has {size} bytes, but a file of this name "
                f"has at most {_SMALL}; remove it, or give another address"
            )
        return bytes(answer["Body"].read())

    def find(self, name: str) -> bytes | None:
        """Return a small object of this folder, or None if it does not exist."""
        try:
            return self.read(name)
        except self.client.exceptions.ClientError as error:
            if code_of(error) in MISSING:
                return None
            raise

    def put(self, name: str, content: bytes) -> None:
        """Write a small object into this folder."""
        self.client.put_object(Bucket=self.name, Key=self.path(name), Body=content)

    def upload(self, name: str, file: BinaryIO, progress: Callable[[int], None]) -> None:
        """Write a large object into this folder, in this thread only.

        The file is open at its start; it may be renamed or deleted meanwhile. ``progress`` is
        called with the number of bytes sent since the last call (negative: they are sent again).
        """
        from boto3.s3.transfer import TransferConfig

        options = TransferConfig(use_threads=False, preferred_transfer_client="classic")
        self.client.upload_fileobj(
            file, self.name, self.path(name), Callback=progress, Config=options
        )

    def put_if(self, name: str, content: bytes, **condition: str) -> str | None:
        """Write a small object if ``IfMatch`` or ``IfNoneMatch`` holds; return its tag, or None.

        Servers that ignore conditions write the object. The tag is empty if the server has none.
        """
        request = {"Bucket": self.name, "Key": self.path(name), "Body": content}
        refusals = (*_THERE_ALREADY, *(MISSING if "IfMatch" in condition else ()))
        try:
            answer = self.client.put_object(**request, **condition)
        except self.client.exceptions.ClientError as error:
            if code_of(error) in refusals:
                return None
            if code_of(error) not in NOT_KNOWN:
                raise
            answer = self.client.put_object(**request)
        return str(answer.get("ETag", ""))

    def delete(self, name: str) -> None:
        """Remove an object of this folder, if it exists."""
        try:
            self.client.delete_object(Bucket=self.name, Key=self.path(name))
        except self.client.exceptions.ClientError as error:
            if code_of(error) not in MISSING:
                raise

    def remove(self, names: Sequence[str]) -> None:
        """Remove many objects of this folder, each with a request of its own.

        Not all servers know S3's request for many (Google's, older ones of MinIO and Ceph).
        """
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(self.delete, names))


def _stored(answer: Any, size: int) -> Stored:
    return Stored(size, answer.get("ETag", ""), f"{answer.get('LastModified', '')}")


def patiently(work: Callable[[], None], patience: float) -> None:
    """Run ``work``; repeat it for ``patience`` seconds while the server does not answer."""
    end = time.monotonic() + patience
    failure = Unreachable("nothing was tried")
    for number in attempts(lambda: end, 1.0, 10.0):
        if number == 2:
            print(f"warning: {failure}; trying again for {patience:g} s", file=sys.stderr)
        try:
            return work()
        except Unreachable as error:
            failure = error
    raise failure


def check_writable(folder: str) -> None:
    """Write and delete a tiny object in an ``s3://`` folder.

    ``UserError`` within half a minute if the endpoint, the credentials or the bucket are wrong.
    """
    name = f".pospre-probe-{uuid.uuid4().hex}"
    with Bucket(folder, patience=_CHECKED) as bucket:
        bucket.put(name, b"pospre")
        bucket.delete(name)
