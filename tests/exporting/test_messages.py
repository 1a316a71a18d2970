"""What an export refuses, which leaves every file as it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pospre.exporting.export import export
from pospre.run.checkpoints.reading import read_checkpoint
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.exporting.test_export_formats import REGISTERS, SCALED, checkpoint, classifier  # noqa: F401
from tests.refusals import refuses
from tests.run.checkpoints.checkpoint_files import write_checkpoint
from tests.swin_runs import SUPERVISED, small_swin

Made = Callable[[Path, Path], Path]  # from a folder and an MAE's checkpoint


def whole(folder: Path, run: Path) -> Path:
    return run


def notes(folder: Path, run: Path) -> Path:
    (folder / "notes").write_text("no checkpoint")
    return folder / "notes"


def spoilt(change: Callable[[dict[str, Any]], object]) -> Made:
    """A checkpoint with other tensors."""

    def made(folder: Path, run: Path) -> Path:
        content = read_checkpoint(str(run)).content
        change(content["state"]["model"])
        write_checkpoint(content, folder / "other")
        return folder / "other"

    return made


def of(**encoder: Any) -> Made:
    return lambda folder, run: classifier(folder / "runs", **encoder)


def scheme(positions: Any) -> Made:
    small = {"positions": positions, "image_size": 32, "depth": 1}
    return lambda folder, run: save_checkpoint(tiny_recipe(folder / "runs", CLASSES, **small))


def swin(folder: Path, run: Path) -> Path:
    return save_checkpoint(small_swin(folder, "supervised", SUPERVISED, window=8))


CLASSES = {"supervised": {"num_classes": 3}}
KEY = "encoder.blocks.1.attn.qkv.weight"
OTHERS = "use the format timm, safetensors or onnx"
FILES = {"timm": "e.pth", "safetensors": "e.safetensors", "hf": "e", "onnx": "e.onnx"}
GRIDS = (
    r"needs positions that take any grid, but encoder\.positions = relative takes a grid of 2x2 "
    r"only\. Leave out --grid\.$"
)
ALIBI = (
    "^encoder.positions = alibi cannot be exported for timm.*none, sincos, learned.*"
    "--format safetensors or onnx"
)
GRID = "give rows and columns of patches, such as 14x14"
ROWS: list[tuple[str, Made, str, str, dict[str, Any]]] = [
    # words; what is exported, the format and where to
    ("must end in .pth or .safetensors", whole, "timm", "encoder.bin", {}),
    ("must end in .safetensors", whole, "safetensors", "encoder.pth", {}),
    ("--num-classes is -1", whole, "timm", "encoder.pth", {"num_classes": -1}),
    ("no zero classifier", whole, "safetensors", "e.safetensors", {"num_classes": 5}),
    ("does not exist", whole, "timm", "none/encoder.pth", {}),
    *((GRID, whole, "timm", "e.pth", {"grid": grid}) for grid in ("6", "0x4", "axb", "4x4x4")),
    *((f"^--grid 3x5 {GRIDS}", scheme("relative"), format, FILES[format], {"grid": "3x5"})
      for format in ("timm", "onnx")),
    *((ALIBI, scheme("alibi"), format, FILES[format], {}) for format in ("timm", "hf")),
    (r"positions\.rotary\.normalize cannot be exported(?!.*exact periods)",
     scheme({"rotary": {"normalize": "max"}}), "timm", "e.pth", {}),
    (r"positions\.rotary\.coordinates cannot be exported",  # mixed ones count cells
     scheme({"rotary": {"directions": 4}}), "timm", "e.pth", {}),
    (r"positions\.rotary\.bf16_periods cannot be exported.*exact periods",
     scheme({"rotary": {"bf16_periods": True}}), "timm", "e.pth", {}),
    ("holds no checkpoint", notes, "timm", "encoder.pth", {}),
    (r"URI = .*no\.pth does not exist", lambda folder, run: folder / "no.pth", "timm", "e.pth", {}),
    (f"of another model.*{KEY}", spoilt(lambda tensors: tensors.pop(KEY)), "timm", "e.pth", {}),
    ("'encoder.norm.bias' holds values that are not finite",
     spoilt(lambda tensors: tensors["encoder.norm.bias"].fill_(float("nan"))), "timm", "e.pth", {}),
    (f"encoder.positions = relative.*{OTHERS}", of(positions="relative"), "hf", "hf", {}),
    (f"encoder.positions = shared_relative.*{OTHERS}", of(positions="shared_relative"), "hf", "hf",
     {}),
    (f"encoder.final_norm = false.*{OTHERS}", of(final_norm=False), "hf", "hf", {}),
    (f"without a class token.*{OTHERS}", of(class_token=False, **SCALED), "hf", "hf", {}),
    (f"not square.*{OTHERS}", of(image_size=[48, 80], **REGISTERS), "hf", "hf", {}),
    (r"has this encoder \(swin_tiny.*or onnx", swin, "hf", "hf", {}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "make", "format", "name", "options"), ROWS)
def test_what_cannot_be_exported_is_said_and_nothing_written(
    words: str,
    make: Made,
    format: str,
    name: str,
    options: dict[str, Any],
    checkpoint: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    source, out = str(make(tmp_path, checkpoint)), tmp_path / name
    refuses(words, lambda: export(source, out, format=format, **options), tmp_path)
