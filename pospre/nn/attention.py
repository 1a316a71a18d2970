"""The encoder's block: timm's weights and names, with context-only keys and relative positions."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import GluMlp, Mlp, RelPosBias
from timm.models.vision_transformer import Attention, Block
from torch import Tensor, nn

from pospre.nn.drop_path import dropout


class EncoderAttention(Attention):
    """timm's attention whose keys and values may come from some of the tokens only.

    Attributes:
        rel_pos: learned bias of this layer by relative position, or None.
    """

    def __init__(self, dim: int, num_heads: int, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.rel_pos: RelPosBias | None = None

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        context_BM: Tensor | None = None,
        num_queries: int | None = None,
    ) -> Tensor:
        """Attend from all tokens, or the first, to all tokens, or to those at ``context_BM``.

        Args:
            x: (B, T, D) tokens.
            attn_mask: added to the attention logits, broadcastable to (B, heads, T, T).
            context_BM: int64 indices of the tokens that give keys and values; only these are
                projected, so that the cost falls with their number.
            num_queries: how many tokens attend, the first; None is all. The others get no result.
        """
        attn_mask = self._with_relative(attn_mask)
        query, key, value = self._heads(x, context_BM, num_queries)
        if attn_mask is not None:
            attn_mask = attn_mask[..., :num_queries, :].to(query.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return how much each token attends to each: (B, heads, T, T), rows that sum to 1."""
        query, key, _ = self._heads(x, None, None)
        logits = query @ key.transpose(-2, -1) / self.head_dim**0.5
        attn_mask = self._with_relative(attn_mask)
        return (logits if attn_mask is None else logits + attn_mask).softmax(dim=-1)

    def _with_relative(self, attn_mask: Tensor | None) -> Tensor | None:
        """Add this layer's bias by relative position, if it has one."""
        if self.rel_pos is None:
            return attn_mask
        bias = self.rel_pos.get_bias()
        return bias if attn_mask is None else attn_mask + bias

    def _heads(
        self, x: Tensor, context_BM: Tensor | None, num_queries: int | None
    ) -> tuple[Tensor, ...]:
        """Return queries, keys and values, (B, heads, tokens, width) each."""
        return tuple(
            part.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in self._project(x, context_BM, num_queries)
        )

    def _project(
        self, x: Tensor, context_BM: Tensor | None, num_queries: int | None
    ) -> tuple[Tensor, ...]:
        """Return queries of the tokens that attend, keys and values of the context."""
        if context_BM is None and num_queries is None:
            return self.qkv(x).chunk(3, dim=-1)
        (dim, bias), context = (x.shape[-1], self.qkv.bias), x
        if context_BM is not None:
            context = torch.gather(x, 1, context_BM.unsqueeze(-1).expand(-1, -1, dim))
        query = F.linear(
            x[:, :num_queries], self.qkv.weight[:dim], None if bias is None else bias[:dim]
        )
        pair = F.linear(context, self.qkv.weight[dim:], None if bias is None else bias[dim:])
        return (query, *pair.chunk(2, dim=-1))


class EncoderBlock(Block):
    """timm's pre-norm block over ``EncoderAttention``; who drops what is decided outside."""

    def __init__(self, dim: int, num_heads: int, *, proj_drop: float = 0.0, **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        self.dropout = proj_drop
        self.attn = EncoderAttention(dim, num_heads, qkv_bias=options.get("qkv_bias", False))
        self.drop_path1, self.drop_path2 = nn.Identity(), nn.Identity()

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        context_BM: Tensor | None = None,
        branch_B2: Tensor | None = None,
        num_queries: int | None = None,
        dropout_B: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens, or the first of them, after attention and MLP.

        Args:
            x: (B, T, D) tokens.
            attn_mask: see ``EncoderAttention``.
            context_BM: see ``EncoderAttention``.
            branch_B2: factors of the two residual branches (drop path); None is 1.
            num_queries: see ``EncoderAttention``.
            dropout_B: draw keys of dropout; None drops nothing.
        """
        drop, mlp = partial(dropout, keys_B=dropout_B, rate=self.dropout), self.mlp
        assert isinstance(mlp, (Mlp, GluMlp))
        mixed = self.attn(self.norm1(x), attn_mask, context_BM, num_queries)
        attended = self.ls1(drop(mixed, place=0))
        x = x[:, :num_queries] + (
            attended if branch_B2 is None else attended * branch_B2[:, :1, None]
        )
        hidden = mlp.fc1(self.norm2(x))
        if isinstance(mlp, GluMlp):
            gate, value = hidden.chunk(2, dim=-1)
            hidden = mlp.act(gate) * value
        else:
            hidden = mlp.act(hidden)
        hidden = drop(hidden, place=1)
        mixed = self.ls2(drop(mlp.fc2(hidden), place=2))
        return x + (mixed if branch_B2 is None else mixed * branch_B2[:, 1:, None])
