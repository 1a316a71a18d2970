"""The description (JSON) of a data set that our converter writes, and identifying hashes.

No format can give every hash without reading all images. Two data sets are considered different if
a hash that both have differs. A folder and its shards are compared by classes and labels, shards
and a ``.beton`` also by the checksums of their images.
"""

import base64
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from crc32c import crc32c
from pydantic import BaseModel, Field, InstanceOf, Strict, ValidationError

from pospre.errors import UserError
from pospre.untrusted_json import parse_object

SIDECAR_NAME = "pospre.json"  # in a folder of shards
VERSION = 2
Identity = dict[str, str]
LABELS = "labels"
CLASS_NAMES = "names of the classes"
CHOSEN = "chosen samples"


# file names may not be valid Unicode, which pydantic does not accept as text
_Text = InstanceOf[str]
_Numbers = Annotated[tuple[float, ...], Strict(False)]  # JSON has lists
_SizeAndSum = Annotated[tuple[Annotated[int, Strict()], Annotated[str, Strict()]], Strict(False)]


class Moments(BaseModel, strict=True, frozen=True):
    """Mean and standard deviation per number or channel of the data set; empty: not recorded."""

    mean: _Numbers = ()
    std: _Numbers = ()

    def fits(self, count: int) -> bool:
        """Return whether these have this length, or are not recorded."""
        return {len(self.mean), len(self.std)} <= {0, count}


class Origin(BaseModel, strict=True, frozen=True):
    """Origin of a data set: the conversion's settings, and the source's fingerprint."""

    settings: dict[str, Any] = {}
    source: Any = None


class Noted(NamedTuple):
    """Recorded facts about a data set's pixels.

    Attributes:
        channels: channels of the stored images; 3 unless recorded.
        mean: mean of each channel over the data set, in [0, 1]; empty if not recorded.
        deep_range: setting of ``--deep-range``; None if nothing was converted.
    """

    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    deep_range: str | None = None


class TrainedOn(NamedTuple):
    """The data set that a model was trained on, as far as it is known.

    Attributes:
        classes: names by label; None: unknown, or without names.
        identity: hashes; None: unknown.
    """

    classes: Sequence[str] | None = None
    identity: Identity | None = None


class Description(BaseModel, strict=True, frozen=True):
    """The parts of a description that readers use.

    Attributes:
        classes: names by label, or None.
        pixels: moments of images with other than three channels.
        features: moments of features, if the samples are not images.
        crc32c: checksums of the samples, packed by ``pack_sums``.
        manifest: bytes and SHA-256 of every shard by name.
        bytes: size of a ``.beton`` in bytes.
        sha256: SHA-256 of a ``.beton``.
    """

    format: str
    version: int
    samples: int
    classes: list[_Text] | None = None
    made_from: Origin = Origin()
    channels: Annotated[int, Field(ge=1)] = 3
    pixels: Moments = Moments()
    features: Moments = Moments()
    max_pixels: Annotated[int, Field(ge=1)] | None = None
    crc32c: str | None = None
    labels_sha256: str | None = None
    manifest: dict[str, _SizeAndSum] | None = None
    bytes: int | None = None
    sha256: str | None = None

    @property
    def noted(self) -> Noted:
        """Recorded facts about pixels."""
        deep_range = str(self.made_from.settings.get("deep_range", "auto"))
        return Noted(self.channels, self.pixels.mean, self.pixels.std, deep_range)

    @property
    def identity(self) -> Identity:
        """The recorded hashes."""
        return {} if self.labels_sha256 is None else {LABELS: self.labels_sha256}


def parse_description(text: bytes, where: object, data_format: str, remedy: str) -> Description:
    """Parse a description; raise ``UserError`` if it is damaged or of another format or version."""
    try:
        content = parse_object(text)
    except ValueError as error:
        raise UserError(f"{where} cannot be read ({error}). {remedy}") from error
    actual = (content.get("format"), content.get("version"))
    if actual != (f"pospre-{data_format}", VERSION):
        raise UserError(
            f"{where} has format {actual[0]!r}, version {actual[1]!r}; expected "
            f"'pospre-{data_format}', version {VERSION}. {remedy}"
        )
    try:
        description = Description.model_validate(content)
    except ValidationError as error:
        key = ".".join(map(str, error.errors()[0]["loc"]))
    else:
        if description.pixels.fits(description.channels):
            return description
        key = "pixels"
    raise UserError(f"{where}: '{key}' is not in the converter's format. {remedy}")


def read_file(path: Path, remedy: str) -> bytes:
    """Return the bytes of a description; raise ``UserError`` if it cannot be read."""
    if path.exists() and not path.is_file():  # opening a FIFO would block
        raise UserError(f"{path} is not a regular file. {remedy}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}). {remedy}") from error


def read_sidecar(path: Path, data_format: str, num_samples: int, remedy: str) -> Description | None:
    """Read a data set's description; None if there is none (data written by other programs).

    Raises:
        UserError: it is unreadable, of another format or version, or has another number of samples.
    """
    if not path.exists():
        return None
    description = parse_description(read_file(path, remedy), path, data_format, remedy)
    if description.samples != num_samples:
        raise UserError(
            f"{path} has {description.samples} samples, but the data have {num_samples}. {remedy}"
        )
    return description


def checksum(data: Any, label: int) -> int:
    """Return the CRC-32C of a sample: its stored bytes, then its label as an int64.

    A flipped bit usually still gives a valid image, and always a valid label.
    """
    return crc32c(label.to_bytes(8, "little", signed=True), crc32c(data))


def pack_sums(sums: list[int]) -> str:
    """Return the samples' checksums in the description's format."""
    return base64.b64encode(np.array(sums, "<u4").tobytes()).decode()


def unpack_sums(description: Description, name: str, remedy: str) -> np.ndarray | None:
    """Return the samples' checksums, uint32 (N,), if any; ``UserError`` if some are missing."""
    if description.crc32c is None:
        return None
    try:
        sums = np.frombuffer(base64.b64decode(description.crc32c, validate=True), "<u4")
    except ValueError:
        sums = np.empty(0, "<u4")
    if len(sums) != description.samples:
        raise UserError(f"{name}: crc32c does not have a checksum for each sample. {remedy}")
    return sums


def hash_of(parts: Iterable[bytes]) -> str:
    """Return the SHA-256 of concatenated bytes, as hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(b"%d:" % len(part) + part)
    return digest.hexdigest()


def hash_of_labels(labels: Sequence[int] | np.ndarray) -> str:
    """Return the hash of all labels in order; it is recorded when a data set is converted."""
    return hash_of([np.asarray(labels, "<i8").tobytes()])


def difference(
    one: Mapping[str, str], other: Mapping[str, str], first: str = "before", second: str = "now"
) -> str:
    """Describe how two data sets differ, with both hashes; empty: no known difference.

    ``first`` and ``second`` say when or where they were seen.
    """
    for what, value in other.items():
        if one.get(what, value) != value:
            return f"the {what} differ (SHA-256 {one[what][:12]} {first}, {value[:12]} {second})"
    return ""


def same_samples(one: Identity, other: Identity) -> bool:
    """Return whether two data sets are known to hold the same samples."""
    telling = other.keys() - {LABELS, CLASS_NAMES, CHOSEN}
    return any(one.get(what) == other[what] for what in telling)


def first_other(names: Sequence[str], others: Sequence[str]) -> str:
    """Return the first difference between two lists of class names, in words."""
    different = sorted({*names} ^ {*others})
    return f"'{different[0]}'" if different else "their order"
