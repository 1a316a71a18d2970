"""Videos with object masks for every frame: DAVIS's layout, and rendered tracks.

DAVIS has ``ImageSets/<split>.txt`` with the names of sequences, ``JPEGImages/480p/<name>/*.jpg``
and ``Annotations/480p/<name>/*.png`` with object ids (0 is the background, 255 is ignored).
Rendered tracks come from ``data_prep.scenes … --frames N``.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy import ndarray
from torch import Tensor

from pospre.data.decode.bit_depth import RGB, Decoding
from pospre.errors import UserError
from pospre.evaluation.dense.images import (
    LABELS,
    files_by_stem,
    image_sides,
    read_image,
    read_labels,
    scene_lines,
)
from pospre.text_lists import read_list

VOID = 255
_RESOLUTION = "480p"


@dataclass(frozen=True)
class Video:
    """A sequence: image files in order, and each one's mask file or line of rendered labels."""

    name: str
    frames: Sequence[Path]
    masks: Sequence[Any]
    decoding: Decoding

    def image(self, index: int) -> Tensor:
        """Return a frame's pixels, uint8 (3, H, W)."""
        return read_image(self.frames[index], self.decoding)

    def objects(self, index: int) -> ndarray:
        """Return the objects of a frame, int64 (H, W): 0 is background, ``VOID`` is ignored."""
        return read_labels(self.masks[index], self.frames[index], lambda item: int(item["id"]) + 1)

    def first_objects(self) -> list[int]:
        """Return the ids in the first frame, which are tracked."""
        return sorted(set(np.unique(self.objects(0)).tolist()) - {0, VOID})


def open_videos(root: str, split: str, decoding: Decoding = RGB) -> list[Video]:
    """Find the sequences of a data set: of a list of DAVIS, or rendered tracks, which have none."""
    base = Path(root)
    listed = base / "ImageSets" / f"{split}.txt"
    if listed.is_file():
        names = [line.split()[0] for line in read_list(listed)]
        videos = [_davis(base, name, decoding) for name in names]
    elif (base / LABELS).is_file():
        videos = _tracks(base, decoding)
    else:
        raise UserError(
            f"{root} has no list ImageSets/{split}.txt beside JPEGImages and Annotations (DAVIS), "
            "and no rendered tracks (data_prep.scenes … --frames 4)."
        )
    short = next((video for video in videos if len(video.frames) < 3), None)
    if short is not None or not videos:
        raise UserError(
            f"{short.name if short else listed} has {len(short.frames) if short else 'no'} frames; "
            "the first is given and the last is not measured, so a video needs at least 3."
        )
    return videos


def check_video(video: Video) -> None:
    """Read all masks of a video, and raise a ``UserError`` for invalid ones."""
    known = video.first_objects()
    if not known:
        raise UserError(f"{video.name}: the first mask has no object to track.")
    for index, frame in enumerate(video.frames):
        objects = video.objects(index)
        if objects.shape != image_sides(frame):
            raise UserError(
                f"the mask of {frame} is {objects.shape[1]}×{objects.shape[0]}, but the frame has "
                "another size, upright by its EXIF."
            )
        other = sorted(set(np.unique(objects).tolist()) - {0, VOID, *known})
        if other and isinstance(video.masks[index], Path):
            raise UserError(
                f"{video.masks[index]} contains the id {other[0]}; known from the first frame are "
                f"{', '.join(map(str, known))}, and {VOID} for ignored pixels."
            )


def _davis(base: Path, name: str, decoding: Decoding) -> Video:
    folders = [base / part / _RESOLUTION / name for part in ("JPEGImages", "Annotations")]
    frames = list(files_by_stem(folders[0]).values())
    masks = sorted(folders[1].glob("*.png"))
    lone = sorted({path.stem for path in frames} ^ {path.stem for path in masks})
    if lone or not frames:
        raise UserError(
            f"{folders[0]} has {len(frames)} frames and {folders[1]} {len(masks)} masks"
            f"{f'; only one of them has {lone[0]}' if lone else ''}. Every frame needs a mask."
        )
    return Video(name, frames, masks, decoding)


def _tracks(base: Path, decoding: Decoding) -> list[Video]:
    scenes: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in scene_lines(base):
        scenes[line["scene"]].append(line)
    videos = []
    for number, lines in sorted(scenes.items()):
        lines.sort(key=lambda line: line["frame"])
        frames = [base / line["path"] for line in lines]
        videos.append(Video(f"scene {number}", frames, lines, decoding))
    return videos
