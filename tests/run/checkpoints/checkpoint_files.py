"""Checkpoints written, looked at and spoilt by hand."""

import hashlib
import json
from pathlib import Path
from typing import Any

from composer.core import Timestamp

from pospre.run.checkpoints.rank_files import Part, Staging

_RECIPE = {"data": {}, "encoder": {}, "algorithms": {}, "trainer": {"max_duration": "1ep"}}
_RECORD = {
    "recipe": _RECIPE,
    "num_samples": 1,
    "data": {},
    "fingerprints": {},
    "starts": [],
    "fresh": [],
    "classes": None,
    "reference": None,
}
CONTENT: dict[str, Any] = {
    "state": {
        "callbacks": {"RecipeRecord": _RECORD},
        "timestamp": {"Timestamp": Timestamp().state_dict()},
        "model": {},
        "optimizers": {},
        "schedulers": {},
        "algorithms": [],
    },
    "rng": [],
}
"""The least that a checkpoint holds."""


def holding(model: dict[str, Any]) -> dict[str, Any]:
    """Return the least content with a model."""
    return {**CONTENT, "state": {**CONTENT["state"], "model": model}}


def write_checkpoint(content: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint as one rank does."""
    part = Part(content, Staging())
    part.finish(folder, [part.write(folder)])


def shard(checkpoint: Path) -> Path:
    """Return the file with the tensors that one rank has written."""
    (path,) = checkpoint.glob("*.safetensors")
    return path


def forge(checkpoint: Path, name: str, content: bytes) -> None:
    """Put other content into a checkpoint's file, and make the manifest fit."""
    (checkpoint / name).write_bytes(content)
    manifest = checkpoint / "manifest.json"
    noted = json.loads(manifest.read_text())
    for item in noted["files"]:
        if item["file"] == name:
            item |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest.write_text(json.dumps(noted))
