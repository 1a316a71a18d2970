"""What every encoder of patches offers to the model, the algorithms and the export."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.options import EncoderOptions, Init
from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme

Edit = Callable[[Tensor], Tensor]
"""Takes patch embeddings (B, N, D), and returns what to use instead."""


class PatchEncoder(nn.Module, ABC):
    """A network from the visible patches of an image to tokens.

    Attributes:
        options: what it was made with.
        image_size: (height, width) in pixels.
        patch_size: (height, width) of a patch in pixels.
        grid: (rows, columns) of patches; ``num_patches`` is their product.
        channels: of the images.
        embed_dim: width of a token.
        depth: number of blocks, of all stages together.
        num_prefix_tokens: class token (0 or 1) and registers; they precede the patch tokens.
        patches_per_token: patches that one output token stands for.
        positions: how it knows where patches are, see ``pospre.nn.positions``.
        table_from: what its table of positions was taken from, if it was not drawn here.
        pixel_mean: and ``pixel_std``, of the normalisation that its weights are used to, if known.
        timm_head: what that calls the linear layer of its classifier.
    """

    options: EncoderOptions
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    grid: tuple[int, int]
    num_patches: int
    channels: int
    embed_dim: int
    depth: int
    drop_path: float
    dropout: float = 0.0
    positions: Scheme
    table_from: str | None = None
    pixel_mean: Sequence[float] | None = None
    pixel_std: Sequence[float] | None = None
    timm_head: str = "head"
    num_prefix_tokens: int = 0
    has_class_token: bool = False
    patches_per_token: int = 1

    def set_grid(self, image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        """Set the sizes, and what follows from them."""
        self.image_size, self.patch_size = image_size, patch_size
        self.grid = self.grid_of(*image_size)
        self.num_patches = self.grid[0] * self.grid[1]

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of patches of an image of that size."""
        return height // self.patch_size[0], width // self.patch_size[1]

    def places_of(self, images_BCHW: Tensor, visible_BK: Tensor | None = None) -> Places:
        """Return where the visible patches of whole images are; None: all."""
        return Places(self.grid_of(*images_BCHW.shape[-2:]), visible_BK)

    def pixels(self, images_BCHW: Tensor, visible_BK: Tensor | None) -> Tensor:
        """Return the pixels (B, K, C, h, w) of the visible patches; others are not even copied.

        Raises:
            UserError: these are no images that the encoder takes.
        """
        (rows, cols), (high, wide) = self.grid_of(*images_BCHW.shape[-2:]), self.patch_size
        fits = images_BCHW.shape[1:] == (self.channels, rows * high, cols * wide)
        if not fits or not images_BCHW.is_floating_point():
            raise UserError(
                f"the encoder got {images_BCHW.dtype} of shape {tuple(images_BCHW.shape)}, and "
                f"takes normalised floats (B, {self.channels}, H, W), with H a multiple of {high} "
                f"and W of {wide}."
            )
        patches = images_BCHW.unflatten(3, (cols, wide)).unflatten(2, (rows, high))
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # B, rows, cols, channel, high, wide
        if visible_BK is None:
            return patches.flatten(1, 2)
        batch = torch.arange(len(patches), device=visible_BK.device).unsqueeze(1)
        return patches[batch, visible_BK // cols, visible_BK % cols]

    def takes(self, num_visible: int) -> bool:
        """Return whether so many patches can be encoded."""
        return num_visible > 0

    def block_of(self, name: str) -> int | None:
        """Return which block a parameter of this encoder is a part of, counted from 0; or None."""
        found = re.match(r"blocks\.(\d+)\.", self.timm_name_of(name))
        return None if found is None else int(found[1])

    @property
    def timm_name(self) -> str:
        """The timm architecture."""
        return self.as_timm()[0]

    @property
    def timm_kwargs(self) -> dict[str, Any]:
        """What that must be told to build this encoder, besides its defaults."""
        return self.as_timm()[1]

    @abstractmethod
    def as_timm(self) -> tuple[str, dict[str, Any]]:
        """Return ``timm_name`` and ``timm_kwargs``."""

    def timm_name_of(self, name: str) -> str:
        """Return timm's name of a tensor of this encoder."""
        return name

    @abstractmethod
    def init_parameters(self, init: Init) -> None:
        """Draw all weights anew."""

    @abstractmethod
    def timm_state(self) -> dict[str, Tensor]:
        """Return the weights as timm's model of ``timm_name`` takes them, every one."""
