"""The transformer's block, pre-norm attention and MLP under timm's names, and a decoder of blocks.

Stochastic depth and dropout are drawn per sample: a resumed run repeats the same draws.
"""

from collections.abc import Iterable
from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import LayerScale, get_act_layer
from torch import Tensor, nn

from pospre import draws
from pospre.nn.positions.scheme import PositionTerms, rotate
from pospre.nn.projections import UnbiasedKeys, is_plain
from pospre.nn.sizes import EncoderSize
from pospre.portable_math import chain

NO_TERMS = PositionTerms()
_DROPOUT = draws.start_word(0, "dropout")
_LEVELS, _DRAWS_PER_WORD = 1 << 16, 4


class Attention(nn.Module):
    """Multi-head attention whose keys and values may come from the first tokens only."""

    def __init__(self, size: EncoderSize) -> None:
        super().__init__()
        dim, self.num_heads = size.embed_dim, size.num_heads
        self.head_dim = dim // size.num_heads
        projection = nn.Linear if size.key_bias else UnbiasedKeys
        self.qkv = projection(dim, 3 * dim, bias=size.qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_dim, size.eps) if size.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim, size.eps) if size.qk_norm else nn.Identity()
        self.proj = nn.Linear(dim, dim)

    def forward(
        self,
        x_BTD: Tensor,
        terms: PositionTerms = NO_TERMS,
        num_keys: int | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Attend from all or the first tokens to all or the first tokens.

        Args:
            x_BTD: tokens.
            terms: rotation and bias from the tokens' positions.
            num_keys: only the first ``num_keys`` tokens give keys and values; None: all tokens.
                Others are not projected, which saves compute (unless ``qkv`` was replaced).
            num_queries: only the first ``num_queries`` tokens attend; None: all tokens. Others are
                not returned.
        """
        query, key, value = self._heads(x_BTD, terms, num_keys, num_queries)
        mask = terms.bias
        if mask is not None:
            mask = (mask if num_queries is None else mask[:, :, :num_queries]).to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def weights(self, x_BTD: Tensor, terms: PositionTerms = NO_TERMS) -> Tensor:
        """Return the attention weights (B, heads, T, T); rows sum to 1."""
        return self.logits(x_BTD, terms).softmax(dim=-1)

    def logits(self, x_BTD: Tensor, terms: PositionTerms = NO_TERMS) -> Tensor:
        """Return the logits (B, heads, T, T) of attention, with the bias of positions."""
        query, key, _ = self._heads(x_BTD, terms, None, None)
        logits = query @ key.transpose(-2, -1) / self.head_dim**0.5
        return logits if terms.bias is None else logits + terms.bias

    def _heads(
        self, x_BTD: Tensor, terms: PositionTerms, num_keys: int | None, num_queries: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, keys and values: (B, heads, tokens, width) each."""
        query, key, value = (
            part.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in self._project(x_BTD, num_keys, num_queries)
        )
        query, key = self.q_norm(query), self.k_norm(key)
        query_rotation, key_rotation = terms.first(num_queries), terms.first(num_keys)
        if query_rotation is not None and key_rotation is not None:
            query = rotate(query, query_rotation).to(value.dtype)
            key = rotate(key, key_rotation).to(value.dtype)
        return query, key, value

    def _project(
        self, x_BTD: Tensor, num_keys: int | None, num_queries: int | None
    ) -> tuple[Tensor, ...]:
        """Return the queries, keys and values of the tokens that need them.

        A projection that has been changed, such as by LoRA, is computed for all tokens.
        """
        if (num_keys is None and num_queries is None) or not is_plain(self.qkv):
            query, key, value = self.qkv(x_BTD).chunk(3, dim=-1)
            return first(query, num_queries), first(key, num_keys), first(value, num_keys)
        weight, dim = self.qkv.weight, x_BTD.shape[-1]
        bias = self.qkv.used_bias() if isinstance(self.qkv, UnbiasedKeys) else self.qkv.bias
        asking, asked = first(x_BTD, num_queries), first(x_BTD, num_keys)
        query = F.linear(asking, weight[:dim], None if bias is None else bias[:dim])
        pair = F.linear(asked, weight[dim:], None if bias is None else bias[dim:])
        return (query, *pair.chunk(2, dim=-1))


class Mlp(nn.Module):
    """A two-layer MLP, or SwiGLU: the second layer gets SiLU(gate) · value of the first."""

    def __init__(self, size: EncoderSize, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.gated, inner = size.swiglu, size.hidden_dim // 2 if size.swiglu else size.hidden_dim
        self.fc1 = nn.Linear(size.embed_dim, size.hidden_dim)
        self.act = get_act_layer("silu" if size.swiglu else size.activation)()
        self.norm = nn.LayerNorm(inner, size.eps) if size.mlp_norm else nn.Identity()
        self.fc2 = nn.Linear(inner, size.embed_dim)

    def forward(self, x_BTD: Tensor, dropout_B: Tensor | None = None) -> Tensor:
        """Return tokens; ``dropout_B`` are draw keys of dropout within (None: no dropout)."""
        if self.gated:
            gate, value = self.fc1(x_BTD).chunk(2, dim=-1)
            hidden = self.act(gate) * value
        else:
            hidden = self.act(self.fc1(x_BTD))
        return self.fc2(dropout(self.norm(hidden), dropout_B, self.dropout, index=1))


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)).

    ``layer_scale`` is the initial factor of both branches, learned per channel (None: no factor),
    ``dropout`` the rate after projections.
    """

    def __init__(
        self, size: EncoderSize, *, layer_scale: float | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.dropout, dim = dropout, size.embed_dim
        self.norm1 = nn.LayerNorm(dim, size.eps)
        self.attn = Attention(size)
        self.ls1 = LayerScale(dim, layer_scale) if layer_scale is not None else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, size.eps)
        self.mlp = Mlp(size, dropout)
        self.ls2 = LayerScale(dim, layer_scale) if layer_scale is not None else nn.Identity()

    def forward(
        self,
        x_BTD: Tensor,
        terms: PositionTerms = NO_TERMS,
        num_keys: int | None = None,
        branch_B2: Tensor | None = None,
        num_queries: int | None = None,
        dropout_B: Tensor | None = None,
    ) -> Tensor:
        """Return all tokens, or the first ``num_queries``, in the input's precision.

        ``branch_B2`` are factors of the two residual branches (drop path; None: 1), ``dropout_B``
        draw keys of dropout (None: no dropout). For the others see ``Attention``. In half precision
        each sum is rounded to it.
        """
        drop = partial(dropout, keys_B=dropout_B, rate=self.dropout)
        mixed = self.attn(self.norm1(x_BTD), terms, num_keys, num_queries)
        attended = self.ls1(drop(mixed, index=0))
        attended = attended if branch_B2 is None else attended * branch_B2[:, :1, None]
        x_BTD = (first(x_BTD, num_queries) + attended).to(x_BTD.dtype)
        inner = () if dropout_B is None else (dropout_B,)  # else what replaces it gets tokens only
        mixed = self.ls2(drop(self.mlp(self.norm2(x_BTD), *inner), index=2))
        mixed = mixed if branch_B2 is None else mixed * branch_B2[:, 1:, None]
        return (x_BTD + mixed).to(x_BTD.dtype)


class CrossBlock(nn.Module):
    """x + attention(norm(x) to norm(context)), then x + MLP(norm(x)): tokens do not mix."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        size = EncoderSize("", 1, dim, 1, num_heads, activation="gelu_tanh")
        self.num_heads = num_heads
        self.norm_query, self.norm_context = (nn.LayerNorm(dim, size.eps) for _ in range(2))
        self.query, self.key_value = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim, size.eps)
        self.mlp = Mlp(size)

    def forward(self, x_BTD: Tensor, context_BMD: Tensor) -> Tensor:
        """Return the tokens (B, T, D); the context (B, M, D) gives keys and values."""
        key, value = self.key_value(self.norm_context(context_BMD)).chunk(2, dim=-1)
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in (self.query(self.norm_query(x_BTD)), key, value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value)
        x_BTD = x_BTD + self.proj(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.mlp(self.norm(x_BTD))


class DecoderBlocks(nn.Sequential):
    """A narrow transformer for predictions: MLP ratio 4, qkv bias, LayerNorm eps 1e-6."""

    def __init__(self, dim: int, depth: int, num_heads: int) -> None:
        size = EncoderSize("", 1, dim, depth, num_heads)  # no timm model, no patches
        super().__init__(*(Block(size) for _ in range(depth)))

    def forward(
        self, tokens_BTD: Tensor, layer_terms: Iterable[PositionTerms] | None = None
    ) -> Tensor:
        """Return the tokens after all blocks; ``layer_terms`` are each block's."""
        if layer_terms is None:
            layer_terms = [NO_TERMS] * len(self)
        for block, terms in zip(self, layer_terms, strict=True):
            tokens_BTD = block(tokens_BTD, terms)
        return tokens_BTD


def first(x_BTD: Tensor, count: int | None) -> Tensor:
    """Return the first ``count`` tokens; None: all of them.

    Slicing all tokens would cost a copy and an addition in the backward pass.
    """
    return x_BTD if count is None else x_BTD[:, :count]


def residual_factors(
    keys_B: Tensor | None, rate: float, depth: int, *, uniform: bool = False
) -> list[Tensor | None]:
    """Return the factors (B, 2) of each block's two branches: 0 or 1/(1 − the block's rate).

    ``keys_B`` are int64 draw keys of the samples; None: nothing is dropped. The rate grows linearly
    from 0 in the first block to ``rate`` in the last (Huang et al. 2016), or is the same in all
    blocks if ``uniform`` (DINOv2).
    """
    if keys_B is None or not rate:
        return [None] * depth
    draw = draws.uniform(keys_B, 2 * depth).unflatten(1, (depth, 2))
    shares = [1.0 if uniform else block / max(depth - 1, 1) for block in range(depth)]
    rates = [rate * share for share in shares]
    return [(draw[:, i] >= dropped) / (1 - dropped) for i, dropped in enumerate(rates)]


def dropout_keys(keys_B: Tensor | None, number: int) -> Tensor | None:
    """Return dropout's draw keys in block ``number`` (from 1; 0 is the position embedding)."""
    return None if keys_B is None else chain(chain(keys_B, _DROPOUT), number)


def dropout(tokens: Tensor, keys_B: Tensor | None, rate: float, index: int) -> Tensor:
    """Set elements of (B, …) to 0 at the rate, and scale the others up (Srivastava et al. 2014).

    The rate, in [0, 1), is rounded to 2**-16. ``index`` numbers the dropouts with the same keys.
    With keys None nothing is dropped.
    """
    if keys_B is None or not rate:
        return tokens
    count = tokens[0].numel()
    words = draws.bits(chain(keys_B, index), -(-count // _DRAWS_PER_WORD))
    levels = min(round(rate * _LEVELS), _LEVELS - 1)
    # a word holds four draws, as int16 from −2**15 on
    kept = words.view(torch.int16)[:, :count] >= levels - _LEVELS // 2
    return tokens * kept.view_as(tokens) * (_LEVELS / (_LEVELS - levels))
