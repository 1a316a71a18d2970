"""Render a small labelled data set: coloured objects on textured ground under a graded sky."""

import argparse
import io
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy import ndarray
from PIL import Image
from tqdm import tqdm

from data_prep.distribute.ordered_maps import ordered_map
from data_prep.publish.atomic import replace_folder, writing
from pospre.command_line import LocalPath, command_parser
from pospre.data.threads import available_cores
from pospre.errors import UserError, run_command

LABELS_NAME = "labels.jsonl"
SETTINGS_NAME = "scenes.json"
_JPEG_QUALITY = 92

_EPILOG = """\
examples:
  python -m data_prep.scenes data/scenes --num-images 2000 --size 128
  python -m data_prep.scenes data/scenes_val --num-images 400 --split val
  python -m data_prep.scenes data/tracks --num-images 400 --frames 4

DST gets one sub-folder per class (that of the largest object) with JPEGs, and labels.jsonl with a
line per picture: class, counts, and for every visible object its id, class, colour, distance in
metres, box (x0, y0, x1, y1 in pixels), area and mask (run lengths as in COCO: column by column,
zeros first). With --frames N every scene gives N pictures in which the objects move; "scene",
"frame" and the objects' ids link them.

The data set is for tests and first steps; results on it say nothing about photographs.
"""


@dataclass(frozen=True)
class Settings:
    """Everything that determines the bytes of the data set."""

    num_images: int
    size: int
    seed: int
    split: str
    frames: int


def render_scenes(
    destination: Path, settings: Settings, *, num_workers: int, overwrite: bool = False
) -> bool:
    """Render a data set; return False if the destination already has the same one.

    ``UserError`` if it has something else, or cannot be written.
    """
    if _is_complete(destination, settings, overwrite):
        print(f"{destination} already contains these scenes; nothing to do.")
        return False
    start = time.monotonic()
    num_scenes = -(-settings.num_images // settings.frames)
    pictures = ordered_map(
        partial(_render_scene, settings=settings), range(num_scenes), num_workers
    )
    with closing(pictures), writing(destination):
        destination.parent.mkdir(parents=True, exist_ok=True)
        prefix = f"{destination.name}.partial-"
        with TemporaryDirectory(prefix=prefix, dir=destination.parent) as parent:
            folder = Path(parent, "new")  # with the usual permissions
            counts = _write(itertools.chain.from_iterable(pictures), folder, settings)
            replace_folder(folder, destination)
    seconds = time.monotonic() - start
    print(f"wrote {destination}: {settings.num_images} pictures of {settings.size} pixels")
    print("  " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    print(f"  {seconds:.1f} s ({settings.num_images / seconds:.0f} images/s)")
    return True


def _write(
    pictures: Iterator[tuple[bytes, dict[str, Any]]], folder: Path, settings: Settings
) -> Counter[str]:
    """Write pictures and labels into a new folder; return the number of pictures per class."""
    from data_prep.rendering import CLASSES

    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    counts: Counter[str] = Counter()
    bar = tqdm(pictures, total=settings.num_images, unit="img", desc="scenes", disable=None)
    with (folder / LABELS_NAME).open("w") as labels:
        for jpeg, label in bar:
            (folder / label["path"]).write_bytes(jpeg)
            labels.write(json.dumps(label, separators=(",", ":")) + "\n")
            counts[label["class"]] += 1
    (folder / SETTINGS_NAME).write_text(json.dumps(asdict(settings), indent=1) + "\n")
    return counts


def run_lengths(mask: ndarray) -> dict[str, Any]:
    """Encode a 0/1 mask (H, W) as COCO's uncompressed run lengths: by columns, zeros first."""
    flat = mask.T.reshape(-1).astype(np.int8)
    changes = np.flatnonzero(np.diff(flat, prepend=np.int8(0)))
    counts = np.diff(np.concatenate([[0], changes, [flat.size]]))
    return {"size": list(mask.shape), "counts": [int(count) for count in counts]}


def _is_complete(destination: Path, settings: Settings, overwrite: bool) -> bool:
    """Return whether these scenes exist; False if they may be written. Refuse something else."""
    if not destination.exists() or (destination.is_dir() and not any(destination.iterdir())):
        return False
    path = destination / SETTINGS_NAME
    if not path.is_file():
        raise UserError(f"{destination} exists and has no scenes; choose another DST.")
    if overwrite:
        return False
    if path.read_text() == json.dumps(asdict(settings), indent=1) + "\n":
        return True
    raise UserError(
        f"{destination} has scenes of other settings (see {path}); choose another DST, or replace "
        "them with --overwrite."
    )


def _render_scene(number: int, settings: Settings) -> list[tuple[bytes, dict[str, Any]]]:
    """Return JPEG and label line of a scene's frames; the last scene may have fewer."""
    from data_prep.rendering import draw_scene, render  # here: --help does not wait for it

    scene = draw_scene(settings.seed, number, settings.split)
    num_frames = min(settings.frames, settings.num_images - number * settings.frames)
    pictures, class_name = [], ""
    for frame in range(num_frames):
        pixels, objects = render(scene, settings.size, frame)
        # a scene keeps the class of its first frame
        class_name = class_name or max(objects, key=lambda item: item["area"])["class"]
        suffix = f"_{frame:03d}" if settings.frames > 1 else ""
        for item in objects:
            item["mask"] = run_lengths(item["mask"])
        label = {
            "path": f"{class_name}/{number:06d}{suffix}.jpg",
            "class": class_name,
            "scene": number,
            "frame": frame,
            "kind": scene.kind,
            "horizon": round(scene.horizon * settings.size, 2),
            "counts": dict(sorted(Counter(item["class"] for item in objects).items())),
            "objects": objects,
        }
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=_JPEG_QUALITY)
        pictures.append((buffer.getvalue(), label))
    return pictures


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("data_prep.scenes", __doc__, _EPILOG)
    add = parser.add_argument
    add("destination", metavar="DST", action=LocalPath, help="folder to make")
    add("--num-images", type=int, default=600, help="number of pictures (600)")
    add("--size", type=int, default=128, help="side in pixels (128)")
    add("--seed", type=int, default=0, help="seed of the scenes (0)")
    add("--split", choices=("train", "val"), default="train", help="which scenes of the seed")
    add("--frames", type=int, default=1, help="pictures per scene, with moving objects (1)")
    add("--workers", type=int, default=available_cores(), help="processes (all cores)")
    add("--overwrite", action="store_true", help="replace scenes of other settings")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    lowest = {"num_images": 1, "size": 16, "frames": 1, "workers": 1}
    for name, least in lowest.items():
        value = getattr(args, name)
        if value < least:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option} {value} is too small; it must be at least {least}.")
    settings = Settings(args.num_images, args.size, args.seed, args.split, args.frames)
    render_scenes(args.destination, settings, num_workers=args.workers, overwrite=args.overwrite)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
