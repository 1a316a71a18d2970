"""The description beside a converted data set: what is in it, how it was made, its checksums."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pospre.data.mds_reader import SIDECAR_NAME
from pospre.data.sidecar import VERSION
from pospre.errors import UserError

BETON_NAME = "data.beton"  # while it is being written
_BLOCK_BYTES = 1 << 22


def sidecar_path(destination: Path, data_format: str) -> Path:
    """Return where the description of a data set lies: in the MDS folder, beside the .beton."""
    if data_format == "mds":
        return destination / SIDECAR_NAME
    return destination.with_name(destination.name + ".json")


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_sidecar(destination: Path) -> dict[str, Any]:
    """Read the description of an existing data set of either format.

    Raises:
        UserError: there is none, or it is damaged.
    """
    data_format = "mds" if destination.is_dir() else "ffcv"
    path = sidecar_path(destination, data_format)
    remedy = "convert the images again with --overwrite"
    if not path.exists():
        raise UserError(f"{path} is missing, so {destination} cannot be checked; {remedy}.")
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}.") from error
    if not isinstance(content, dict) or content.get("format") != f"pospre-{data_format}":
        raise UserError(f"{path} does not describe a pospre data set; {remedy}.")
    if content.get("version") != VERSION:
        raise UserError(f"{path} has version {content.get('version')}, not {VERSION}; {remedy}.")
    return content


def data_files(destination: Path, sidecar: dict[str, Any]) -> list[tuple[Path, int, str]]:
    """Return path, expected size and expected SHA-256 of every data file."""
    if "manifest" in sidecar:
        manifest = sorted(sidecar["manifest"].items())
        return [(destination / name, size, digest) for name, (size, digest) in manifest]
    return [(destination, sidecar["bytes"], sidecar["sha256"])]


def check_sizes(destination: Path, sidecar: dict[str, Any]) -> None:
    """Compare the size of every data file with the description.

    Raises:
        UserError: a file is missing or of another size.
    """
    for path, size, _ in data_files(destination, sidecar):
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            state = "is missing" if found is None else f"has {found} bytes instead of {size}"
            raise UserError(
                f"{path} {state}; copy it again or convert the images again with --overwrite."
            )


def as_text(content: dict[str, Any]) -> str:
    """Return a description as readable JSON, the same bytes for the same content."""
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=True) + "\n"
