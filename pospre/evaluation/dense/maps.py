"""What the dense evaluations share of an encoder: its tokens as maps, frozen or fine-tuned."""

import copy
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from pospre.errors import UserError
from pospre.evaluation.layers import layer_tokens, planned_encoder
from pospre.model.model import PretrainModel
from pospre.nn.encoder import Encoder
from pospre.recipe.recipe import Recipe


class FeatureMaps:
    """An encoder's patch tokens after some layers, as maps.

    Args:
        model: of a ViT. It is left as it is: what is fine-tuned is a copy.
        layers: see ``layer_tokens``.
        norm: likewise.
        finetune: whether the encoder is to learn.

    Attributes:
        model: the model or its copy; of that only the encoder and what makes its positions learn.
    """

    def __init__(
        self, model: PretrainModel, layers: Sequence[int], *, norm: bool, finetune: bool
    ) -> None:
        self.layers, self.norm, self.finetune = layers, norm, finetune
        self.model = copy.deepcopy(model) if finetune else model
        if finetune:
            self.model.objectives.requires_grad_(False)
            self.model.contents.requires_grad_(False)

    def __call__(self, images_BCHW: Tensor) -> list[Tensor]:
        """Return a map (B, D, rows, columns) of each layer.

        Args:
            images_BCHW: normalised; the patch divides their sides.
        """
        encoder = self.model.encoder
        tokens = layer_tokens(
            self.model, images_BCHW, self.layers, norm=self.norm, grad=self.finetune
        )
        grid = encoder.grid_of(*images_BCHW.shape[-2:])
        patches = [each[:, encoder.num_prefix_tokens :].float() for each in tokens]
        return [each.transpose(1, 2).unflatten(2, grid) for each in patches]


def check_encoder(recipe: Recipe, layers: Sequence[int] | None = None) -> Encoder:
    """Return a recipe's encoder without memory, after a look at what maps need of it.

    Raises:
        UserError: it is no ViT of square patches of colour images, or has
            fewer layers.
    """
    encoder = planned_encoder(recipe, layers)
    if encoder.channels != 3 or encoder.patch_size[0] != encoder.patch_size[1]:
        raise UserError(
            f"it shows RGB images to square patches; this encoder has {encoder.channels} "
            f"channels and patches of {encoder.patch_size[0]}×{encoder.patch_size[1]}."
        )
    return encoder


def check_side(key: str, sides: tuple[int, int], encoder: Encoder) -> None:
    """Raise a ``UserError`` unless the encoder takes images of setting ``key``."""
    patch = encoder.patch_size[0]
    if any(side < patch or side % patch for side in sides):
        near = max(patch, round(sides[0] / patch) * patch)
        raise UserError(f"{key}={sides[0]} is no multiple of the patch size {patch}; use {near}.")
    if encoder.is_relative and sides != encoder.image_size:
        raise UserError(
            f"{key}={sides[0]}, but relative positions know the encoder's own size only; "
            f"use {encoder.image_size[0]}."
        )


def four_scales(
    dim: int, norm: Callable[[int], nn.Module], *, halve: bool
) -> tuple[nn.ModuleList, tuple[int, int, int, int]]:
    """Return what makes maps of 4, 2, 1 and 1/2 times the size out of maps, and their widths.

    Args:
        dim: width of the encoder.
        norm: between the two deconvolutions of the first.
        halve: every deconvolution halves the width, as in ViTDet (Li et al. 2022); else all keep
            it, as in BEiT and MAE.
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
