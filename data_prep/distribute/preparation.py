"""The plan of a conversion, and its blocks, from a source and settings."""

import hashlib
import json
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path

from data_prep.plan.plan import VERSION, Block, Plan, cut_blocks
from data_prep.plan.records import Settings
from data_prep.sources.registry import open_source
from data_prep.sources.source import Source
from pospre.errors import UserError, needing, to_install
from pospre.scratch import remove_folder_of_torch

_FRAMES = 100  # of a clip: one second, plus 20 ms of silence
_FOR_CLIPS = {"frames": "clips", "keywords": "clips"}
_FOR_IMAGES = {"channels": "images", "deep_range": "images", "seekable": "JPEGs"}


def prepare(path: Path, settings: Settings) -> tuple[Source, Settings]:
    """List the chosen split of a source; return it and the settings for its kind.

    ``UserError`` if it is empty or an option does not fit.
    """
    source = open_source(
        path,
        kind=settings.source,
        split=settings.split,
        val_fraction=settings.val_fraction,
        seed=settings.seed,
        keywords=settings.keywords,
    )
    holds = "WAV files" if source.is_audio else "images"
    for name, noun in (_FOR_IMAGES if source.is_audio else _FOR_CLIPS).items():
        value = getattr(settings, name)
        if value != getattr(Settings, name):
            option = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            raise UserError(f"{option} is for {noun}, but {path} has {holds}; leave it out.")
    settings = replace(settings, source=source.kind)
    if source.is_audio:
        if settings.format != "mds":
            raise UserError(f"{path} has WAV files; their features are stored with --format mds.")
        settings = replace(settings, frames=settings.frames or _FRAMES)
    elif settings.format != "mds" and settings.channels not in (1, 3):
        raise UserError(
            f"--channels {settings.channels}: a .beton contains JPEGs of 3 channels or 1; use "
            "--format mds."
        )
    return source, settings


def make_plan(source: Source, settings: Settings) -> tuple[Plan, list[Block]]:
    """Cut a source into blocks."""
    sizes = [item.size for item in source.items]
    blocks = [
        block._replace(key=_key(source.fingerprint(block.start, block.stop), settings))
        for block in cut_blocks([item.name for item in source.items], sizes, settings.shard_mb)
    ]
    about = {
        "ignored_examples": list(source.ignored),
        "left_out": list(source.left_out),
        "split_rule": source.split_rule,
    }
    known = {key: value for key, value in about.items() if value not in (None, [])}
    plan = Plan(
        made_from={"settings": asdict(settings), "source": source.fingerprint()},
        about={**known, "classes": source.classes, "ignored": source.num_ignored},
        block_keys=[block.key for block in blocks],
        version=VERSION,
    )
    return plan, blocks


def _key(fingerprint: str, settings: Settings) -> str:
    """Return a hash of everything that determines the bytes of a block."""
    parts = json.dumps([asdict(settings), fingerprint], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def check_writers(data_format: str) -> None:
    """Import a format's writers, which are slow to import; ``UserError`` if FFCV is missing."""
    with needing("convert", "a conversion"):
        import_module("data_prep.publish.shards")
    if data_format == "ffcv":
        try:
            import_module("data_prep.publish.beton")
        except ImportError as error:
            raise UserError(
                f"FFCV cannot be loaded ({error}): {to_install('ffcv')}; or use --format mds."
            ) from error
    remove_folder_of_torch()
