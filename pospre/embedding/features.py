"""Features of images by an encoder, and which rows a rank computes."""

import json
import math
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import numpy as np
import torch
from composer.utils import dist
from torch import Tensor
from tqdm import tqdm

from pospre import __version__
from pospre.embedding.folder import Folder
from pospre.embedding.images import Images, Row
from pospre.embedding.layouts import Array
from pospre.embedding.settings import KINDS, Embed
from pospre.errors import UserError
from pospre.evaluation.layers import layer_tokens, planned_encoder
from pospre.evaluation.models import Subject
from pospre.model.model import PretrainModel
from pospre.nn.places import Places
from pospre.nn.swin.encoder import SWIN
from pospre.training.data import storage

_LIBRARIES = ("torch", "timm", "numpy", "pillow")
_SHAPELESS = ("num_heads", "eps", "activation")  # what no tensor shows, nor their hash


class Ranks(NamedTuple):
    """This process among those of a launcher; each has its own rows."""

    rank: int = 0
    number: int = 1
    local: int = 0

    @staticmethod
    def of_launcher() -> "Ranks":
        """Return what ``composer`` or ``torchrun`` has set."""
        return Ranks(dist.get_global_rank(), dist.get_world_size(), dist.get_local_rank())


ALONE = Ranks()


class Features:
    """The model, the images, and the arrays of features."""

    def __init__(
        self,
        subject: Subject,
        size: tuple[int, int],
        data: str,
        settings: Embed,
        device: torch.device,
    ) -> None:
        self.model, self.settings, self.device = subject.model.eval(), settings, device
        encoder = self.model.encoder
        self.is_vit = subject.recipe.encoder.name != SWIN
        self.kinds = _kinds(settings, self.model)
        self.layers = self._layers(subject)
        if settings.resize == "native" and not encoder.positions.takes_any_grid:
            raise UserError(
                f"resize=native, but encoder.positions = {encoder.positions.name} takes images of "
                "one size; use centre, squash or pad."
            )
        fill = (255 * self.model.augment.mean.flatten()).round().int().tolist()
        channels = {"channels": encoder.channels}
        access = {**storage(subject.recipe), **channels}
        self.images = Images(
            data, size, encoder.patch_size, settings.resize, fill, settings.num_workers, access
        )
        shape = (encoder.channels, *size)
        blank = torch.zeros(shape, dtype=torch.uint8)
        if self.images.reader.features is not None:
            blank = torch.zeros((1, *self.images.reader.features.shape))
        self._blank = blank
        sample = self._features(blank[None])  # once before anything is written: its shapes
        rows = len(self.images)
        self.arrays = [
            Array(name, (rows, *values.shape[1:]), settings.dtype)
            for name, values in sample.items()
        ]
        self.model.to(device)

    def _layers(self, subject: Subject) -> list[int]:
        asked = self.settings.layers
        if not self.is_vit:
            if asked is not None or not self.settings.norm:
                raise UserError(f"layers and norm=false are for a ViT; the encoder is {SWIN}.")
            return []
        depth = planned_encoder(subject.recipe, asked).depth
        return [depth] if asked is None else sorted({*asked})

    def described(self) -> dict[str, Any]:
        """Return everything else that the numbers depend on, and what is needed to use them."""
        settings, encoder, images = self.settings, self.model.encoder, self.images
        plan: dict[str, Any] = {
            "features": {each.name: [*each.shape] for each in self.arrays},
            "format": settings.format,
            "dtype": settings.dtype,
            "precision": "float32",
            "device": self.device.type,
            "batch_size": settings.batch_size,
            "layers": self.layers,
            "depth": encoder.depth,
            "norm": settings.norm,
            "pooling": {
                "cls": "the class token",
                "mean": "mean of the patch tokens",
                "patches": "patch tokens, row by row; no class token, no registers",
            },
            "positions": encoder.positions.as_given(),
            **{key: getattr(self.model.vit.size, key) for key in _SHAPELESS if self.is_vit},
            "patch": [*encoder.patch_size],
            "resize": {"rule": images.rule, "interpolation": images.interpolation or None},
            **{key: getattr(self.model.augment, key).flatten().tolist() for key in ("mean", "std")},
            "versions": {"pospre": __version__} | {name: version(name) for name in _LIBRARIES},
        }
        if settings.resize != "native":
            side = round(encoder.patches_per_token**0.5)  # of a token in patches; Swin merges them
            rows, columns = (each // side for each in encoder.grid_of(*images.size))
            places = Places((rows, columns)).coordinates(torch.device("cpu"))
            plan |= {
                "image_size": [*images.size],
                "grid": [rows, columns],
                "places": [[round(each, 6) for each in pair] for pair in places[0].tolist()],
            }
        return plan

    def run(self, folder: Folder, ranks: Ranks, progress: bool) -> None:
        """Compute the rows of this rank that are not done."""
        own = _batches_of(ranks, len(self.images), self.settings.batch_size)
        left = [rows for rows in own if not folder.done[rows.start : rows.stop].all()]
        count = sum(map(len, own))
        bar = tqdm(
            total=count,
            initial=count - sum(map(len, left)),
            desc=folder.out.name,
            unit="img",
            disable=not progress or ranks.rank > 0,
        )
        with bar:
            for rows, batch in zip(left, self.images.batches(left), strict=True):
                folder.write(rows.start, self._values(batch), [_line(row) for row in batch])
                bar.update(len(rows))

    @torch.no_grad()
    def _values(self, batch: Sequence[Row]) -> dict[str, np.ndarray]:
        """Return the features of a batch; those of images that cannot be read are NaN."""
        pixels = [self._blank if row.pixels is None else row.pixels for row in batch]
        if self.settings.resize == "native":
            singles = [self._features(one[None]) for one in pixels]
            outputs = {name: torch.cat([each[name] for each in singles]) for name in singles[0]}
        else:
            outputs = self._features(torch.stack(pixels))
        bad = torch.tensor([row.pixels is None for row in batch])
        values = {}
        for name, numbers in outputs.items():
            numbers[bad] = math.nan
            kept = numbers.to(getattr(torch, self.settings.dtype))
            if kept.isinf().any():
                raise UserError(
                    f"{name} has values up to {numbers.abs().nan_to_num().max():.0f}, more than "
                    "float16 holds; use dtype=float32 (and another OUT)."
                )
            values[name] = kept.contiguous().numpy()
        return values

    @torch.no_grad()
    def _features(self, pixels_BCHW: Tensor) -> dict[str, Tensor]:
        """Return float32 features (B, …) on the CPU, by array."""
        device = self.model.augment.mean.device
        flips = torch.zeros(len(pixels_BCHW), 1, dtype=torch.bool, device=device)
        images = self.model.augment(pixels_BCHW[:, None].to(device), flips)[:, 0]
        parts: list[tuple[str, Tensor]]
        if self.is_vit:
            tokens = layer_tokens(self.model, images, self.layers, norm=self.settings.norm)
            endings = [f"_l{layer}" if self.settings.layers else "" for layer in self.layers]
            parts = list(zip(endings, tokens, strict=True))
        else:
            parts = [("", self.model.encoder(images))]
        prefix = self.model.encoder.num_prefix_tokens
        return {
            f"{kind}{ending}": _pooled(kind, tokens.float(), prefix).cpu()
            for kind in self.kinds
            for ending, tokens in parts
        }


def _pooled(kind: str, tokens_BTD: Tensor, prefix: int) -> Tensor:
    if kind == "cls":
        return tokens_BTD[:, 0]
    patches = tokens_BTD[:, prefix:]
    return patches.mean(dim=1) if kind == "mean" else patches


def _kinds(settings: Embed, model: PretrainModel) -> list[str]:
    """Return the kinds of features, in their usual order."""
    has_class, chosen = model.encoder.has_class_token, settings.features
    if chosen is None:
        return ["cls", "mean"] if has_class else ["mean"]
    if "cls" in chosen and not has_class:
        raise UserError("features=cls, but the encoder has no class token; use mean.")
    if "patches" in chosen:
        for key, value in (("format", "parquet"), ("resize", "native")):
            if getattr(settings, key) == value:
                raise UserError(
                    f"features=patches with {key}={value}: this is for cls and mean only; leave "
                    f"one of the two out."
                )
    return [kind for kind in KINDS if kind in chosen]


def _batches_of(ranks: Ranks, count: int, batch_size: int) -> list[range]:
    """Return this rank's batches: whole ones, so that no number depends on the ranks."""
    starts = range(0, count, batch_size)
    first, last = (len(starts) * (ranks.rank + step) // ranks.number for step in (0, 1))
    return [range(start, min(count, start + batch_size)) for start in starts[first:last]]


def _line(row: Row) -> bytes:
    return (json.dumps(row.line) + "\n").encode()
