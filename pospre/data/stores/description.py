"""The description (JSON) that our converter leaves beside a data set: what it holds, checksums."""

import base64
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from crc32c import crc32c
from pydantic import AfterValidator, BaseModel, Field, Strict, ValidationError

from pospre.data.stores.identity import LABELS, Identity
from pospre.errors import UserError
from pospre.untrusted_json import parse_object

SIDECAR_NAME = "pospre.json"  # in a folder of shards
VERSION = 2


def _text(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("no text")
    return value


# Names of files may be no Unicode, and such texts are none to pydantic.
_Text = Annotated[Any, AfterValidator(_text)]
_Numbers = Annotated[tuple[float, ...], Strict(False)]  # JSON has lists
_SizeAndSum = Annotated[tuple[Annotated[int, Strict()], Annotated[str, Strict()]], Strict(False)]


class Moments(BaseModel, strict=True, frozen=True):
    """Mean and standard deviation of each number or channel over the data set; empty: not noted."""

    mean: _Numbers = ()
    std: _Numbers = ()

    def fits(self, count: int) -> bool:
        """Tell whether these are of so many numbers, or not noted."""
        return {len(self.mean), len(self.std)} <= {0, count}


class Origin(BaseModel, strict=True, frozen=True):
    """What a data set was made from: the settings, and the source's fingerprint."""

    settings: dict[str, Any] = {}
    source: Any = None


class Noted(NamedTuple):
    """What a data set of images notes about its pixels.

    Attributes:
        channels: of the images stored; 3 unless noted.
        mean: of each channel over the data set, in [0, 1]; empty where it is not noted.
        std: likewise.
        deep_range: how ``--deep-range`` was set; None where nothing was converted.
    """

    channels: int = 3
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    deep_range: str | None = None


class Description(BaseModel, strict=True, frozen=True):
    """What readers use of a description.

    Attributes:
        samples: how many there are.
        classes: names by label, or None.
        made_from: settings and source of the conversion.
        channels: of the images stored.
        pixels: moments of the images, where they have other than three channels.
        features: moments of the features, where the samples are no images.
        max_pixels: of the largest image.
        crc32c: checksums of the samples, packed by ``pack_sums``.
        labels_sha256: hash of all labels.
        manifest: bytes and SHA-256 of every shard by name.
        bytes: of a ``.beton``.
        sha256: of a ``.beton``.
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
        """What it says about pixels."""
        deep_range = str(self.made_from.settings.get("deep_range", "auto"))
        return Noted(self.channels, self.pixels.mean, self.pixels.std, deep_range)

    @property
    def identity(self) -> Identity:
        """The hashes that it notes."""
        return {} if self.labels_sha256 is None else {LABELS: self.labels_sha256}


def parse_description(text: bytes, where: object, data_format: str, remedy: str) -> Description:
    """Read the text of a description that lies at ``where``.

    Raises:
        UserError: it is damaged, or of another format or version; ``remedy`` is its last sentence.
    """
    try:
        content = parse_object(text)
    except ValueError as error:
        raise UserError(f"{where} cannot be read ({error}). {remedy}") from error
    found = (content.get("format"), content.get("version"))
    if found != (f"pospre-{data_format}", VERSION):
        raise UserError(
            f"{where} says format {found[0]!r}, version {found[1]!r}; expected "
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
    raise UserError(f"{where}: '{key}' is not as the converter writes it. {remedy}")


def read_file(path: Path, remedy: str) -> bytes:
    """Return the bytes of a description.

    Raises:
        UserError: it cannot be read.
    """
    if path.exists() and not path.is_file():  # to open a FIFO would take for ever
        raise UserError(f"{path} is no regular file. {remedy}")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}). {remedy}") from error


def read_sidecar(path: Path, data_format: str, num_samples: int, remedy: str) -> Description | None:
    """Read the description of a data set and compare it with what the data themselves say.

    Returns:
        the description, None when there is none (data written by other programs).

    Raises:
        UserError: unreadable, of another format or version, or it counts other samples.
    """
    if not path.exists():
        return None
    description = parse_description(read_file(path, remedy), path, data_format, remedy)
    if description.samples != num_samples:
        raise UserError(
            f"{path} counts {description.samples} samples, but the data hold {num_samples}. "
            f"{remedy}"
        )
    return description


def checksum(data: Any, label: int) -> int:
    """Return the CRC-32C of a sample: its bytes (as stored), then its label as an int64.

    A flipped bit mostly gives an image all the same, and a label always.
    """
    return crc32c(label.to_bytes(8, "little", signed=True), crc32c(data))


def pack_sums(sums: list[int]) -> str:
    """Return the samples' checksums as the description holds them."""
    return base64.b64encode(np.array(sums, "<u4").tobytes()).decode()


def unpack_sums(description: Description, name: str, remedy: str) -> np.ndarray | None:
    """Return the samples' checksums, uint32 (N,), or None where the description has none.

    Raises:
        UserError: they are not those of as many samples.
    """
    if description.crc32c is None:
        return None
    try:
        sums = np.frombuffer(base64.b64decode(description.crc32c, validate=True), "<u4")
    except ValueError:
        sums = np.empty(0, "<u4")
    if len(sums) != description.samples:
        raise UserError(f"{name}: crc32c holds no checksum for each sample. {remedy}")
    return sums
