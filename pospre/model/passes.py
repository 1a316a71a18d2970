"""Encoder passes as ``compose`` lays them out, and the modules that edit their tokens."""

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from pospre.batch import Batch, per_row
from pospre.nn.places import Places


@dataclass(frozen=True)
class EncoderPass:
    """One run of an encoder over all views of a group: B·V rows, with a sample's views adjacent.

    Attributes:
        group: the view group.
        visible: batch key of the patches to encode, (B, K) or (B, V, K); None: all.
        context: batch key of those among them that give keys and values; None: all.
        content: the methods that edit patch embeddings, in order.
        places: the methods that edit places.
        teacher: run the teacher instead of the trained encoder, without gradient.
        reference: run the reference encoder instead, over all patches.
        rolls: of so many shifted copies of each view; 0: of the view itself.
        grad: whether gradients flow through the trained encoder here.
        needs_patches: whether any objective reads patch tokens. If not, the pass returns only
            prefix tokens, and the last block computes no others.
        count: number of patches per view; None: varies by batch.
        readers: the methods whose heads get its tokens.
    """

    group: str = "view"
    visible: str | None = None
    context: str | None = None
    content: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    teacher: bool = False
    reference: bool = False
    rolls: int = 0
    grad: bool = True
    needs_patches: bool = True
    count: int | None = field(default=None, compare=False)
    readers: tuple[str, ...] = ()

    @property
    def has_grad(self) -> bool:
        """Whether gradients flow through this pass."""
        return self.grad and not self.teacher and not self.reference


T = TypeVar("T", Tensor, Places)


class EditSet(nn.Module):
    """Named modules that edit the tokens of a pass or their places.

    A module with its own forward, as FSDP2 requires. Each member takes (tokens (rows, K, D) or
    their ``Places``, batch, pass) and returns the edited tokens or places.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()

    def forward(self, names: tuple[str, ...], batch: Batch, where: EncoderPass, edited: T) -> T:
        """Apply the modules ``names`` in order."""
        for name in names:
            edited = self.named[name](edited, batch, where)
        return edited


class MaskedTokens(nn.Module):
    """Replaces masked tokens by one learned token.

    Args:
        token: (1, 1, D), learned.
        mask: batch key without the group: bool (B, N) or (B, V, N).
    """

    def __init__(self, token: nn.Parameter, mask: str) -> None:
        super().__init__()
        self.token, self.mask = token, mask

    def forward(self, tokens_RND: Tensor, batch: Batch, where: EncoderPass) -> Tensor:
        """Return the embeddings (rows, N, D) for the encoder.

        Swin has several embeddings per patch, (rows, N, h, w, D); all are replaced.
        """
        mask = per_row(batch[f"{where.group}/{self.mask}"], len(tokens_RND))
        mask = mask.unflatten(-1, (-1, *[1] * (tokens_RND.dim() - 2)))
        return torch.where(mask, self.token.to(tokens_RND.dtype), tokens_RND)


class ExchangedPlaces(nn.Module):
    """Permutes the places of tokens with unknown places.

    Args:
        known: batch key, bool (B, K).
        order: batch key of a random token order, int64 (B, K), known ones first: the i-th unknown
            token gets the place of the i-th unknown token in this order.
    """

    def __init__(self, known: str, order: str) -> None:
        super().__init__()
        self.known, self.order = known, order

    def forward(self, places: Places, batch: Batch, where: EncoderPass) -> Places:
        """Return the places with unknown ones permuted; some may keep their own."""
        assert where.visible is not None
        known, cells = batch[self.known], batch[where.visible]
        turn = known.sum(1, keepdim=True) + (~known).cumsum(1) - 1
        others = cells.gather(1, batch[self.order].gather(1, turn))
        return places.move(torch.where(known, cells, others))


class ForgottenPlaces(nn.Module):
    """Hides unknown places; their tokens get one learned vector, or nothing.

    Args:
        known: batch key, bool (B, K) or (B, V, K).
        mark: (1, 1, D), learned; None: nothing.
    """

    def __init__(self, known: str, mark: nn.Parameter | None) -> None:
        super().__init__()
        self.known, self.mark = known, mark

    def forward(self, places: Places, batch: Batch, where: EncoderPass) -> Places:
        """Return the places with unknown ones forgotten."""
        # FSDP2 removes a module's parameters after its forward
        mark = None if self.mark is None else self.mark.clone()
        return places.forget(~batch[self.known].flatten(0, -2), mark)
