"""Feature maps of an encoder, frozen or fine-tuned, for dense evaluations."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pospre import draws
from pospre.errors import UserError
from pospre.evaluation.dense.settings import Learned
from pospre.evaluation.layers import check_grid, layer_tokens, planned_encoder
from pospre.evaluation.registry import Plan
from pospre.model.model import PretrainModel
from pospre.nn.vit import Encoder


class FeatureMaps:
    """A ViT's patch tokens after some layers, as maps; see ``layer_tokens``.

    Attributes:
        model: the model, or a copy if ``learned`` fine-tunes it; only its encoder is trained.
        finetune: whether the encoder is trained.
        class_token: whether each patch is followed by the class token.
        fill: the mean colour as uint8 values of the channels.
    """

    def __init__(
        self,
        model: PretrainModel,
        layers: Sequence[int],
        *,
        norm: bool,
        class_token: bool = False,
        learned: Learned | None = None,
    ) -> None:
        learned = learned or Learned()
        self.layers, self.norm, self.finetune = layers, norm, learned.finetune
        self.class_token = class_token
        self.fill = tuple((255 * model.augment.mean.flatten()).round().int().tolist())
        self._seed, self._learned_from = learned.seed, 0
        self.model = copy.deepcopy(model) if self.finetune else model
        if self.finetune:
            self.model.objectives.requires_grad_(False)
            self.model.contents.requires_grad_(False)
            self.model.places.requires_grad_(False)
            encoder = self.model.vit
            encoder.drop_path, encoder.uniform_drop_path = learned.drop_path, False
            encoder.dropout = 0.0

    def __call__(self, images_BCHW: Tensor) -> list[Tensor]:
        """Return a map (B, D, rows, columns) of each layer for normalised images.

        With ``class_token`` D is twice the width: that of the image follows each patch's.
        """
        encoder = self.model.encoder
        keys_B = self._keys(images_BCHW) if self.finetune and torch.is_grad_enabled() else None
        tokens = layer_tokens(
            self.model, images_BCHW, self.layers, norm=self.norm, keys_B=keys_B, grad=self.finetune
        )
        grid = encoder.grid_of(*images_BCHW.shape[-2:])
        patches = [each[:, encoder.num_prefix_tokens :].float() for each in tokens]
        if self.class_token:
            firsts = [each[:, :1].float() for each in tokens]
            patches = [
                torch.cat([each, first.expand_as(each)], -1)
                for each, first in zip(patches, firsts, strict=True)
            ]
        return [each.transpose(1, 2).unflatten(2, grid) for each in patches]

    def _keys(self, images_BCHW: Tensor) -> Tensor:
        """Return the draw keys of drop path, new for every training image."""
        first, count = self._learned_from, len(images_BCHW)
        self._learned_from += count
        index_B = torch.arange(first, first + count, device=images_BCHW.device)
        return draws.sample_keys(self._seed, 0, index_B, 0, "dense/drop_path")


def check_encoder(plan: Plan[Any], layers: Sequence[int] | None = None) -> Encoder:
    """Return the recipe's encoder without memory, after checks for feature maps."""
    encoder, settings = planned_encoder(plan.recipe, layers), plan.settings
    if encoder.channels != 3 or encoder.patch_size[0] != encoder.patch_size[1]:
        raise UserError(
            f"it takes RGB images and square patches; this encoder has {encoder.channels} "
            f"channels and patches of {encoder.patch_size[0]}×{encoder.patch_size[1]}."
        )
    if isinstance(settings, Learned) and settings.drop_path and not settings.finetune:
        raise UserError(
            f"drop_path={settings.drop_path} needs a trained encoder; give finetune=true, or leave "
            "it out."
        )
    return encoder


def check_side(key: str, sides: tuple[int, int], encoder: Encoder) -> None:
    """Raise a ``UserError`` unless the encoder takes images of the size in setting ``key``."""
    patch = encoder.patch_size[0]
    if any(side < patch or side % patch for side in sides):
        near = max(patch, round(sides[0] / patch) * patch)
        raise UserError(f"{key}={sides[0]} is not a multiple of the patch {patch}; use {near}.")
    check_grid(encoder, encoder.grid_of(*sides), f"{key}={sides[0]}")


def four_scales(
    dim: int, norm: Callable[[int], nn.Module], *, halve: bool
) -> tuple[nn.ModuleList, tuple[int, int, int, int]]:
    """Return modules that rescale maps by 4, 2, 1 and 1/2, and their output widths.

    ``norm`` is between the two deconvolutions of the first. With ``halve`` every deconvolution
    halves the width, as in ViTDet (Li et al. 2022); otherwise it is kept, as in BEiT and MAE.
    """
    half, quarter = (dim // 2, dim // 4) if halve else (dim, dim)
    first = nn.Sequential(
        nn.ConvTranspose2d(dim, half, 2, 2),
        norm(half),
        nn.GELU(),
        nn.ConvTranspose2d(half, quarter, 2, 2),
    )
    scales = [first, nn.ConvTranspose2d(dim, half, 2, 2), nn.Identity(), nn.MaxPool2d(2)]
    return nn.ModuleList(scales), (quarter, half, dim, dim)
