"""The narrow transformer that turns encoder tokens into predictions."""

from collections.abc import Iterable

from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.block import NO_CLUE, Block
from pospre.nn.positions.scheme import Clue
from pospre.nn.sizes import EncoderSize


def check_heads(owner: str, part: str, dim: int, num_heads: int) -> None:
    """Raise ``UserError`` naming the algorithm ``owner`` if heads do not divide the width."""
    if dim % num_heads:
        raise UserError(
            f"{owner}.{part}_heads = {num_heads} does not divide {owner}.{part}_dim = {dim}. "
            "Choose a width that is a multiple of the number of heads."
        )


class DecoderBlocks(nn.Sequential):
    """``depth`` pre-norm blocks: MLP ratio 4, qkv bias, LayerNorm eps 1e-6."""

    def __init__(self, dim: int, depth: int, num_heads: int) -> None:
        size = EncoderSize("", 1, dim, depth, num_heads)  # no timm model, no patches
        super().__init__(*(Block(size) for _ in range(depth)))

    def forward(self, tokens_BTD: Tensor, clues: Iterable[Clue] | None = None) -> Tensor:
        """Return the tokens after all blocks; ``clues`` has one positional clue per block."""
        if clues is None:
            clues = [NO_CLUE] * len(self)
        for block, clue in zip(self, clues, strict=True):
            tokens_BTD = block(tokens_BTD, clue)
        return tokens_BTD


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
