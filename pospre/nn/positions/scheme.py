"""The interface of position schemes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from inspect import signature
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.places import Places

Rotation = tuple[Tensor, Tensor]
TimmKind = Literal["vit", "relpos", "shared_relpos", "eva"]
Resampling = Literal["bicubic", "bilinear", "antialiased", "offset"]
"""How a table is resampled to another grid.

``bicubic``, ``bilinear``: at the centres of the new cells (MAE, DeiT, ours). ``antialiased``: the
same with a wider kernel when downsampling (timm's ``resample_abs_pos_embed``, DINOv2 with
registers). ``offset``: with cells as wide as if there were 0.1 more of them (DINO, iBOT, DINOv2).
"""


class PositionTerms(NamedTuple):
    """Positional inputs of one block's attention.

    T counts all tokens; the P prefix tokens come first. Dimensions of size 1 are broadcast.

    Attributes:
        rotation: cosines and sines (R, heads, T, D/2) of the rotation angles of queries and keys,
            for heads of width D: channel i is rotated together with channel i + D/2.
        bias: (R, heads, T, keys), added to the logits; rows are queries.
    """

    rotation: Rotation | None = None
    bias: Tensor | None = None

    def first(self, count: int | None) -> Rotation | None:
        """Return the rotation of the first ``count`` tokens; None: of all tokens."""
        if self.rotation is None or count is None:
            return self.rotation
        cos, sin = self.rotation
        return cos[:, :, :count], sin[:, :, :count]

    def plus(self, bias: Tensor) -> "PositionTerms":
        """Return the terms with a further bias, broadcast like ``bias``."""
        return self._replace(bias=bias if self.bias is None else self.bias + bias)

    def ordered(self, order_BT: Tensor, num_keys: int) -> "PositionTerms":
        """Return the terms for tokens in another order, the first ``num_keys`` as keys."""
        rotation, bias = self.rotation, self.bias
        if rotation is not None:
            rotation = _in_order(rotation[0], order_BT, 2), _in_order(rotation[1], order_BT, 2)
        if bias is not None:
            bias = _in_order(_in_order(bias, order_BT[:, :num_keys], 3), order_BT, 2)
        return PositionTerms(rotation, bias)


def _in_order(part_RHTX: Tensor, index_BK: Tensor, dim: int) -> Tensor:
    """Return the entries of dimension 2 or 3 at the indices of each row."""
    part = part_RHTX.expand(len(index_BK), -1, -1, -1)
    shape = list(part.shape)
    shape[dim] = index_BK.shape[1]
    index = index_BK[:, None, :, None] if dim == 2 else index_BK[:, None, None]
    return part.gather(dim, index.expand(shape))


class TransformerDims(NamedTuple):
    """The encoder or decoder that a scheme is made for.

    Attributes:
        grid: (rows, columns) of patches at the usual image size.
        has_class_token: whether the first prefix token is a class token.
    """

    dim: int
    num_heads: int
    depth: int
    grid: tuple[int, int]
    has_class_token: bool = False
    num_registers: int = 0

    @property
    def num_prefix(self) -> int:
        """Number of prefix tokens: class token and registers."""
        return self.has_class_token + self.num_registers

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads


@dataclass(eq=False, repr=False)
class Scheme(nn.Module):
    """A position scheme. Subclasses implement one or more of three methods.

    ``embed`` is added to the tokens before the first block. ``angles`` rotate the queries and keys
    of a block, and ``distances`` are added to its attention logits. A forgotten place uses none of
    them: its token gets ``places.mark`` instead of an embedding, angle 0, and bias 0 to and from
    all tokens. Prefix tokens have angle 0 and bias 0 unless a scheme documents otherwise.

    The constructor takes a ``TransformerDims`` and the scheme's own options as keywords: the fields
    of a subclass that is a dataclass itself. It does not call ``reset_parameters``, which
    initialises the parameters.

    Attributes:
        takes_any_grid: supports image sizes other than the encoder's.
        takes_boxes: supports views anywhere in the frame; otherwise only whole cells of its grid.
        can_forget: places can be hidden from it.
        shares_terms: all blocks get the same terms.
        in_decoders: a decoder uses the same scheme; otherwise sin-cos.
        is_drawn: places are augmented in training, with ``places.keys``.
        is_added: only adds vectors to tokens; blocks get no terms.
        timm: the kind of timm model with this scheme, for export: ``vit``, ``relpos``,
            ``shared_relpos`` or ``eva``; None: timm has none.
        takes_registers: supports registers.
        is_cyclic: no place is absolute: of an image that is shifted around by whole patches, the
            features are shifted as much.
        learns: has a learned table, which ``enlarge`` moves to another grid.
        inputs: names of the parameters that are added to tokens.
        undecayed: names of the parameters without weight decay.
        can_fit: ``fit`` can set its biases, with the options ``fit_needs``.
        name: the scheme's name in recipes; ``options`` are those that differ from the defaults.
    """

    dims: TransformerDims
    _: KW_ONLY
    options: Mapping[str, Any] = field(default_factory=dict, init=False)

    name = ""
    is_drawn = False
    shares_terms = True

    takes_any_grid: ClassVar[bool] = True
    takes_boxes: ClassVar[bool] = True
    can_forget: ClassVar[bool] = True
    is_added: ClassVar[bool] = False
    in_decoders: ClassVar[bool] = False
    timm: ClassVar[TimmKind | None] = None
    takes_registers: ClassVar[bool] = True
    is_cyclic: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    inputs: ClassVar[tuple[str, ...]] = ()
    undecayed: ClassVar[tuple[str, ...]] = ()
    can_fit: ClassVar[bool] = False
    fit_needs: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    def __post_init__(self) -> None:
        super().__init__()

    def reset_parameters(self) -> None:
        """Initialise the parameters and compute the buffers; the base class has none."""
        return

    def as_given(self) -> str | dict[str, Any]:
        """Return the recipe's form: its name, or ``{name: its options}``."""
        return {self.name: {**self.options}} if self.options else self.name

    def companion(self, dims: TransformerDims) -> "Scheme | None":
        """Return the scheme of a decoder whose tokens have the same places; None: sin-cos.

        It gets the same options, which are attributes of the same names.
        """
        if not self.in_decoders:
            return None
        options = [name for name in signature(type(self)).parameters if name != "dims"]
        return type(self)(dims, **{name: getattr(self, name) for name in options})

    def embed(self, places: Places) -> Tensor | None:
        """Return the vectors (R, K, dim) to add to patch tokens with known places, or None."""
        return None

    def vectors(self) -> Tensor | None:
        """Return the table that ``embed`` reads, (rows, columns, dim); None: no table."""
        return None

    def exported(self, grid: tuple[int, int]) -> dict[str, Tensor]:
        """Return the position tensors of timm's model for images of ``grid``."""
        return {}

    def enlarge(self, grid: tuple[int, int], *, resampling: Resampling) -> None:
        """Move a learned table to another grid; see ``Table.enlarge``."""
        return

    def prefix(self) -> Tensor | None:
        """Return the vectors (1, P, dim) to add to prefix tokens; None: no vectors."""
        return None

    def angles(self, places: Places, layer: int) -> Tensor | None:
        """Return the angles (R, heads or 1, K, D/2) of patch tokens in block ``layer``, from 0."""
        return None

    def distances(self, places: Places, layer: int) -> Tensor | None:
        """Return the bias (R, heads, T, T) of block ``layer``, as if all places were known."""
        return None

    def fit(self, logits_HNN: Tensor, layer: int, grid: tuple[int, int]) -> None:
        """Set the bias of block ``layer`` to what is closest to ``centred`` logits of patches."""
        raise NotImplementedError

    def check(self, places: Places) -> None:
        """Raise ``UserError`` for places that do not exist, or that this scheme cannot take."""
        places.check()
        if places.grid != self.dims.grid and not self.takes_any_grid:
            rows, cols = self.dims.grid
            raise UserError(
                f"encoder.positions = {self.name} supports only images of {rows}×{cols} patches, "
                f"but got {places.grid[0]}×{places.grid[1]}. Use sincos, learned or rotary."
            )
        if places.box is not None and not self.takes_boxes:
            raise UserError(
                f"encoder.positions = {self.name} supports only whole cells of its grid, but views "
                "may lie anywhere in their image. Use sincos, learned or rotary."
            )

    def added(self, tokens_RKD: Tensor, places: Places) -> Tensor:
        """Return the tokens with their places added; a forgotten one has ``places.mark``."""
        vectors, known = self.embed(places), places.known
        if known is None:
            return tokens_RKD if vectors is None else tokens_RKD + vectors
        vectors = tokens_RKD.new_zeros(1) if vectors is None else vectors
        mark = vectors.new_zeros(1) if places.mark is None else places.mark
        return tokens_RKD + torch.where(known.unsqueeze(-1), vectors, mark)

    def layer_terms(self, places: Places) -> Iterator[PositionTerms]:
        """Yield the terms of each block."""
        terms = PositionTerms()
        for layer in range(self.dims.depth):
            if layer == 0 or not self.shares_terms:
                terms = self.terms_of(
                    places, self.angles(places, layer), self.distances(places, layer)
                )
            yield terms

    def terms_of(self, places: Places, angles: Tensor | None, bias: Tensor | None) -> PositionTerms:
        """Return the terms of one block, with forgotten places blanked."""
        known, num_prefix = places.known, self.dims.num_prefix
        rotation = None
        if angles is not None:
            if known is not None:
                angles = angles * known[:, None, :, None]
            angles = nn.functional.pad(angles, (0, 0, num_prefix, 0))
            rotation = angles.cos(), angles.sin()
        if bias is not None and known is not None:
            is_known = nn.functional.pad(known, (num_prefix, 0), value=True)
            bias = torch.where(is_known[:, None, :, None] & is_known[:, None, None, :], bias, 0)
        return PositionTerms(rotation, bias)


def centred(logits: Tensor) -> Tensor:
    """Return logits (…, queries, keys) whose rows and columns have mean 0.

    The softmax ignores a row's constant; a column's is no relation of two places.
    """
    rows = logits - logits.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def in_order(
    layer_terms: Iterable[PositionTerms], order_BT: Tensor, num_keys: int
) -> Iterator[PositionTerms]:
    """Yield ``PositionTerms.ordered`` of each block's terms; shared ones stay shared."""
    given, ordered = None, PositionTerms()
    for terms in layer_terms:
        if terms is not given:
            given, ordered = terms, terms.ordered(order_BT, num_keys)
        yield ordered


def rotate(tokens_BHTD: Tensor, rotation: Rotation) -> Tensor:
    """Rotate channel i of every token together with channel i + D/2, at least in float32."""
    low, high = tokens_BHTD.to(torch.promote_types(tokens_BHTD.dtype, torch.float32)).chunk(2, -1)
    cos, sin = rotation
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(tokens_BHTD.dtype)
