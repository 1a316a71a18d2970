"""Reading of images, masks, and labels of rendered scenes for dense evaluations.

Images are decoded as in training, and turned upright by EXIF. So are masks, if they have EXIF.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy import ndarray
from PIL import Image, ImageOps
from pycocotools import mask as coco_mask
from torch import Tensor

from pospre.data.decode import jpeg
from pospre.data.decode.bit_depth import RGB, Decoding, given_range
from pospre.data.decode.decoder import DecodeError, OpenedImage
from pospre.data.decode.formats import open_picture
from pospre.data.stores.files import odd_file, read_bytes
from pospre.data.stores.image_folder import list_images
from pospre.data.stores.subset import half_indices
from pospre.errors import UserError
from pospre.evaluation.common_settings import Half
from pospre.recipe.recipe import Recipe
from pospre.text_lists import read_text
from pospre.untrusted_json import parse_object

_START = 1 << 17  # bytes: EXIF and a colour profile usually end there

Item = TypeVar("Item")


def in_half(items: Sequence[Item], half: Half | None, address: str) -> list[Item]:
    """Return the items of one half, see ``half_indices``; all of them for None."""
    return [*items] if half is None else [items[i] for i in half_indices(len(items), half, address)]


def decoding_of(recipe: Recipe) -> Decoding:
    """Return how the images of a recipe's training are decoded, in RGB."""
    return Decoding(deep_range=given_range(recipe.data.deep_range))


@contextmanager
def _readable(path: Path, what: str = "image") -> Iterator[None]:
    """Turn errors of reading a file into ``UserError``."""
    try:
        if odd := odd_file(path):
            raise OSError(f"it is {odd}")
        yield
    except (OSError, ValueError, DecodeError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} is not a readable {what} ({error}); replace it, or leave it out."
        ) from error


def read_image(path: Path, decoding: Decoding = RGB) -> Tensor:
    """Return the pixels of an upright image, uint8 RGB (3, H, W)."""
    with _readable(path):
        pixels = OpenedImage(read_bytes(path), decoding).decode()[0]
    return torch.from_numpy(pixels).permute(2, 0, 1)


def image_sides(path: Path) -> tuple[int, int]:
    """Return height and width of an upright image; of a JPEG only the start is read."""
    with _readable(path):
        with path.open("rb") as file, suppress(jpeg.UnusualJpeg):
            return jpeg.read_header(memoryview(file.read(_START))).upright_sides[::-1]
        image = OpenedImage(read_bytes(path))
    return image.height, image.width


def files_by_stem(folder: Path, names: Iterable[str] | None = None) -> dict[str, Path]:
    """Return files of a folder by their path in it, without the ending; of None, all its images.

    ``UserError`` if two differ by their ending alone.
    """
    if names is None:
        names = list_images(folder) if folder.is_dir() else []
    found: dict[str, Path] = {}
    for name in names:
        stem = name.rpartition(".")[0]
        if stem in found:
            raise UserError(
                f"{folder} has both {found[stem].name} and {Path(name).name}; images and labels "
                "belong together by their names, so leave one of them out."
            )
        found[stem] = folder / name
    return found


def read_mask(path: Path) -> ndarray:
    """Return the values of a mask file, int64 (H, W)."""
    with _readable(path, "mask"), open_picture(path.read_bytes()) as image:
        values = np.asarray(ImageOps.exif_transpose(image))
    if values.ndim != 2:
        raise UserError(
            f"{path} has {values.shape[2]} channels; a mask is a grey or indexed PNG of class ids."
        )
    return values.astype(np.int64)


def check_apart(train: Sequence[Path], val: Sequence[Path], address: str) -> None:
    """Raise a ``UserError`` if the data set ``address`` has images of the training split."""
    if {path.resolve() for path in train} & {path.resolve() for path in val}:
        raise UserError(
            f"{address} would be measured on training images; give another split=…, "
            "train_split=… or bank=…."
        )


def check_not_smaller(path: Path, sides: Sequence[float], patch: int) -> None:
    """Raise a ``UserError`` for an image that is smaller than a patch."""
    if min(sides) < patch:
        raise UserError(
            f"{path} has {sides[0]:.0f}×{sides[1]:.0f} pixels after scaling, less than a patch "
            f"of {patch}; give a larger size=…, or leave it out."
        )


LABELS = "labels.jsonl"
SCENE_CLASSES = ("ball", "box", "cone", "cylinder", "ring", "tree")


def scene_folder(base: Path, split: str) -> Path | None:
    """Return the folder of rendered scenes for a split: its own, or the only one."""
    return next((each for each in (base / split, base) if (each / LABELS).is_file()), None)


def scene_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the label lines of rendered scenes, whose pictures exist."""
    lines = []
    for number, row in enumerate(read_text(folder / LABELS).splitlines(), start=1):
        if not row.strip():
            continue
        try:
            line = parse_object(row)
            items = line["objects"]
            known = all(item["class"] in SCENE_CLASSES and "mask" in item for item in items)
            path = folder / line["path"]
        except (ValueError, KeyError, TypeError) as error:
            known, path = False, folder / str(error)
        if not known:
            raise UserError(
                f"{folder / LABELS}, line {number}, is not a line of rendered scenes with the "
                f"classes {', '.join(SCENE_CLASSES)}; render them again: python -m "
                "data_prep.scenes."
            )
        if not path.is_file():
            raise UserError(f"{folder / LABELS}, line {number}: picture {path} does not exist.")
        lines.append(line)
    return lines


def read_labels(mask: Any, image: Path, value: Callable[[Any], int]) -> ndarray:
    """Return each pixel's value, int64 (H, W), in a mask file or a rendered scene's label line.

    ``value`` gives that of a scene's visible object; pixels without one are 0.
    """
    if isinstance(mask, Path):
        return read_mask(mask)
    sides = image_sides(image)
    values = np.zeros(sides, np.int64)
    for item in mask["objects"]:
        shown = coco_mask.decode(coco_mask.frPyObjects(item["mask"], *sides))
        values[shown.astype(bool)] = value(item)
    return values
