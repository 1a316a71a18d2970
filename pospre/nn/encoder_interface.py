"""The interface of patch encoders, and how images become patches and patches images."""

import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.encoder_options import EncoderOptions, Init
from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme
from pospre.nn.projections import Parts

Edit = Callable[[Tensor], Tensor]
"""Maps patch embeddings (B, N, D) to their replacements."""


class Original:
    """A module that an encoder was copied from, to notice later changes; copies forget it."""

    def __init__(self, module: nn.Module | None = None) -> None:
        self._module = None if module is None else weakref.ref(module)
        self._tensors = None if module is None else _state(module)

    def __reduce__(self) -> tuple[type["Original"], tuple[()]]:
        return Original, ()

    def has_changed(self) -> bool:
        """Return whether its tensors, or those that are trained, have changed."""
        module = None if self._module is None else self._module()
        return module is not None and _state(module) != self._tensors


def _state(module: nn.Module) -> list[tuple[int, int, bool]]:
    tensors = (*module.parameters(), *module.buffers())
    return [(id(each), each._version, each.requires_grad) for each in tensors]


class PatchEncoder(nn.Module, ABC):
    """A network that encodes the visible patches of an image as tokens: our ViT, or Swin.

    Attributes:
        image_size: (height, width) in pixels.
        patch_size: (height, width) of a patch in pixels.
        grid: (rows, columns) of patches; ``num_patches`` is their product.
        embed_dim: width of a token.
        patch_dim: width of a patch's embedding, before the first block.
        depth: number of blocks over all stages.
        num_prefix_tokens: class token (0 or 1) plus registers; they precede the patch tokens.
        patches_per_token: patches covered by one output token.
        positions: the scheme of positions, see ``pospre.nn.positions``.
        pixels_expected: ``mean`` and ``std`` for normalisation that its weights expect, if known.
        copied_from: the module whose weights it has, if any.
        timm_head: timm's name of the classifier's linear layer.
        built: its parts when it was made, so that exports notice replaced ones.
    """

    options: EncoderOptions
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    grid: tuple[int, int]
    num_patches: int
    channels: int
    embed_dim: int
    patch_dim: int
    depth: int
    drop_path: float
    dropout: float = 0.0
    positions: Scheme
    pixels_expected: Mapping[str, Sequence[float]] = MappingProxyType({})
    copied_from = Original()
    timm_head: str = "head"
    num_prefix_tokens: int = 0
    has_class_token: bool = False
    patches_per_token: int = 1
    built: Parts

    def set_grid(self, image_size: tuple[int, int], patch_size: tuple[int, int]) -> None:
        """Set the sizes and the attributes derived from them."""
        self.image_size, self.patch_size = image_size, patch_size
        self.grid = self.grid_of(*image_size)
        self.num_patches = self.grid[0] * self.grid[1]

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Return (rows, columns) of patches of an image of this size."""
        return height // self.patch_size[0], width // self.patch_size[1]

    def places_of(self, images_BCHW: Tensor, visible_BK: Tensor | None = None) -> Places:
        """Return the places of the visible patches of whole images; None: of all patches."""
        return Places(self.grid_of(*images_BCHW.shape[-2:]), visible_BK)

    def pixels(self, images_BCHW: Tensor, visible_BK: Tensor | None) -> Tensor:
        """Return the pixels (B, K, C, h, w) of the visible patches, without copying others."""
        (rows, cols), (high, wide) = self.grid_of(*images_BCHW.shape[-2:]), self.patch_size
        fits = images_BCHW.shape[1:] == (self.channels, rows * high, cols * wide)
        if not fits or not images_BCHW.is_floating_point():
            raise UserError(
                f"the encoder got {images_BCHW.dtype} of shape {tuple(images_BCHW.shape)}, "
                f"but takes normalised floats (B, {self.channels}, H, W), with H a multiple of "
                f"{high} and W of {wide}."
            )
        patches = images_BCHW.unflatten(3, (cols, wide)).unflatten(2, (rows, high))
        patches = patches.permute(0, 2, 4, 1, 3, 5)  # B, rows, cols, channel, high, wide
        if visible_BK is None:
            return patches.flatten(1, 2)
        batch = torch.arange(len(patches), device=visible_BK.device).unsqueeze(1)
        return patches[batch, visible_BK // cols, visible_BK % cols]

    def takes(self, num_visible: int) -> bool:
        """Return whether this number of patches can be encoded."""
        return num_visible > 0

    def block_of(self, name: str) -> int | None:
        """Return the block, counted from 0, that a parameter belongs to; None: no block."""
        match = re.match(r"blocks\.(\d+)\.", self.timm_name_of(name))
        return None if match is None else int(match[1])

    @property
    def timm_name(self) -> str:
        """The timm architecture's name."""
        return self.as_timm()[0]

    @property
    def timm_kwargs(self) -> dict[str, Any]:
        """Arguments for timm that differ from its defaults."""
        return self.as_timm()[1]

    @abstractmethod
    def forward(
        self,
        images_BCHW: Tensor,
        visible_BK: Tensor | None = None,
        places: Places | None = None,
        *,
        content: Edit | None = None,
        context_BM: Tensor | None = None,
        keys_B: Tensor | None = None,
        prefix_only: bool = False,
    ) -> Tensor | list[Tensor]:
        """Return the tokens of the visible patches of normalised images; see ``Encoder``."""

    def unknown_to_timm(self, *, wrapped: bool = False) -> str:
        """Return the option that no model of timm has, or none; see ``Encoder``."""
        return ""

    @abstractmethod
    def as_timm(self) -> tuple[str, dict[str, Any]]:
        """Return ``timm_name`` and ``timm_kwargs``."""

    def timm_name_of(self, name: str) -> str:
        """Return timm's name of a tensor of this encoder."""
        return name

    @abstractmethod
    def init_parameters(self, init: Init) -> None:
        """Reinitialise all weights."""

    @abstractmethod
    def timm_state(
        self, vit: nn.Module | None = None, grid: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Return all weights with the names of timm's model ``timm_name``.

        Args:
            vit: the timm model to load them, if ``wrap_encoder`` has wrapped it.
            grid: grid of the exported positions, if they take any; None: the images'.
        """


def split_tokens(tokens_BTF: Tensor, per_token: int) -> Tensor:
    """Split tokens that cover squares of slots into one token per slot: (B, K, dim), row-major.

    ``tokens_BTF`` are (B, T, per_token·dim) of a square map; ``per_token`` is 1 or 4.
    """
    if per_token == 1:
        return tokens_BTF
    side, square = round(tokens_BTF.shape[1] ** 0.5), round(per_token**0.5)
    parts = tokens_BTF.unflatten(2, (square, square, -1)).unflatten(1, (side, side))
    return parts.transpose(2, 3).flatten(3, 4).flatten(1, 2).flatten(1, 2)


def patchify(images_BCHW: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Cut images into flat patches (B, N, h·w·C), row-major, with channels last."""
    high, wide = patch_size
    rows, cols = images_BCHW.shape[2] // high, images_BCHW.shape[3] // wide
    patches = images_BCHW.unflatten(3, (cols, wide)).unflatten(2, (rows, high))
    return patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def unpatchify(patches_BNF: Tensor, grid: tuple[int, int]) -> Tensor:
    """Undo ``patchify`` for square RGB patches: (B, N, P²·3) to (B, 3, H, W), (rows, columns)."""
    side = int((patches_BNF.shape[-1] // 3) ** 0.5)
    patches = patches_BNF.unflatten(2, (side, side, 3)).unflatten(1, grid)
    images = patches.permute(0, 5, 1, 3, 2, 4)
    return images.flatten(4).flatten(2, 3)
