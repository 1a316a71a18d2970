"""Positions that fade: those that weights were trained with go out while others come in.

With a, the share of the new ones, tokens get (1 − a)·old + a·new vectors, and blocks (1 − a)·old +
a·new angles and biases. Training begins at a = 0, where the encoder computes what it did with its
old positions, and a reaches 1 halfway. From then on nothing of the old ones is left.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from pospre.nn.places import Places
from pospre.nn.positions.scheme import Scheme, TransformerDims

_FLAGS = ("takes_any_grid", "can_forget")
_WHOLE = 0.5  # share of the training after which only the new positions are left
_OLD, _NEW, _SHARE = "positions.old.", "positions.new.", "positions.share"


class Fading(Scheme):
    """Two schemes, and the share of the new one, which ``fade`` sets.

    It takes what both take, but no boxes: in a field, distances are others than in the images of
    the weights. Decoders get the new scheme.
    """

    takes_boxes: ClassVar[bool] = False

    def __init__(self, dims: TransformerDims, old: Scheme, new: Scheme) -> None:
        super().__init__(dims)
        self.old, self.new = old, new
        self.name = f"{old.name} → {new.name}"
        self.share: Tensor
        self.register_buffer("share", torch.empty(()))
        self.shares_terms = old.shares_terms and new.shares_terms
        self.is_drawn = old.is_drawn or new.is_drawn
        flags: dict[str, Any] = {key: getattr(old, key) and getattr(new, key) for key in _FLAGS}
        both = (("old", old), ("new", new))
        flags["is_cyclic"] = new.is_cyclic  # in the end
        flags["inputs"] = tuple(f"{key}.{each}" for key, one in both for each in one.inputs)
        for key, value in flags.items():  # of this pair, not of the class
            setattr(self, key, value)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Begin with the old scheme alone; initialise both."""
        self.share.zero_()
        self.old.reset_parameters()
        self.new.reset_parameters()

    @torch.no_grad()
    def fade(self, progress: float) -> None:
        """Set the share of the new scheme for a step that begins at ``progress`` in [0, 1)."""
        self.share.fill_(min(1.0, progress / _WHOLE))

    def companion(self, dims: TransformerDims) -> Scheme | None:
        """Return the scheme of a decoder, the new one's."""
        return self.new.companion(dims)

    def embed(self, places: Places) -> Tensor | None:
        """Return the mixed vectors (R, K, dim), or None."""
        return self._mixed(self.old.embed(places), self.new.embed(places))

    def prefix(self) -> Tensor | None:
        """Return the mixed vectors (1, P, dim) of prefix tokens, or None."""
        return self._mixed(self.old.prefix(), self.new.prefix())

    def angles(self, places: Places, layer: int) -> Tensor | None:
        """Return the mixed angles (R, heads or 1, K, D/2), or None."""
        return self._mixed(self.old.angles(places, layer), self.new.angles(places, layer))

    def distances(self, places: Places, layer: int) -> Tensor | None:
        """Return the mixed bias (R, heads, T, T), or None."""
        return self._mixed(self.old.distances(places, layer), self.new.distances(places, layer))

    def check(self, places: Places) -> None:
        """Raise ``UserError`` for places that one of them cannot take."""
        super().check(places)
        self.old.check(places)
        self.new.check(places)

    def _mixed(self, old: Tensor | None, new: Tensor | None) -> Tensor | None:
        if old is None:
            return None if new is None else self.share * new
        faded = (1 - self.share) * old
        return faded if new is None else faded + self.share * new


@contextmanager
def only_old(encoder: Any) -> Iterator[None]:
    """Give an encoder, while it takes weights, only the positions that fade out.

    Then prefix tokens take over their rows of a table: they have no place that could fade.
    """
    fading = encoder.positions
    if not isinstance(fading, Fading):
        yield
        return
    encoder.positions = fading.old
    try:
        yield
    finally:
        encoder.positions = fading
    add_prefix(encoder, fading.old)
    table = getattr(fading.old, "pos_embed", None)
    if table is not None:
        table.data[:, : fading.dims.num_prefix] = 0


@torch.no_grad()
def add_prefix(encoder: Any, scheme: Scheme) -> None:
    """Add a scheme's vectors of prefix tokens to these."""
    rows, start = scheme.prefix(), 0
    for tokens in (encoder.cls_token, encoder.reg_token):
        if tokens is not None and rows is not None:
            tokens.add_(rows[:, start : start + tokens.shape[1]])
            start += tokens.shape[1]


def settled(state: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return a model's tensors with the new positions alone; None: the old ones are still there."""
    shares = [tensor for key, tensor in state.items() if key.endswith(_SHARE)]
    if not all(bool((share == 1).all()) for share in shares):
        return None
    return {
        key.replace(_NEW, "positions."): tensor
        for key, tensor in state.items()
        if _OLD not in key and not key.endswith(_SHARE)
    }
