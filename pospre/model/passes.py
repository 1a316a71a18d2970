"""One run of an encoder over the views of a group, and the modules that edit its tokens."""

from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from pospre.batch import Batch, per_row
from pospre.nn.places import Places


@dataclass(frozen=True)
class EncoderPass:
    """One run of an encoder over all views of a group: B·V rows, a sample's views in a row.

    Attributes:
        group: the view group.
        visible: batch key of the patches to encode, (B, K) or (B, V, K), or None for all of them.
        context: batch key of those among them that give keys and values, or None for all.
        content: names of the modules in ``PretrainModel.contents`` that edit patch embeddings.
        places: names of the modules in ``PretrainModel.places`` that edit places.
        teacher: run the teacher instead of the trained encoder; it gets no gradient.
        grad: whether gradients flow through the trained encoder here.
        needs_patches: whether anybody reads patch tokens; if not, only the prefix tokens come out,
            and the last block computes no others.
        count: how many patches of a view it runs over, filled in when it is declared; None: that
            varies with the batch.
    """

    group: str = "view"
    visible: str | None = None
    context: str | None = None
    content: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    teacher: bool = False
    grad: bool = True
    needs_patches: bool = True
    count: int | None = field(default=None, compare=False)

    @property
    def has_grad(self) -> bool:
        """Whether gradients flow through this pass."""
        return self.grad and not self.teacher


T = TypeVar("T", Tensor, Places)


class EditSet(nn.Module):
    """Modules by name that edit the tokens of a pass, or their places.

    A module with a forward, as FSDP2 wants. A member's forward takes (tokens (rows, K, D), or
    ``Places`` of such, batch, pass) and returns the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()

    def forward(self, names: tuple[str, ...], batch: Batch, where: EncoderPass, edited: T) -> T:
        """Let the modules ``names`` edit one after the other."""
        for name in names:
            edited = self.named[name](edited, batch, where)
        return edited


class MaskedTokens(nn.Module):
    """Puts one learned token in the place of those that a mask marks.

    Args:
        token: what is learned, (1, 1, D).
        mask: name of the batch key, without the group: bool (B, N) or (B, V, N).
    """

    def __init__(self, token: nn.Parameter, mask: str) -> None:
        super().__init__()
        self.token, self.mask = token, mask

    def forward(self, tokens_RND: Tensor, batch: Batch, where: EncoderPass) -> Tensor:
        """Return the embeddings (rows, N, D) that the encoder sees.

        Swin's embeddings of a patch are several, (rows, N, h, w, D), and all replaced.
        """
        mask = per_row(batch[f"{where.group}/{self.mask}"], len(tokens_RND))
        mask = mask.unflatten(-1, (-1, *[1] * (tokens_RND.dim() - 2)))
        return torch.where(mask, self.token.to(tokens_RND.dtype), tokens_RND)


class ExchangedPlaces(nn.Module):
    """Hands the i-th token whose place is not known the place of the i-th of them in random order.

    Args:
        known: the batch key, bool (B, K).
        order: the batch key of the tokens in random order, int64 (B, K): the known ones first.
    """

    def __init__(self, known: str, order: str) -> None:
        super().__init__()
        self.known, self.order = known, order

    def forward(self, places: Places, batch: Batch, where: EncoderPass) -> Places:
        """Return the places with those that are not known exchanged, perhaps for their own."""
        assert where.visible is not None
        known, cells = batch[self.known], batch[where.visible]
        turn = known.sum(1, keepdim=True) + (~known).cumsum(1) - 1
        others = cells.gather(1, batch[self.order].gather(1, turn))
        return places.move(torch.where(known, cells, others))


class ForgottenPlaces(nn.Module):
    """Hides the places that are not known; the tokens there get one learned vector, or nothing.

    Args:
        known: the batch key, bool (B, K) or (B, V, K).
        mark: (1, 1, D), learned; None: nothing.
    """

    def __init__(self, known: str, mark: nn.Parameter | None) -> None:
        super().__init__()
        self.known, self.mark = known, mark

    def forward(self, places: Places, batch: Batch, where: EncoderPass) -> Places:
        """Return the places that the encoder knows."""
        # FSDP2 takes a module's parameters away after its forward
        mark = None if self.mark is None else self.mark.clone()
        return places.forget(~batch[self.known].flatten(0, -2), mark)
