"""Window attention with a bias from a small network of the offset between two tokens.

The offset is between the tokens' true places (Liu et al. 2022, Swin v2), so the network works for
any window. Pre-trained with windows of 8, it is fine-tuned with windows of 16 unchanged (Li et al.
2022, UM-MAE). Pairs with an unknown place have bias 0. For whole images the bias is computed as a
table, as in timm.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class OffsetBias(nn.Module):
    """An attention bias by the offset between two tokens: a two-layer network."""

    def __init__(self, num_heads: int, hidden: int = 256) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, hidden)
        self.fc2 = nn.Linear(hidden, num_heads, bias=False)

    def forward(self, reach: int) -> Tensor:
        """Return the biases ((2·reach − 1)², heads) of offsets below ``reach``, row-major."""
        steps = torch.arange(1 - reach, reach, device=self.fc1.weight.device)
        # log-spaced offsets resolve near tokens better than far ones
        scaled = steps.sign() * (1 + steps.abs().float()).log2() / 3
        rows, cols = torch.meshgrid(scaled, scaled, indexing="ij")
        offsets = torch.stack([rows.flatten(), cols.flatten()], dim=1)
        return self.fc2(F.relu(self.fc1(offsets)))


class WindowAttention(nn.Module):
    """Window attention, with timm's names where both have the same part."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.offset_bias = OffsetBias(num_heads)

    def forward(
        self, tokens_WTC: Tensor, places_WT3: Tensor | None, mask_W1TT: Tensor | None
    ) -> Tensor:
        """Attend within each window.

        Args:
            tokens_WTC: tokens of W windows.
            places_WT3: float (row, column, known) of each token; None: windows of a whole image, in
                order.
            mask_W1TT: −inf between tokens that only a cyclic shift brought together, or None.
        """
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(tokens_WTC).chunk(3, dim=-1)
        )
        if places_WT3 is None:
            bias = self._bias_in_order(round(tokens_WTC.shape[1] ** 0.5))
        else:
            bias = self._bias(places_WT3)
        if mask_W1TT is not None:
            bias = bias + mask_W1TT
        mixed = F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype))
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def _bias(self, places_WT3: Tensor) -> Tensor:
        """Return the bias (W, heads, T, T); 0 for unknown places."""
        reach = self.reach
        place, known = places_WT3[..., :2].long(), places_WT3[..., 2]
        row, col = (place.unsqueeze(2) - place.unsqueeze(1) + reach - 1).unbind(-1)
        table = self.offset_bias(reach)
        both = known.unsqueeze(2) * known.unsqueeze(1)
        return (table[row * (2 * reach - 1) + col] * both.unsqueeze(-1)).permute(0, 3, 1, 2)

    def _bias_in_order(self, window: int) -> Tensor:
        """Return the bias (1, heads, T, T) shared by all windows of a whole image."""
        steps = torch.arange(window, device=self.proj.weight.device)
        apart = steps.unsqueeze(1) - steps + window - 1
        # (row, column, row, column) to two tokens
        index = apart[:, None, :, None] * (2 * window - 1) + apart[None, :, None, :]
        table = self.offset_bias(window)
        return table[index.reshape(window**2, -1)].permute(2, 0, 1).unsqueeze(0)

    reach: int
    """Largest side of a map of this stage, in tokens; set by the encoder."""
