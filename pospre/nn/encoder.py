"""The Vision Transformer encoder: timm's weights and names, run over the tokens that matter."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import LayerNorm, Mlp, RelPosBias, SwiGLUPacked
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.attention import EncoderBlock
from pospre.nn.drop_path import dropout, dropout_keys, residual_factors
from pospre.nn.initialisation import (
    init_beit,
    init_patch_embed,
    init_token,
    init_trunc_normal,
    init_weights,
)
from pospre.nn.patch_encoder import Edit, PatchEncoder
from pospre.nn.positions import Resampling, resample_positions, sincos_table
from pospre.nn.sizes import EncoderSize, timm_model
from pospre.nn.timm_methods import TimmMethods
from pospre.recipe.values import RELATIVE, Init, PositionKind

TABLES = ("sincos", "learned", "learned_sincos")
"""The kinds of positions that are a table."""


class Encoder(TimmMethods, PatchEncoder):
    """A ViT without head whose forward takes kept tokens, context tokens and per-sample positions.

    Its parameters carry timm's names, so that its ``state_dict`` is a timm checkpoint as it stands
    (with relative positions: one of timm's ``vit_relpos`` names).

    Attributes:
        table_grid: (rows, columns) of the position table. It is read once for each other grid.
        resampling: how it is read then.
    """

    table_grid: tuple[int, int]
    resampling: Resampling = "bicubic"
    cls_token: nn.Parameter | None
    pos_embed: nn.Parameter | None

    def __init__(
        self,
        size: EncoderSize,
        *,
        image_size: tuple[int, int],
        patch_size: tuple[int, int],
        depth: int,
        channels: int = 3,
        positions: PositionKind = "sincos",
        class_token: bool = True,
        num_registers: int = 0,
        layer_scale: float | None = None,
        drop_path: float = 0.0,
        uniform_drop_path: bool = False,
        dropout: float = 0.0,
        final_norm: bool = True,
        init: Init = "xavier",
    ) -> None:
        options: dict[str, Any] = {
            "img_size": _side(image_size),
            "patch_size": _side(patch_size),
            "depth": depth,
            "in_chans": channels,
            "class_token": class_token,
            "reg_tokens": num_registers,
            "init_values": layer_scale,
            "final_norm": final_norm,
            "pre_norm": size.pre_norm,
            "qkv_bias": size.qkv_bias,
            "act_layer": size.activation,
            "pos_embed": "learn" if positions in TABLES else "none",
        }
        mlp: Any = SwiGLUPacked if size.swiglu else Mlp
        super().__init__(
            **{**options, "act_layer": "silu" if size.swiglu else size.activation},
            embed_dim=size.embed_dim,
            num_heads=size.num_heads,
            mlp_ratio=size.mlp_ratio,
            proj_drop_rate=dropout,
            num_classes=0,
            global_pool="token" if class_token else "",
            weight_init="skip",
            block_fn=EncoderBlock,
            mlp_layer=mlp,
            norm_layer=partial(LayerNorm, eps=1e-5) if size.pre_norm else LayerNorm,
        )
        self.set_grid(image_size, patch_size)
        self.table_grid = self.grid
        self.channels, self.depth = channels, len(self.blocks)
        self.position_kind = "learned" if positions == "learned_sincos" else positions
        self._drawn_as = positions
        self.drop_path = drop_path
        self.uniform_drop_path, self.dropout = uniform_drop_path, dropout
        self.timm_name, self.timm_kwargs = timm_model(size, options, positions)
        self._add_relative_positions(positions)
        self.init_parameters(init)

    def _add_relative_positions(self, kind: PositionKind) -> None:
        self.shared_rel_pos: RelPosBias | None = None
        prefix = self.num_prefix_tokens
        if kind == "shared_relative":
            heads = self.blocks[0].attn.num_heads
            self.shared_rel_pos = RelPosBias(self.grid, heads, prefix_tokens=prefix)
        elif kind == "relative":
            for block in self.blocks:
                heads = block.attn.num_heads
                block.attn.rel_pos = RelPosBias(self.grid, heads, prefix_tokens=prefix)

    @torch.no_grad()
    def init_parameters(self, init: Init) -> None:
        """Draw all weights anew; see ``build_encoder``."""
        if init == "xavier":
            init_weights(self)
            init_patch_embed(self.patch_embed.proj)
        elif init == "beit":
            init_beit(self.blocks, self)
        else:
            init_trunc_normal(self, convolutions=init == "trunc_normal")
        for token in (self.cls_token, self.reg_token):
            if token is not None:
                init_token(token, std=1e-6 if init == "dinov2" else 0.02, cut=init == "beit")
        for part in self.modules():
            if isinstance(part, RelPosBias):
                nn.init.zeros_(part.relative_position_bias_table)
        if self.pos_embed is None:
            return
        if self._drawn_as == "learned":
            nn.init.trunc_normal_(self.pos_embed, std=0.02)
            self.pos_embed[:, self._register_rows] = 0
            return
        self.pos_embed.requires_grad_(self._drawn_as == "learned_sincos")
        self.pos_embed.zero_()
        self.pos_embed[0, self.num_prefix_tokens :] = sincos_table(self.embed_dim, *self.table_grid)

    def hold_table(self, grid: tuple[int, int]) -> None:
        """Make room for a table of another grid than that of the images."""
        assert self.pos_embed is not None
        shape = 1, self.num_prefix_tokens + grid[0] * grid[1], self.embed_dim
        learns = self.pos_embed.requires_grad
        self.pos_embed = nn.Parameter(self.pos_embed.new_zeros(shape), requires_grad=learns)
        self.table_grid = grid

    def table_at(self, grid: tuple[int, int]) -> Tensor:
        """Return the table of the patches of ``grid``, (N, D), read as its family does."""
        table = self._table
        assert table is not None
        own = table[0, self.num_prefix_tokens :]
        return resample_positions(own, self.table_grid, grid, self.resampling)

    @property
    def _register_rows(self) -> slice:
        """The table's rows of registers: there for timm's sake, they are 0 and do not learn."""
        return slice(int(self.has_class_token), self.num_prefix_tokens)

    @property
    def _table(self) -> Tensor | None:
        """The positions; sin-cos ones learn nothing, whoever lets all parameters take gradients."""
        if self.pos_embed is None or self._drawn_as != "sincos":
            return self.pos_embed
        return self.pos_embed.detach()

    @property
    def is_relative(self) -> bool:
        """Whether attention itself knows positions, so that it needs all tokens."""
        return self.position_kind in RELATIVE

    def forward(
        self,
        images_BCHW: Tensor,
        keep_BK: Tensor | None = None,
        positions: Edit | None = None,
        *,
        content: Edit | None = None,
        context_BM: Tensor | None = None,
        keys_B: Tensor | None = None,
        prefix_only: bool = False,
    ) -> Tensor:
        """Encode the kept patches of normalised images, of any size that the patch divides.

        Args:
            images_BCHW: normalised float images.
            keep_BK: int64 indices of the patches to encode, in output order; None takes all.
            positions: maps the positions (B, K, D) of those patches (zeros without positions) to
                the ones to add; None adds the table's.
            content: edits the embeddings (B, K, D) of those patches before positions are added.
            context_BM: int64 indices, among the K patches, of those that give keys and values in
                every layer; prefix tokens always do. None: all.
            keys_B: int64 draw keys of drop path and dropout; None drops nothing.
            prefix_only: return the prefix tokens alone; the last block then computes no others.

        Returns:
            (B, P+K, D) tokens after the final norm (if there is one), the P prefix tokens first;
            or these only.

        Raises:
            UserError: another module gives the positions, and they are not given here.
        """
        if positions is None and self.positions_from is not None:
            raise UserError(
                f"{self.positions_from} gives this encoder's positions, and its own table is "
                "empty: take model.tokens(images) of the whole PretrainModel."
            )
        tokens = self._embed(images_BCHW, keep_BK)
        if content is not None:
            tokens = content(tokens)
        grid = self.grid_of(*images_BCHW.shape[-2:])
        if self.pos_embed is not None or positions is not None:
            position_BKD = self._positions(tokens, keep_BK, grid)
            tokens = tokens + (position_BKD if positions is None else positions(position_BKD))
        # under autocast the sum is float32, and so is the residual stream, as in the published code
        tokens = self.norm_pre(torch.cat([*self._prefix(len(tokens)), tokens], dim=1))
        dropping_B = keys_B if self.dropout else None  # a key is 18 kernels
        tokens = dropout(tokens, dropout_keys(dropping_B, 0), self.dropout, place=0)
        context_BM = self._with_prefix(context_BM)
        bias = None if self.shared_rel_pos is None else self.shared_rel_pos.get_bias()
        branches = residual_factors(
            keys_B, self.drop_path, self.depth, uniform=self.uniform_drop_path
        )
        for number, (block, branch) in enumerate(zip(self.blocks, branches, strict=True), start=1):
            is_last = number == self.depth
            num_queries = self.num_prefix_tokens if prefix_only and is_last else None
            dropout_B = dropout_keys(dropping_B, number)
            tokens = block(tokens, bias, context_BM, branch, num_queries, dropout_B)
        return self.norm(tokens)

    def _positions(
        self, tokens_BKD: Tensor, keep_BK: Tensor | None, grid: tuple[int, int]
    ) -> Tensor:
        """Return the table's positions of the tokens, (B, K, D)."""
        if self.pos_embed is None:
            return torch.zeros_like(tokens_BKD)
        table = self.table_at(grid)
        return table.expand_as(tokens_BKD) if keep_BK is None else table[keep_BK]

    def _prefix(self, num: int) -> list[Tensor]:
        """Return the class token, with its position, and the registers."""
        tokens: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        if not tokens:
            return []
        prefix = torch.cat(tokens, dim=1)
        table = self._table
        if table is not None:
            registers = table[:, self._register_rows].detach()
            own = table[:, : int(self.has_class_token)]
            prefix = prefix + torch.cat([own, registers], dim=1)
        return [prefix.expand(num, -1, -1)]

    def _with_prefix(self, context_BM: Tensor | None) -> Tensor | None:
        """Return the context's indices among all tokens, prefix tokens included."""
        if context_BM is None or not self.num_prefix_tokens:
            return context_BM
        prefix = torch.arange(self.num_prefix_tokens, device=context_BM.device)
        prefix = prefix.expand(len(context_BM), -1)
        return torch.cat([prefix, context_BM + self.num_prefix_tokens], dim=1)

    def _embed(self, images_BCHW: Tensor, keep_BK: Tensor | None) -> Tensor:
        """Embed only the kept patches: (B, K, D)."""
        projection = self.patch_embed.proj
        kept = self.pixels(images_BCHW, keep_BK).flatten(2)
        kept = kept.to(projection.weight.dtype)  # as .half() has made the weights
        return F.linear(kept, projection.weight.flatten(1), projection.bias)

    def timm_state(
        self, vit: nn.Module | None = None, positions: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the weights as timm's model of ``timm_name`` takes them, every one.

        Args:
            vit: the timm model, wrapped before by ``wrap_encoder``, that shall load them. Some have
                no positions for class token and registers: these are added to the tokens.
            positions: a table (1, P+N, D) in place of the encoder's own.

        Raises:
            UserError: another module gives the positions, and they are not given here.
        """
        state = {key: value.contiguous() for key, value in self.state_dict().items()}
        if positions is not None:
            state["pos_embed"] = positions
        elif self.positions_from is not None:
            raise UserError(
                f"{self.positions_from} gives this encoder's positions, and its own table is "
                "empty: take model.timm_state(vit) of the whole PretrainModel."
            )
        elif self.table_grid != self.grid:
            prefix = state["pos_embed"][:, : self.num_prefix_tokens]
            state["pos_embed"] = torch.cat([prefix, self.table_at(self.grid)[None]], dim=1)
        if self.position_kind == "none":
            # timm leaves the class token out where there is no table: one of zeros adds nothing
            length = self.num_prefix_tokens + self.num_patches
            state["pos_embed"] = self.patch_embed.proj.weight.new_zeros(1, length, self.embed_dim)
        theirs = None if vit is None else vit.state_dict().get("pos_embed")
        if theirs is not None and theirs.shape[1] < state["pos_embed"].shape[1]:
            prefix, state["pos_embed"] = state["pos_embed"].tensor_split(
                [self.num_prefix_tokens], dim=1
            )
            own = int(self.has_class_token)
            for key, rows in (("cls_token", prefix[:, :own]), ("reg_token", prefix[:, own:])):
                if key in state:
                    state[key] = state[key] + rows
        return state

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Tell Composer's FSDP2 to shard block by block."""
        return isinstance(module, EncoderBlock)


def _side(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size
