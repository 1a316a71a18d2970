"""The description (JSON) that our converter leaves beside a data set, as far as readers need it."""

import base64
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from crc32c import crc32c

from pospre.data.stores.identity import LABELS, Identity
from pospre.errors import UserError
from pospre.untrusted_json import parse_json

SIDECAR_NAME = "pospre.json"  # in a folder of shards
VERSION = 2
LABELS_KEY = "labels_sha256"


class Noted(NamedTuple):
    """What a data set of images notes about its pixels.

    Attributes:
        channels: of the images stored; 3 unless noted.
        mean: of each channel over the data set, in [0, 1]; empty where nobody noted it.
        std: likewise.
        deep_range: how ``--deep-range`` was set; None where nobody converted.
    """

    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    deep_range: str | None = None


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        UserError: it cannot be read or is no JSON object.
    """
    if path.exists() and not path.is_file():  # to open a FIFO would take for ever
        raise UserError(f"{path} is no regular file. {remedy}")
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}). {remedy}") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object. {remedy}")
    return content


def read_sidecar(path: Path, expected_format: str, num_samples: int, remedy: str) -> dict[str, Any]:
    """Read the description of a data set and compare it with what the data themselves say.

    Returns:
        the description, empty when there is none (data written by other programs).

    Raises:
        UserError: unreadable, of another format or version, or it counts other samples.
    """
    if not path.exists():
        return {}
    content = read_json(path, remedy)
    found = (content.get("format"), content.get("version"))
    if found != (expected_format, VERSION):
        raise UserError(
            f"{path} says format {found[0]!r}, version {found[1]!r}; expected "
            f"{expected_format!r}, version {VERSION}. {remedy}"
        )
    if content.get("samples") != num_samples:
        raise UserError(
            f"{path} counts {content.get('samples')!r} samples, but the data hold {num_samples}. "
            f"{remedy}"
        )
    classes = content.get("classes")
    is_list = isinstance(classes, list) and all(isinstance(name, str) for name in classes)
    if classes is not None and not is_list:
        raise UserError(f"{path}: classes is no list of names. {remedy}")
    return content


def checksum(data: Any, label: int) -> int:
    """Return the CRC-32C of a sample: its bytes (as stored), then its label as an int64.

    A flipped bit mostly gives an image all the same, and a label always.
    """
    return crc32c(label.to_bytes(8, "little", signed=True), crc32c(data))


def pack_sums(sums: list[int]) -> str:
    """Return the samples' checksums as the description holds them."""
    return base64.b64encode(np.array(sums, "<u4").tobytes()).decode()


def unpack_sums(sidecar: dict[str, Any], num_samples: int, name: str, remedy: str) -> Any:
    """Return the samples' checksums, uint32 (N,), or None where the description has none.

    Raises:
        UserError: they are not those of ``num_samples`` samples.
    """
    packed = sidecar.get("crc32c")
    if packed is None:
        return None
    try:
        sums = np.frombuffer(base64.b64decode(packed, validate=True), "<u4")
    except (TypeError, ValueError):
        sums = np.empty(0, "<u4")
    if len(sums) != num_samples:
        raise UserError(f"{name}: crc32c holds no checksum for each sample. {remedy}")
    return sums


def unpack_identity(sidecar: dict[str, Any], name: str, remedy: str) -> Identity:
    """Return the hashes that a description notes.

    Raises:
        UserError: they are no hashes.
    """
    noted = sidecar.get(LABELS_KEY)
    if noted is None:
        return {}
    if not isinstance(noted, str):
        raise UserError(f"{name}: {LABELS_KEY} is no SHA-256. {remedy}")
    return {LABELS: noted}


def unpack_noted(sidecar: dict[str, Any], name: str, remedy: str) -> Noted | None:
    """Return what a description notes about pixels; None where there is no description.

    Raises:
        UserError: it is not as the converter writes it.
    """
    if not sidecar:
        return None
    channels, pixels = sidecar.get("channels", 3), sidecar.get("pixels", {})
    if not isinstance(channels, int) or channels < 1:
        raise UserError(f"{name}: channels is no number of channels. {remedy}")
    mean, std = unpack_moments(pixels, channels, f"{name}: pixels", remedy)
    try:
        settings = dict(sidecar.get("made_from", {}).get("settings", {}))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(f"{name}: made_from holds no settings. {remedy}") from error
    return Noted(channels, mean, std, str(settings.get("deep_range", "auto")))


def unpack_moments(
    noted: Any, count: int, name: str, remedy: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return ``mean`` and ``std`` of a description, of ``count`` numbers each or none.

    Raises:
        UserError: they are not such lists.
    """
    parts: list[tuple[float, ...]] = []
    for key in ("mean", "std"):
        part: Any = noted.get(key, []) if isinstance(noted, dict) else None
        is_list = isinstance(part, list) and len(part) in (0, count)
        if not is_list or not all(isinstance(value, float) for value in part):
            raise UserError(f"{name}.{key} is no list of {count} numbers. {remedy}")
        parts.append(tuple(part))
    return parts[0], parts[1]
