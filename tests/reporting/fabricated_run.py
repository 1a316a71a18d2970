"""Fabricates a run folder as train and evaluate leave it, so that the report is tested alone."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from pospre.model.algorithm import algorithm_class
from pospre.model.task_description import to_json

RECIPE = """\
# Demo: a small ViT on rendered scenes
run_name: {name}
seed: 0
data: {{path: {data}, batch_size: 64, views: {{view: {{scale: [0.2, 1.0]}}}}}}
encoder: {{name: vit_micro16, image_size: 224, patch_size: null}}
algorithms:
  droppos: {{mask_ratio: 0.75, position_mask_ratio: 0.75, sigma_start: 1.0, temperature: 0.1}}
  mae: {{mask_ratio: 0.75, norm_pix: true, weight: 0.05}}
optimizer: {{name: adamw, base_lr: 1.5e-4, betas: [0.9, 0.95], weight_decay: 0.05}}
schedule: {{name: cosine, warmup: 1ep}}
trainer: {{max_duration: 10ep, precision: fp32, device: cpu}}
"""


def fabricate_run(
    root: Path, *, name: str = "droppos_demo", num_steps: int = 400, evaluated: bool = True
) -> Path:
    """Make ``root/droppos_demo`` with recipe, metrics and, if ``evaluated``, four evaluations."""
    folder = root / "droppos_demo"
    folder.mkdir(parents=True)
    recipe = RECIPE.format(name=json.dumps(name), data="data/scenes")
    (folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
    lines = [json.dumps(record) for record in metrics(num_steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    warning = {"step": 7, "time": 0.0, "watch": "LossSpikes", "warning": "a <spike> of the loss"}
    (folder / "watch.jsonl").write_text(json.dumps(warning) + "\n", encoding="utf-8")
    write_pretext_tasks(folder, "mae", "droppos")
    if evaluated:
        write_evaluation(folder, "position_grid", position_grid())
        write_evaluation(folder, "knn", knn())
        write_evaluation(folder, "position_pictures", position_pictures(folder))
        write_evaluation(folder, "reconstructions", reconstructions(folder))
        write_views(folder)
    return folder


def write_pretext_tasks(folder: Path, *methods: str) -> None:
    """Write what these methods ask of a model."""
    asked = {name: algorithm_class(name).pretext_task for name in methods}
    (folder / "pretext_tasks.json").write_bytes(to_json(asked))


def metrics(num_steps: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    records = []
    for step in range(1, num_steps + 1):
        done = step / num_steps
        droppos = 1.9 + 3.4 * np.exp(-4 * done) + rng.normal(0, 0.08)
        mae = 0.55 + 0.5 * np.exp(-6 * done) + rng.normal(0, 0.01)
        warm = min(1.0, done / 0.1)
        records.append(
            {
                "step": step,
                "epoch": int(10 * (step - 1) / num_steps),
                "samples": 64 * step,
                "time": 1_795_000_000 + 0.7 * step,
                "loss/droppos": droppos,
                "loss/mae": mae,
                "loss/total": droppos + 0.05 * mae,
                "metric/droppos_accuracy": 0.45 * done**0.7 + abs(rng.normal(0, 0.01)),
                "lr": 3.75e-5 * warm * (0.5 + 0.5 * np.cos(np.pi * done)),
                "memory": 1.25,
                "gradient/encoder": 0.8 + abs(rng.normal(0, 0.1)),
                "time/data": 0.02,
                "time/save": 0.0,
                "throughput": 91 + rng.normal(0, 4) - 40 * (step % 97 == 0),
            }
        )
    return records


def position_grid() -> dict[str, Any]:
    cells = []
    for row, mask_ratio in enumerate((0.0, 0.25, 0.5, 0.75)):
        for column, position_mask_ratio in enumerate((0.25, 0.5, 0.75, 0.95)):
            visible = int(196 * (1 - mask_ratio))
            kept = int(visible * (1 - position_mask_ratio))
            accuracy = 0.62 - 0.08 * row - 0.09 * column - 0.02 * row * column
            cells.append(
                {
                    "mask_ratio": mask_ratio,
                    "position_mask_ratio": position_mask_ratio,
                    "visible": visible,
                    "kept": kept,
                    "dropped": visible - kept,
                    "accuracy": max(accuracy, 0.031),
                    "initial_accuracy": 0.0062,
                    "chance": 1 / 196,
                    "chance_excluding": 1 / (196 - kept),
                    "tokens": 1000 * (visible - kept),
                }
            )
    mean = sum(cell["accuracy"] for cell in cells) / 16
    return {
        "cells": cells, "mean": mean, "mean_se": 0.0041, "initial_mean": 0.0062,
        "mean_difference": mean - 0.0062, "mean_difference_se": 0.0042, "grid": [14, 14],
        "samples": 1000,
    }  # fmt: skip


def knn() -> dict[str, Any]:
    return {
        **logistic(), "k": 20, "temperature": 0.07, "leave_one_out": False, "features": "mean",
        "left_out": 0,
    }  # fmt: skip


def logistic() -> dict[str, Any]:
    return {
        "top1": 0.713, "initial_top1": 0.402, "top1_difference": 0.311,
        "top1_difference_se": 0.0294, "standard_error": 0.0226, "bank_samples": 1600,
        "query_samples": 400, "classes": 8, "chance": 0.125,
    }  # fmt: skip


def reconstructions(folder: Path) -> dict[str, Any]:
    target = folder / "evaluation" / "reconstructions"
    target.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (900, 300), (240, 240, 240)).save(target / "reconstructions.png")
    return {
        "error": 0.512, "error_se": 0.0123, "flat_error": 1.0, "initial_error": None,
        "samples": 400, "pictures": ["reconstructions.png"],
    }  # fmt: skip


def write_views(folder: Path) -> None:
    """Write strips of two views each, as a training does in its first step."""
    (folder / "views").mkdir()
    files = [f"view_{row}.png" for row in range(3)]
    for row, name in enumerate(files):
        Image.new("RGB", (202, 96), (80 * row, 90, 160)).save(folder / "views" / name)
    groups = [{"name": "view", "legend": "grey patches are hidden", "files": files}]
    (folder / "views" / "views.json").write_text(json.dumps({"step": 1, "groups": groups}))


def position_pictures(folder: Path, num_pictures: int = 4, side: int = 224) -> dict[str, Any]:
    """Draw coloured ramps, shuffle their patches, and put all but some back."""
    target = folder / "evaluation" / "position_pictures"
    target.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    y, x = np.mgrid[0:side, 0:side] / side
    pictures = []
    for index in range(num_pictures):
        waves = np.sin(6 * (x * (index + 1) + y)), y, np.cos(9 * x * y + index)
        image = np.stack([127 + 127 * wave for wave in waves], axis=-1).astype(np.uint8)
        views = {"original": image, "shuffled": shuffle_patches(image, rng, 1.0)}
        views["reconstructed"] = shuffle_patches(image, rng, 0.3)
        files = {view: f"{index:04d}_{view}.png" for view in views}
        for view, pixels in views.items():
            Image.fromarray(pixels).save(target / files[view])
        pictures.append({"index": 37 * index, **files, "accuracy": 0.7 - 0.1 * index})
    return {"pictures": pictures, "mask_ratio": 0.5, "position_mask_ratio": 0.5}


def shuffle_patches(
    image: np.ndarray, rng: np.random.Generator, share: float, patch: int = 16
) -> np.ndarray:
    rows, columns = image.shape[0] // patch, image.shape[1] // patch
    patches = image[: rows * patch, : columns * patch]
    patches = patches.reshape(rows, patch, columns, patch, 3).swapaxes(1, 2)
    patches = patches.reshape(-1, patch, patch, 3).copy()
    moved = rng.permutation(len(patches))[: int(share * len(patches))]
    patches[moved] = patches[rng.permutation(moved)]
    return patches.reshape(rows, columns, patch, patch, 3).swapaxes(1, 2).reshape(image.shape)


def write_evaluation(folder: Path, name: str, results: dict[str, Any], **others: Any) -> Path:
    path = folder / "evaluation" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    content = {
        "name": name,
        "model": str(folder),
        "data": "data/scenes",
        "created": "2026-11-21T02:00:00+00:00",
        "settings": {"seed": 0},
        "results": results,
        **others,
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return path
