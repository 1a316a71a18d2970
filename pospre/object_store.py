"""S3 as this package needs it: list, read, fetch, put, delete, and a quick check before training.

The endpoint comes from ``S3_ENDPOINT_URL`` or boto's ``AWS_ENDPOINT_URL``; key, secret and region
from boto's own variables and files. Composer uploads checkpoints under the same settings.
"""

import os
import re
import uuid
from pathlib import Path
from typing import Any

import boto3
from boto3.exceptions import Boto3Error
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    EndpointConnectionError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)

from pospre.errors import UserError

_MISSING = ("404", "NoSuchKey", "NotFound")
CREDENTIAL_FAULTS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken")


def is_remote(uri: str) -> bool:
    """Tell whether ``uri`` is in a bucket."""
    return uri.startswith("s3://")


def split(uri: str) -> tuple[str, str]:
    """Return the bucket and the key of an ``s3://bucket/key`` address.

    Raises:
        UserError: no bucket is named.
    """
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    if not bucket:
        raise UserError(f"'{uri}' names no bucket; write s3://bucket/folder")
    return bucket, key.strip("/")


class Bucket:
    """The objects under one ``s3://`` address; every failure is a ``UserError`` naming it.

    Args:
        uri: the address.
        patience: how often boto tries; few for a check, many for data that must arrive.
        timeout: seconds without a byte after which a try has failed; by default few for a check.
    """

    def __init__(self, uri: str, *, patience: int = 5, timeout: float | None = None) -> None:
        self.uri = uri
        self.name, self.key = split(uri)
        self.endpoint = os.environ.get("S3_ENDPOINT_URL") or None
        config = Config(
            connect_timeout=3,
            read_timeout=timeout or (5 if patience == 1 else 60),
            retries={"total_max_attempts": patience, "mode": "standard"},
        )
        try:
            session = boto3.Session()
            self.client: Any = session.client("s3", endpoint_url=self.endpoint, config=config)
        except ValueError as error:
            raise UserError(
                f"S3_ENDPOINT_URL is '{self.endpoint}'; write it as http://host:port"
            ) from error
        except BotoCoreError as error:
            raise UserError(f"{uri}: {error}") from error

    def __enter__(self) -> "Bucket":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Boto3Error | OSError):
            raise UserError(f"{self.uri}: {error}") from error
        if isinstance(error, BotoCoreError | ClientError):
            raise UserError(self.explain(error)) from error
        self.client.close()

    def list(self) -> dict[str, int]:
        """Return the size in bytes of every object in this folder (not below), by name."""
        prefix = f"{self.key}/" if self.key else ""
        pages = self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.name, Prefix=prefix, Delimiter="/"
        )
        found = [item for page in pages for item in page.get("Contents", [])]
        return {item["Key"].removeprefix(prefix): item["Size"] for item in found}

    def fetch(self, target: Path) -> None:
        """Download this object and compare the size with the bucket's."""
        size = self.client.head_object(Bucket=self.name, Key=self.key)["ContentLength"]
        self.client.download_file(self.name, self.key, str(target))
        if target.stat().st_size != size:
            raise UserError(f"{self.uri}: got {target.stat().st_size} of {size} bytes; try again")

    def put(self, name: str, content: bytes) -> None:
        """Write a small object into this folder."""
        self.client.put_object(Bucket=self.name, Key=f"{self.key}/{name}".lstrip("/"), Body=content)

    def delete(self, name: str) -> None:
        """Remove an object of this folder."""
        self.client.delete_object(Bucket=self.name, Key=f"{self.key}/{name}".lstrip("/"))

    def explain(self, error: BotoCoreError | ClientError) -> str:
        """Return what an error of boto's means, naming the address and what to look at."""
        where = self.endpoint or os.environ.get("AWS_ENDPOINT_URL") or "AWS's own endpoint"
        where = re.sub(r"//[^/@]*@", "//", where)  # a name and a password
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return (
                f"{self.uri}: no S3 credentials found; "
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if isinstance(error, EndpointConnectionError | HTTPClientError):
            return f"{self.uri}: the S3 endpoint {where} does not answer; check S3_ENDPOINT_URL"
        if not isinstance(error, ClientError):
            return f"{self.uri}: {error}"
        code = error.response["Error"]["Code"]
        if code == "NoSuchBucket":
            return f"bucket '{self.name}' does not exist at {where}; make it or mend {self.uri}"
        if code in CREDENTIAL_FAULTS:
            return (
                f"{self.uri}: {where} refuses the credentials ({code}); "
                "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if code in _MISSING:
            return f"{self.uri} does not exist at {where}"
        return f"{self.uri}: {where} answers {code}: {error.response['Error'].get('Message', '')}"


def check_writable(folder: str) -> None:
    """Put a tiny object into an ``s3://`` folder and delete it again.

    Raises:
        UserError: within seconds, when the endpoint, the credentials or the bucket are wrong.
    """
    name = f".pospre-probe-{uuid.uuid4().hex}"
    with Bucket(folder, patience=1) as bucket:
        bucket.put(name, b"pospre")
        bucket.delete(name)
