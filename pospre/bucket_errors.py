"""What an error of S3 means: whether it may pass, and what to check.

This is the only place that decides between waiting (``Unreachable``, exit code 69) and ending at
once (``UserError``, exit code 2).
"""

import os
import re
from typing import Any

from pospre.errors import Unreachable, UserError

ENDPOINTS = ("S3_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
MISSING = ("404", "NoSuchKey", "NotFound")
NOT_KNOWN = ("NotImplemented", "501")
_BUSY = ("SlowDown", "RequestTimeout", "Throttling", "ThrottlingException", "RequestLimitExceeded")
_NEVER_PASSING = (501, 505)  # of the statuses from 500 on: the server cannot do this at all
_CREDENTIAL_FAULTS = (
    *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken"),
    *("AuthFailure", "InvalidSecurity", "TokenRefreshRequired"),
)
_REGION_FAULTS = (
    *("AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"),
    "301",
)
_STRAY = re.compile(r"^\s|\s$|[\x00-\x1f\x7f]")


class Garbled(Unreachable):
    """A response that is damaged: its checksum is wrong, or it cannot be parsed."""


def check_variables() -> None:
    """Raise a ``UserError`` for a variable with a stray character, such as a final newline.

    Kubernetes secrets and files with CRLF add it. boto would send it, or fail in odd places. The
    value is not shown: it may be a secret.
    """
    for name, value in os.environ.items():
        if (name in ENDPOINTS or name.startswith("AWS_")) and value and _STRAY.search(value):
            raise UserError(
                f"{name} has a space, a newline or another stray character at its start or end, or "
                f"a control character inside; set {name} without it (`echo -n` writes no newline)"
            )


def shown(endpoint: str) -> str:
    """Return an endpoint for messages, without user name and password.

    Both may hold any character, even a slash or an ``@``, so everything before the last ``@`` is
    removed.
    """
    return re.sub(r"^([A-Za-z][\w+.-]*://)?.*@", r"\1", endpoint, flags=re.DOTALL)


def without_passwords(error: BaseException) -> str:
    """Return the text of an error with the endpoint as ``shown``."""
    text = str(error)
    for endpoint in filter(None, map(os.environ.get, ENDPOINTS)):
        text = text.replace(endpoint, shown(endpoint))
    return text


def _answer(error: BaseException | None) -> Any:
    """Return the server's answer, which boto wraps after uploads; empty for other errors."""
    from boto3.exceptions import S3UploadFailedError
    from botocore.exceptions import ClientError

    if isinstance(error, S3UploadFailedError):
        error = error.__context__
    return error.response if isinstance(error, ClientError) else {}


def _sending(error: BaseException) -> BaseException | None:
    """Return the error that kept boto from sending a request, such as an impossible header."""
    from botocore.exceptions import HTTPClientError

    cause: BaseException | None = None
    if isinstance(error, HTTPClientError) and type(error) is HTTPClientError:
        cause = error.kwargs.get("error")
    return cause


def code_of(error: BaseException | None) -> str:
    """Return the code of a server's answer, such as ``NoSuchKey``; empty for other errors."""
    return str(_answer(error).get("Error", {}).get("Code", ""))


def status_of(error: BaseException | None) -> int:
    """Return the HTTP status of a server's answer; 0 for other errors."""
    return int(_answer(error).get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_credential_fault(error: BaseException | None) -> bool:
    """Return whether the server refuses the key, the secret or the token."""
    return code_of(error) in _CREDENTIAL_FAULTS


def may_pass(error: BaseException) -> bool:
    """Return whether an error comes from the server or the network now, not from the request."""
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from s3transfer.exceptions import RetriesExceededError
    from urllib3.exceptions import HTTPError

    if _answer(error):
        status, code = status_of(error), code_of(error)
        if status in _NEVER_PASSING or code in NOT_KNOWN:
            return False
        return status >= 500 or status in (408, 429) or code in _BUSY
    if isinstance(error, boto.SSLError):  # else a certificate, or a port without TLS
        return any(word in str(error) for word in ("EOF", "timed out", "reset"))
    if type(error) is boto.HTTPClientError:
        cause = _sending(error)
        passing = (HTTPError, ConnectionError, TimeoutError)
        return isinstance(cause, passing) and not isinstance(cause, ValueError)
    passing = (boto.ConnectionError, boto.HTTPClientError, boto.IncompleteReadError)
    garbled = (boto.FlexibleChecksumError, ResponseParserError)
    keys = (boto.CredentialRetrievalError, boto.MetadataRetrievalError)  # a server gives them
    return isinstance(error, (*passing, *garbled, *keys, RetriesExceededError, HTTPError))


def as_user_error(error: BaseException, address: str) -> UserError | None:
    """Return the message about an error of boto or of a local file; None for other errors."""
    from boto3.exceptions import Boto3Error
    from botocore import exceptions as boto
    from botocore.parsers import ResponseParserError
    from s3transfer.exceptions import RetriesExceededError

    if isinstance(error, boto.FlexibleChecksumError | ResponseParserError):
        return Garbled(f"{address}: the response is damaged ({error})")
    # boto's timeouts are also OSErrors
    kinds = (boto.BotoCoreError, boto.ClientError, RetriesExceededError, Boto3Error)
    if isinstance(error, kinds):
        return (Unreachable if may_pass(error) else UserError)(explain(error, address))
    if isinstance(error, OSError):
        return UserError(
            f"{address}: this machine failed, not the bucket ({error}); if a disk is full, make "
            "room there, or set TMPDIR to another folder"
        )
    return None


def explain(error: BaseException, address: str) -> str:
    """Explain a boto error: what it means for ``address`` and what to check."""
    from botocore import exceptions as boto
    from s3transfer.exceptions import RetriesExceededError

    where = shown(next(filter(None, map(os.environ.get, ENDPOINTS)), "AWS's own endpoint"))
    if _answer(error):
        return _explain_answer(error, address, where)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return (
            f"{address}: no S3 credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if isinstance(error, boto.SSLError) and not may_pass(error):
        if "CERTIFICATE" not in str(error):
            return f"{address}: {where} does not speak TLS; check S3_ENDPOINT_URL (http, not https)"
        return (
            f"{address}: the certificate of {where} is not trusted; set AWS_CA_BUNDLE to the file "
            f"of the certificate that signed it ({without_passwords(error)})"
        )
    if isinstance(error, boto.ProxyConnectionError):
        return (
            f"{address}: the proxy of this machine does not answer; check HTTP_PROXY, HTTPS_PROXY"
        )
    if may_pass(error) and isinstance(error, boto.ConnectionError | boto.HTTPClientError):
        return f"{address}: the S3 endpoint {where} does not answer; check S3_ENDPOINT_URL"
    if isinstance(error, RetriesExceededError):
        cause = without_passwords(error.last_exception)
        return f"{address}: the S3 endpoint {where} closes connections ({cause})"
    if isinstance(_sending(error), OSError):
        return f"{address}: {without_passwords(error)}; check AWS_CA_BUNDLE"
    return f"{address}: {without_passwords(error)}"


def _explain_answer(error: BaseException, address: str, where: str) -> str:
    code, status = code_of(error), status_of(error)
    message = f"{where} answers {code}: {_answer(error)['Error'].get('Message', '')}"
    if code == "NoSuchBucket":
        bucket = address.removeprefix("s3://").partition("/")[0]
        return f"bucket '{bucket}' does not exist at {where}; create it, or correct {address}"
    if code in _CREDENTIAL_FAULTS:
        return (
            f"{address}: {where} refuses the credentials ({code}); "
            "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if code in _REGION_FAULTS:
        return f"{address} is in another region ({message}); check AWS_DEFAULT_REGION"
    if code == "RequestTimeTooSkewed":
        return (
            f"{address}: {where} refuses requests signed by this machine, because its clock is "
            f"wrong ({code}); set the clock"
        )
    if code in MISSING or status == 404:
        return f"{address} does not exist at {where}"
    if status == 403:
        return (
            f"{address}: access is denied, or it does not exist in a bucket that may not be "
            f"listed ({message}); check AWS_ACCESS_KEY_ID and the bucket's rules"
        )
    if code in NOT_KNOWN or status in _NEVER_PASSING:
        return f"{address}: this server cannot do what is needed ({message})"
    return f"{address}: {message}"
