"""Attention within the windows of a Swin, and operations on its square maps of tokens."""

import torch
import torch.nn.functional as F
from timm.models.swin_transformer import window_partition
from torch import Tensor, nn


class OffsetBias(nn.Module):
    """An attention bias by the offset between two tokens: a two-layer network."""

    def __init__(self, num_heads: int, hidden: int = 256) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, hidden)
        self.fc2 = nn.Linear(hidden, num_heads, bias=False)

    def forward(self, reach: int, device: torch.device) -> Tensor:
        """Return the biases ((2·reach − 1)², heads) of offsets below ``reach``, row-major."""
        steps = torch.arange(1 - reach, reach, device=device)
        # log-spaced offsets resolve near tokens better than far ones
        scaled = steps.sign() * (1 + steps.abs().float()).log2() / 3
        rows, cols = torch.meshgrid(scaled, scaled, indexing="ij")
        offsets = torch.stack([rows.flatten(), cols.flatten()], dim=1)
        return self.fc2(F.relu(self.fc1(offsets)))


class WindowAttention(nn.Module):
    """Window attention, with timm's names where both have the same part.

    ``reach`` is the largest side of a map, in tokens.
    """

    def __init__(self, dim: int, num_heads: int, reach: int) -> None:
        super().__init__()
        self.num_heads, self.reach = num_heads, reach
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.offset_bias = OffsetBias(num_heads)

    def forward(
        self, tokens_WTC: Tensor, places_WT3: Tensor | None, mask_W1TT: Tensor | None
    ) -> Tensor:
        """Attend within each of W windows.

        ``places_WT3`` are float (row, column, known) of each token; None: windows of a whole image,
        in order. ``mask_W1TT`` is −inf between tokens that only a cyclic shift brought together.
        """
        query, key, value = (
            part.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(tokens_WTC).chunk(3, dim=-1)
        )
        if places_WT3 is None:
            bias = self._bias_in_order(round(tokens_WTC.shape[1] ** 0.5), tokens_WTC.device)
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
        table = self.offset_bias(reach, place.device)
        both = known.unsqueeze(2) * known.unsqueeze(1)
        return (table[row * (2 * reach - 1) + col] * both.unsqueeze(-1)).permute(0, 3, 1, 2)

    def _bias_in_order(self, window: int, device: torch.device) -> Tensor:
        """Return the bias (1, heads, T, T) shared by all windows of a whole image."""
        steps = torch.arange(window, device=device)
        apart = steps.unsqueeze(1) - steps + window - 1
        # (row, column, row, column) to two tokens
        index = apart[:, None, :, None] * (2 * window - 1) + apart[None, :, None, :]
        table = self.offset_bias(window, device)
        return table[index.reshape(window**2, -1)].permute(2, 0, 1).unsqueeze(0)


def shift_mask(side: int, window: int, shift: int) -> Tensor:
    """Return (windows, T, T): −inf between parts of a window that are not neighbours, else 0."""
    steps = torch.arange(side)
    region = (steps >= side - window).long() + (steps >= side - shift).long()
    numbers = (3 * region.unsqueeze(1) + region)[None, :, :, None]
    regions = window_partition(numbers, (window, window)).flatten(1)
    apart = regions.unsqueeze(1) != regions.unsqueeze(2)
    return torch.zeros(apart.shape).masked_fill(apart, -torch.inf)


def spread(parts_BKSSC: Tensor, side: int) -> Tensor:
    """Arrange K = side² patches of S×S tokens as a map: (B, side·S, side·S, C)."""
    rows = parts_BKSSC.unflatten(1, (side, side)).transpose(2, 3)
    return rows.flatten(3, 4).flatten(1, 2)


def inner_places(places_BK3: Tensor, per_side: int) -> Tensor:
    """Return the places of the tokens within patches: (B, K, S, S, 3)."""
    steps = torch.arange(per_side, device=places_BK3.device, dtype=places_BK3.dtype)
    row, col = torch.meshgrid(steps, steps, indexing="ij")
    inner = torch.stack([row, col, torch.zeros_like(row)], dim=-1)
    known = places_BK3[..., 2:]
    scale = places_BK3.new_tensor([per_side, per_side, 1])
    return (places_BK3 * scale)[:, :, None, None] + inner * known[:, :, None, None]


def merged_places(map_BHW3: Tensor) -> Tensor:
    """Return the places after 2×2 merging; known if all four are known and form one square."""
    four = window_partition(map_BHW3, (2, 2)).flatten(1, 2)
    cell = (four[..., :2] / 2).floor()
    together = (cell == cell[:, :1]).all(-1).all(-1) & (four[..., 2] > 0).all(-1)
    merged = torch.cat([cell[:, 0], torch.ones_like(cell[:, 0, :1])], dim=-1)
    side = map_BHW3.shape[1] // 2
    return (merged * together.unsqueeze(-1)).view(-1, side, side, 3)
