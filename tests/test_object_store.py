"""What the S3 client says, and what it must not say."""

import io
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from botocore.loaders import JSONFileLoader
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from pospre import object_store
from pospre.command_line import check_exists, local_path
from pospre.data.bucket.download import Download
from pospre.data.opening import open_reader
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket, check_writable, is_remote, patiently
from pospre.reporting.run import read_run
from tests.data.flaky_s3 import Fault, flaky_s3, use_bucket
from tests.refusals import refuses


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("S3_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.mark.parametrize(
    "use",
    [
        is_remote,
        open_reader,
        read_run,
        local_path,
        lambda address: check_exists("--model", address, "give a run"),
    ],
)
def test_an_address_with_one_slash_is_not_called_missing(use: Callable[[str], Any]) -> None:
    refuses(r"'s3:/bucket/run' has one slash after s3:; write s3://", lambda: use("s3:/bucket/run"))
    assert is_remote("s3://bucket/run") and not is_remote("s3:photos")
    assert local_path("v2:photos/a") == Path("v2:photos/a")
    refuses(r"^s3://bucket/a is an address, but a path", lambda: local_path("s3://bucket/a"))


@pytest.mark.parametrize("name", ["S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "endpoint",
    [
        "http://me:pass@127.0.0.1:9",
        "http://me:pa@pass@127.0.0.1:9",
        "http://me:pa/pass@127.0.0.1:9",
        "http://me:pa#pass@127.0.0.1:9",
        "me:pass@127.0.0.1:9",
        "http:/me:pass@127.0.0.1:9",
    ],
)
def test_passwords_are_not_shown(monkeypatch: pytest.MonkeyPatch, name: str, endpoint: str) -> None:
    monkeypatch.delenv("S3_ENDPOINT_URL")
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(UserError) as caught:
        check_writable("s3://bucket/photos")
    assert "pass" not in str(caught.value) and "me:" not in str(caught.value)
    assert "127.0.0.1:9" in str(caught.value)


def test_what_s3_is_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Bucket("s3://bucket/photos")
    read: list[str] = []
    load = JSONFileLoader.load_file

    def noted(self: JSONFileLoader, path: str) -> Any:
        read.append(path)
        return load(self, path)

    monkeypatch.setattr(JSONFileLoader, "load_file", noted)
    with ThreadPoolExecutor(4) as pool:
        buckets = [*pool.map(Bucket, ["s3://bucket/photos"] * 20)]
    assert len({id(bucket.client) for bucket in buckets}) == 20
    assert not [path for path in read if "s3" in Path(path).parts]
    loader = object_store._descriptions(None)
    assert len(loader.search_paths) <= 4  # one of boto3's, not one of each bucket


def test_put_if_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket("s3://bucket/photos", patience=1)
    written: list[dict[str, Any]] = []
    code = ""

    def put(**arguments: Any) -> dict[str, str]:
        if code and "IfNoneMatch" in arguments:
            raise ClientError({"Error": {"Code": code}}, "PutObject")
        written.append(arguments)
        return {"ETag": '"1"'}

    monkeypatch.setattr(bucket.client, "put_object", put)
    assert bucket.put_if("plan", b"x", IfNoneMatch="*") and written[0]["IfNoneMatch"] == "*"
    assert written[0]["Key"] == "photos/plan"
    code = "PreconditionFailed"
    assert not bucket.put_if("plan", b"y", IfNoneMatch="*") and len(written) == 1
    code = "NotImplemented"  # an older server
    assert bucket.put_if("plan", b"z", IfNoneMatch="*") and written[1]["Body"] == b"z"
    code = "AccessDenied"
    with pytest.raises(ClientError):
        bucket.put_if("plan", b"z", IfNoneMatch="*")


def test_a_small_object_that_is_large_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket("s3://bucket/run", patience=1)
    monkeypatch.setattr(bucket.client, "get_object", lambda **_: {"ContentLength": 1 << 42})
    with pytest.raises(UserError, match=rf"s3://bucket/run/metrics\.jsonl has {1 << 42} bytes"):
        bucket.find("metrics.jsonl")


def test_objects_are_removed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket("s3://bucket", patience=1)
    removed = []

    def delete(Bucket: str, Key: str) -> None:
        if Key in ("gone", "locked"):
            code = "NoSuchKey" if Key == "gone" else "Locked"
            raise ClientError({"Error": {"Code": code}}, "DeleteObject")
        removed.append(Key)

    monkeypatch.setattr(bucket.client, "delete_object", delete)
    names = [f"n{number}" for number in range(1500)]
    bucket.remove([*names, "gone"])  # Google's servers answer 404
    assert sorted(removed) == sorted(names)
    with pytest.raises(UserError, match="answers Locked"), bucket:
        bucket.remove(["locked"])


def test_an_outage_is_sat_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answers(list[Exception | None]):
        def check(self) -> None:
            error = self.pop(0)
            if error is not None:
                raise error

    answers = Answers([Unreachable("no answer"), Unreachable("no answer"), None])
    monkeypatch.setattr("pospre.object_store.time.sleep", lambda _: None)
    patiently(answers.check, patience=60)
    assert not answers and capsys.readouterr().err.count("no answer; trying again for 60 s") == 1
    answers[:] = [UserError("no such bucket")]
    with pytest.raises(UserError, match="no such bucket"):  # waiting would not help
        patiently(answers.check, patience=60)
    answers[:] = [Unreachable("no answer")]
    with pytest.raises(Unreachable):
        patiently(answers.check, patience=0.5)


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (503, "x", Unreachable),
        (429, "x", Unreachable),
        (400, "RequestTimeout", Unreachable),
        (404, "x", UserError),
    ],
)
def test_only_what_may_pass_is_called_unreachable(
    status: int, code: str, kind: type[UserError]
) -> None:
    answer: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    with pytest.raises(UserError) as caught, Bucket("s3://bucket/run"):
        raise ClientError(answer, "PutObject")
    assert type(caught.value) is kind
    with pytest.raises(Unreachable):
        check_writable("s3://bucket/run")  # no server listens there
    with pytest.raises(Unreachable, match="does not answer"), Bucket("s3://bucket/run"):
        raise ReadTimeoutError(endpoint_url="http://127.0.0.1:9")


def test_an_object_that_is_always_cut_short_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with flaky_s3() as server:
        use_bucket(monkeypatch, server.url)
        with Bucket("s3://bucket/run") as bucket:
            bucket.client.create_bucket(Bucket="bucket")
            bucket.put("weights", b"bytes")
            server.spoil_always("weights", Fault(cut_after=2))
        with pytest.raises(Unreachable, match=r"s3://bucket/run: .* closes connections"), bucket:
            bucket.fetch("weights")
        server.heal()
        with bucket:
            assert bucket.fetch("weights") == b"bytes"


def test_a_clock_that_is_off_is_not_called_a_wrong_key() -> None:
    answer: Any = {
        "Error": {"Code": "RequestTimeTooSkewed", "Message": "The difference is too large"},
        "ResponseMetadata": {"HTTPStatusCode": 403},
    }
    with pytest.raises(UserError, match="set the clock") as caught, Bucket("s3://bucket/run"):
        raise ClientError(answer, "PutObject")
    assert "AWS_ACCESS_KEY_ID" not in str(caught.value)


def test_credentials_that_are_replaced_on_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file, text = (
        tmp_path / "credentials",
        "[default]\naws_access_key_id={}\naws_secret_access_key=x",
    )
    file.write_text(text.format("old"))
    with flaky_s3() as server:
        use_bucket(monkeypatch, server.url)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        writer, reader = (Bucket("s3://bucket/run", patience=1) for _ in range(2))
        with writer:
            writer.client.create_bucket(Bucket="bucket")
            writer.put("shard", b"bytes")
        stop = threading.Event()
        Download(reader, "shard", 1 << 20).run(io.BytesIO(), patience=60, stop=stop)
        server.expired = "old"
        with pytest.raises(UserError, match="refuses the credentials"), writer:
            writer.put("shard", b"others")
        at_first = Download(Bucket("s3://bucket/run", patience=1), "shard", 1 << 20)
        with pytest.raises(UserError, match="refuses the credentials") as wrong:
            at_first.run(io.BytesIO(), patience=60, stop=stop)  # without waiting
        assert at_first.attempts == 1 and not isinstance(wrong.value, Unreachable)
        shard = Download(reader, "shard", 1 << 20)
        with pytest.raises(Unreachable, match="refuses the credentials"):
            shard.run(io.BytesIO(), patience=1, stop=stop)
        replaced = threading.Timer(1.5, lambda: file.write_text(text.format("new")))
        replaced.start()  # a little late: several tries are refused
        shard.run(found := io.BytesIO(), patience=60, stop=stop)
        assert found.getvalue() == b"bytes" and shard.attempts > 2
        with writer:
            writer.put("shard", b"others")


class _Agrees(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_DELETE = do_PUT

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Run a server that speaks TLS, with a certificate that it has signed itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    place = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    signed = builder.add_extension(place, critical=False).sign(key, hashes.SHA256())
    certificate, secret = tmp_path / "server.pem", tmp_path / "key.pem"
    kind = serialization.Encoding.PEM
    certificate.write_bytes(signed.public_bytes(kind))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret.write_bytes(key.private_bytes(kind, *plain))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, secret)
    with HTTPServer(("127.0.0.1", 0), _Agrees) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        use_bucket(monkeypatch, f"https://127.0.0.1:{server.server_port}")
        yield certificate
        server.shutdown()


def test_a_self_signed_certificate_is_named_at_once(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    for use in (check_writable, open_reader):
        with pytest.raises(UserError, match=r"is not trusted; set AWS_CA_BUNDLE") as caught:
            use("s3://bucket/photos")
        assert not isinstance(caught.value, Unreachable)  # so exit code 2, not 69
    assert time.monotonic() - start < 30  # instead of the patience of 300
    monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
    check_writable("s3://bucket/photos")
