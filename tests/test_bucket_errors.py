"""One place decides which errors of a bucket may pass, and says what to check."""

from typing import Any

import pytest
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from urllib3.exceptions import IncompleteRead

from pospre.bucket_errors import as_user_error, may_pass
from pospre.errors import Unreachable, UserError
from pospre.object_store import Bucket

URL = "https://s3.example:9000"
FOLDER = "s3://bucket/run"


def answer(status: int, code: str = "x") -> boto.ClientError:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return boto.ClientError(response, "PutObject")


def tls(text: str) -> boto.SSLError:
    return boto.SSLError(endpoint_url=URL, error=text)


@pytest.mark.parametrize(
    ("error", "passes", "says"),
    [
        (answer(429), True, "answers x"),
        (answer(500), True, "answers x"),
        (answer(503, "SlowDown"), True, "SlowDown"),
        (answer(400, "RequestTimeout"), True, "RequestTimeout"),
        (boto.ConnectTimeoutError(endpoint_url=URL), True, "check S3_ENDPOINT_URL"),
        (boto.ReadTimeoutError(endpoint_url=URL), True, "check S3_ENDPOINT_URL"),
        (boto.EndpointConnectionError(endpoint_url=URL), True, "check S3_ENDPOINT_URL"),
        (boto.ProxyConnectionError(proxy_url="http://p"), True, "check HTTP_PROXY, HTTPS_PROXY"),
        (boto.CredentialRetrievalError(provider="x", error_msg="y"), True, "x"),
        (tls("EOF occurred in violation of protocol"), True, "does not answer"),
        (ResponseParserError("<html>"), True, "is damaged"),
        (answer(501), False, "cannot do what is needed"),
        (answer(500, "NotImplemented"), False, "cannot do what is needed"),
        (answer(403, "InvalidAccessKeyId"), False, "check AWS_ACCESS_KEY_ID"),
        (answer(403, "SignatureDoesNotMatch"), False, "AWS_SECRET_ACCESS_KEY"),
        (answer(400, "AuthorizationHeaderMalformed"), False, "check AWS_DEFAULT_REGION"),
        (answer(404, "NoSuchBucket"), False, "bucket 'bucket' does not exist"),
        (tls("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed"), False, "set AWS_CA_BUNDLE"),
        (tls("[SSL: WRONG_VERSION_NUMBER]"), False, "does not speak TLS"),
        (boto.HTTPClientError(error=ValueError("Invalid header value")), False, "header value"),
        (boto.HTTPClientError(error=FileNotFoundError("no.pem")), False, "check AWS_CA_BUNDLE"),
        (OSError(28, "No space left on device"), False, "not the bucket"),
    ],
    ids=repr,
)
def test_what_may_pass_is_waited_for_and_nothing_else(
    error: Exception, passes: bool, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S3_ENDPOINT_URL", URL)
    told = as_user_error(error, FOLDER)
    assert may_pass(error) == passes
    assert isinstance(told, Unreachable if passes else UserError)
    assert isinstance(told, Unreachable) == passes and says in str(told)
    assert FOLDER in str(told) or "'bucket'" in str(told)


def test_a_body_that_is_cut_may_pass_and_a_fault_of_ours_is_none_of_a_bucket() -> None:
    assert may_pass(IncompleteRead(1, 2))
    assert as_user_error(KeyError("x"), FOLDER) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ACCESS_KEY_ID", "AKIAKEY\n"),
        ("AWS_SECRET_ACCESS_KEY", " secret"),
        ("AWS_SESSION_TOKEN", "token\r"),
        ("AWS_DEFAULT_REGION", "us-east-1\r"),
        ("S3_ENDPOINT_URL", "http://127.0.0.1:9\n"),
        ("AWS_DEFAULT_REGION", "us_east/1"),
    ],
)
def test_a_stray_character_in_a_variable_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=name) as caught:
        Bucket(FOLDER)
    assert not isinstance(caught.value, Unreachable) and "secret" not in str(caught.value)
