"""What an export may be asked for, known before anything slow is loaded."""

import re
from pathlib import Path

from pospre.errors import UserError


def check_target(out: Path, format: str, num_classes: int | None, overwrite: bool) -> None:
    """Refuse, before any work, what cannot be written."""
    endings = (".safetensors",) if format == "safetensors" else (".pth", ".safetensors")
    if out.suffix not in endings:
        raise UserError(f"OUT = {out} must end in {' or '.join(endings)} for --format {format}.")
    if num_classes is not None and format != "timm":
        raise UserError(f"--num-classes is for --format timm; {format} has no classifier.")
    if num_classes is not None and num_classes < 0:
        raise UserError(f"--num-classes is {num_classes}; give 0 (no classifier) or more.")
    if out.is_dir():
        raise UserError(f"OUT = {out} is a folder; name a file in it.")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; --overwrite replaces it.")
    if not out.parent.is_dir():
        raise UserError(f"the folder {out.parent} of OUT does not exist; make it first.")


def parse_grid(text: str) -> tuple[int, int]:
    """Return (rows, columns) of ``14x14``."""
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise UserError(f"--grid is '{text}'; give rows and columns of patches, such as 14x14.")
    return int(match[1]), int(match[2])
