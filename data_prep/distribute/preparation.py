"""A source and settings → the plan of a conversion, and the blocks that it is cut into."""

import hashlib
import importlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from data_prep.plan.blocks import Block, cut_blocks
from data_prep.plan.plan import VERSION, Plan
from data_prep.plan.records import Settings
from data_prep.sources.registry import open_source
from data_prep.sources.source import Source
from pospre.errors import UserError, to_install

_FRAMES = 100  # of a clip: one second, and 20 ms of silence
_FOR_CLIPS = {"frames": "clips", "keywords": "clips"}
_FOR_IMAGES = {"channels": "images", "deep_range": "images", "seekable": "JPEGs"}

# library and extra that write a format, and the other format
_WRITTEN_BY = {"ffcv": ("FFCV", "ffcv", "mds"), "mds": ("Streaming", "convert", "ffcv")}


@dataclass(frozen=True)
class Prepared:
    """What is known before the first sample is read.

    Attributes:
        source: its wanted split, listed.
        settings: those that matter for its kind.
    """

    source: Source
    settings: Settings

    @cached_property
    def made_from(self) -> dict[str, Any]:
        """What tells this conversion from others, as the description notes it.

        Once: it is a hash over every item.
        """
        return {"settings": asdict(self.settings), "source": self.source.fingerprint()}

    def plan(self) -> tuple[Plan, list[Block]]:
        """Cut the source into blocks.

        Raises:
            UserError: the library that writes the format is missing.
        """
        source, items = self.source, self.source.items
        writers = load_writers(self.settings.format)
        sizes = [item.size for item in items]
        blocks = cut_blocks([item.name for item in items], sizes, self.settings.shard_mb)
        largest = max(sum(sizes[block.start : block.stop]) for block in blocks)
        limit: int = writers.size_limit(items, largest)
        blocks = [block._replace(key=self._key(block, limit)) for block in blocks]
        plan = Plan(
            made_from=self.made_from,
            num_blocks=len(blocks),
            num_items=len(items),
            classes=source.classes,
            num_ignored=source.num_ignored,
            split_rule=source.split_rule,
            annotation=source.annotation,
            limit=limit,
            noun="WAV files" if source.is_audio else "images",
            titles=source.titles,
            annotation_classes=source.annotation_classes,
            ignored=list(source.ignored),
            block_keys=[block.key for block in blocks],
            version=VERSION,
        )
        return plan, blocks

    def _key(self, block: Block, limit: int) -> str:
        """Return a hash of everything that decides the bytes of a block."""
        parts = [asdict(self.settings), limit, self.source.fingerprint(block.start, block.stop)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def prepare(path: Path, settings: Settings) -> Prepared:
    """List the wanted split of a source.

    Raises:
        UserError: there is nothing to convert, or an option does not suit what is there.
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
            raise UserError(f"{option} is for {noun}, but {path} holds {holds}; leave it out.")
    settings = replace(settings, source=source.kind)
    if source.is_audio:
        if settings.format != "mds":
            raise UserError(f"{path} holds WAV files; their features are stored with --format mds.")
        settings = replace(settings, frames=settings.frames or _FRAMES)
    elif settings.format != "mds" and settings.channels not in (1, 3):
        raise UserError(
            f"--channels {settings.channels}: a .beton holds JPEGs, of 3 channels or 1; use "
            "--format mds."
        )
    return Prepared(source, settings)


def load_writers(data_format: str) -> Any:
    """Import the writers of a format: the libraries are heavy, and FFCV's may be missing.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return importlib.import_module(f"data_prep.publish.writers.{data_format}")
    except ImportError as error:
        library, extra, other = _WRITTEN_BY[data_format]
        raise UserError(
            f"{library} cannot be loaded ({error}): {to_install(extra)}; or use --format {other}."
        ) from error
