"""Imported only by the fork server: imports and prepares training in a single thread."""

import os
import tempfile
from pathlib import Path

import numpy as np
from composer.utils.collect_env import get_composer_env_dict
from PIL import Image

import pospre.certificate.step_records  # noqa: F401
from pospre.recipe.recipe import recipe_from_dict
from pospre.training.build import build_components


def prepare() -> None:
    """Do in advance what every process would repeat: late imports, numba's cache, the host name.

    No thread may be left: a fork has only the forking one, and locks held by others would stay.
    """
    with tempfile.TemporaryDirectory(prefix="pospre-") as folder:
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(Path(folder) / "black.jpg")
        recipe = {
            "run_name": "preload",
            "data": {"path": folder, "batch_size": 1, "num_workers": 0},
            "encoder": {"name": "vit_tiny16", "image_size": 32, "depth": 1},
            "algorithms": {"mae": {"decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2}},
            "schedule": {"warmup": "0ba"},
            "trainer": {"max_duration": "1ba", "device": "cpu"},
        }
        next(iter(build_components(recipe_from_dict(recipe)).loader))
    get_composer_env_dict()  # starts a subprocess; its result goes into every checkpoint
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise RuntimeError(f"preparing training started {threads - 1} threads, so forks are unsafe")


prepare()
