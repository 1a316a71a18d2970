"""Checks of an export's arguments, before anything slow is loaded."""

import re
from pathlib import Path

from pospre.errors import UserError

CARD = "README.md"
_HF_FILES = {"config.json", "model.safetensors", "preprocessor_config.json", CARD}
_ENDINGS = {"timm": (".pth", ".safetensors"), "safetensors": (".safetensors",), "onnx": (".onnx",)}
FORMATS = ("timm", "safetensors", "hf", "onnx")


def card_of(out: Path, format: str) -> Path:
    """Return the path of an export's card: in its folder, or beside the file."""
    return out / CARD if format == "hf" else out.with_name(f"{out.name}.md")


def check_target(out: Path, format: str, num_classes: int | None, overwrite: bool) -> None:
    """Raise ``UserError`` before any work if the target cannot be written."""
    if num_classes is not None and format != "timm":
        raise UserError(f"--num-classes is for --format timm; {format} has no zero classifier.")
    if num_classes is not None and num_classes < 0:
        raise UserError(f"--num-classes is {num_classes}; give 0 (no classifier) or more.")
    if format == "hf":
        _check_folder(out)
    else:
        _check_file(out, _ENDINGS[format], format)
    for path in (out, card_of(out, format)):
        if path.exists() and not overwrite:
            raise UserError(f"{path} exists; --overwrite replaces it.")
    if not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} of OUT does not exist; make it first.")


def _check_file(out: Path, endings: tuple[str, ...], format: str) -> None:
    if out.suffix not in endings:
        raise UserError(f"OUT = {out} must end in {' or '.join(endings)} for --format {format}.")
    if out.is_dir():
        raise UserError(f"OUT = {out} is a folder; name a file in it.")


def _check_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT = {out} is a file; --format hf writes a folder.")
    if not out.is_dir():
        return
    foreign = sorted(path.name for path in out.iterdir() if path.name not in _HF_FILES)
    if foreign:
        raise UserError(
            f"OUT = {out} is a folder with files of another kind, such as {foreign[0]}; name a "
            "new folder."
        )


def parse_grid(text: str) -> tuple[int, int]:
    """Return (rows, columns) of ``14x14``."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise UserError(f"--grid is '{text}'; give rows and columns of patches, such as 14x14.")
    return int(match[1]), int(match[2])
