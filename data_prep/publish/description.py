"""The description beside a converted data set: what is in it, how it was made, its checksums."""

import hashlib
import json
from pathlib import Path
from typing import Any

from pospre.data.stores.description import SIDECAR_NAME, VERSION
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
    return parse_sidecar(path.read_bytes(), path, data_format, remedy)


def parse_sidecar(
    text: str | bytes, where: object, data_format: str, remedy: str
) -> dict[str, Any]:
    """Read the text of a description that lies at ``where``.

    Raises:
        UserError: it is damaged, or describes something else; ``remedy`` says what to do.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is damaged ({error}); {remedy}.") from error
    if not isinstance(content, dict) or content.get("format") != f"pospre-{data_format}":
        raise UserError(f"{where} does not describe a pospre data set; {remedy}.")
    if content.get("version") != VERSION:
        raise UserError(f"{where} has version {content.get('version')}, not {VERSION}; {remedy}.")
    for key, is_good in _CHECKS[data_format].items():
        if not is_good(content.get(key)):
            raise UserError(
                f"{where} is damaged ('{key}' is not as this command writes it); {remedy}."
            )
    return content


def _is_origin(noted: Any) -> bool:
    return isinstance(noted, dict) and isinstance(noted.get("settings"), dict) and "source" in noted


def _is_manifest(noted: Any) -> bool:
    return isinstance(noted, dict) and all(
        isinstance(entry, list) and [type(part) for part in entry] == [int, str]
        for entry in noted.values()
    )


def _is_number(noted: Any) -> bool:
    return isinstance(noted, int)


def _are_names(noted: Any) -> bool:
    return noted is None or (
        isinstance(noted, list) and all(isinstance(name, str) for name in noted)
    )


_ALWAYS = {"made_from": _is_origin, "samples": _is_number, "classes": _are_names}
_CHECKS = {
    "mds": {**_ALWAYS, "manifest": _is_manifest},
    "ffcv": {**_ALWAYS, "bytes": _is_number, "sha256": lambda noted: isinstance(noted, str)},
}


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
