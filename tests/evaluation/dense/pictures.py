"""Small data sets of coloured rectangles, in the layouts of segmentation, detection and video."""

import json
from pathlib import Path

import numpy as np
from numpy import ndarray
from PIL import Image

from data_prep.scenes import Settings, render_scenes

COLOURS = np.array([[30, 60, 200], [220, 40, 40], [40, 200, 60]], np.uint8)


def rectangles(seed: int, height: int, width: int) -> list[tuple[int, int, int, int, int]]:
    """Return a red and a green rectangle: x0, y0, x1, y1, class."""
    generator = np.random.default_rng(seed)
    found = []
    for kind, left in ((1, 0), (2, width // 2)):
        x0, y0 = left + generator.integers(1, width // 8), generator.integers(1, height // 3)
        wide = generator.integers(width // 5, width // 3)
        high = generator.integers(height // 3, height // 2)
        found.append((int(x0), int(y0), int(x0 + wide), int(y0 + high), kind))
    return found


def classes_of(seed: int, height: int, width: int) -> ndarray:
    """Return uint8 (H, W): 0 where there is no rectangle."""
    classes = np.zeros((height, width), np.uint8)
    for x0, y0, x1, y1, kind in rectangles(seed, height, width):
        classes[y0:y1, x0:x1] = kind
    return classes


def save(path: Path, pixels: ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, quality=95, subsampling=0)


def mask_folder(root: Path, counts: dict[str, int], side: tuple[int, int] = (40, 48)) -> Path:
    """Write ``<split>/images`` and ``<split>/masks``; the last two columns are 255, no class."""
    for number, (split, count) in enumerate(counts.items()):
        for index in range(count):
            classes = classes_of(100 * number + index, *side)
            save(root / split / "images" / f"{index:03d}.jpg", COLOURS[classes])
            classes[:, -2:] = 255
            save(root / split / "masks" / f"{index:03d}.png", classes)
    return root


def voc_folder(root: Path, counts: dict[str, int], side: tuple[int, int] = (64, 64)) -> Path:
    """Write Pascal VOC's layout with the classes green and red."""
    for number, (split, count) in enumerate(counts.items()):
        names = [f"{split}{index:03d}" for index in range(count)]
        for index, name in enumerate(names):
            seed = 100 * number + index
            save(root / "JPEGImages" / f"{name}.jpg", COLOURS[classes_of(seed, *side)])
            objects = "".join(
                f"<object><name>{('red', 'green')[kind - 1]}</name><bndbox><xmin>{x0 + 1}</xmin>"
                f"<ymin>{y0 + 1}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
                for x0, y0, x1, y1, kind in rectangles(seed, *side)
            )
            path = root / "Annotations" / f"{name}.xml"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"<annotation>{objects}</annotation>")
        listed = root / "ImageSets" / "Main" / f"{split}.txt"
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{name}\n" for name in names))
    return root


def coco_folder(root: Path, counts: dict[str, int], side: tuple[int, int] = (64, 64)) -> Path:
    """Write COCO's layout with polygons: categories 7 (green) and 3 (red), one crowd."""
    for number, (split, count) in enumerate(counts.items()):
        images: list[dict[str, object]] = []
        annotations: list[dict[str, object]] = []
        for index in range(count):
            seed = 100 * number + index
            save(root / f"{split}2017" / f"{index}.jpg", COLOURS[classes_of(seed, *side)])
            images.append({"id": 10 + index, "file_name": f"{index}.jpg"})
            for x0, y0, x1, y1, kind in rectangles(seed, *side):
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": 10 + index,
                        "category_id": (3, 7)[kind - 1],
                        "bbox": [x0, y0, x1 - x0, y1 - y0],
                        "area": (x1 - x0) * (y1 - y0),
                        "iscrowd": 0,
                        "segmentation": [[x0, y0, x1, y0, x1, y1, x0, y1]],
                    }
                )
        categories = [{"id": 7, "name": "green"}, {"id": 3, "name": "red"}]
        path = root / "annotations" / f"instances_{split}2017.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"images": images, "categories": categories, "annotations": annotations}
        path.write_text(json.dumps(content))
    return root


def davis_folder(root: Path, num_frames: int = 5, side: tuple[int, int] = (64, 80)) -> Path:
    """Write DAVIS's layout: a red and a green rectangle that move by a patch and half a patch."""
    for frame in range(num_frames):
        objects = np.zeros(side, np.uint8)
        objects[8:32, 8 + 8 * frame : 24 + 8 * frame] = 1
        objects[40 - 4 * frame : 60 - 4 * frame, 56:76] = 2
        save(root / "JPEGImages" / "480p" / "moving" / f"{frame:05d}.jpg", COLOURS[objects])
        save(root / "Annotations" / "480p" / "moving" / f"{frame:05d}.png", objects)
    listed = root / "ImageSets" / "2017" / "val.txt"
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text("moving\n")
    return root


def rendered_splits(root: Path, counts: dict[str, int], frames: int) -> Path:
    """Render so many images of 64 pixels of each split; return the folder of both."""
    for split, count in counts.items():
        settings = Settings(num_images=count, size=64, seed=0, split=split, frames=frames)
        render_scenes(root / split, settings, num_workers=0)
    return root
