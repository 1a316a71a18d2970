"""The Vision Transformer: patches, prefix tokens and blocks, computed for kept tokens only."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.nn.block import Block, dropout, dropout_keys, residual_factors
from pospre.nn.encoder_interface import Edit, PatchEncoder
from pospre.nn.encoder_options import EncoderOptions, Init
from pospre.nn.initialisation import (
    init_beit,
    init_patch_embed,
    init_token,
    init_trunc_normal,
    init_weights,
)
from pospre.nn.masking import gather_tokens, others
from pospre.nn.places import Places
from pospre.nn.positions import build_positions, schemes_that
from pospre.nn.positions.fading import Fading
from pospre.nn.positions.foreign import as_their_table
from pospre.nn.positions.scheme import PositionTerms, TransformerDims, in_order
from pospre.nn.projections import PatchConv, check_parts, parts_of
from pospre.nn.sizes import EncoderSize, pair, timm_model
from pospre.nn.weights.names import timm_name
from pospre.nn.weights.timm_eva import eva_model, eva_state, is_eva, odd_option

_GATE = -5.0  # logit: new registers get e⁻⁵ of a patch's attention at first


class PatchEmbed(nn.Module):
    """Patch embedding: timm's convolution, applied only to the kept patches."""

    def __init__(self, channels: int, dim: int, patch_size: tuple[int, int], *, bias: bool) -> None:
        super().__init__()
        self.proj = PatchConv(channels, dim, patch_size, patch_size, bias=bias)

    def forward(self, pixels_BKCHW: Tensor) -> Tensor:
        """Return the embeddings (B, K, D) of patches."""
        embedded = self.proj(pixels_BKCHW.flatten(0, 1)).flatten(1)
        return embedded.unflatten(0, (-1, pixels_BKCHW.shape[1]))


class Encoder(PatchEncoder):
    """A ViT without head whose forward takes kept tokens, context tokens and places.

    Parameters have timm's names, except those of the position scheme.

    Attributes:
        half_residual: under autocast, keep tokens between blocks in bf16 instead of float32. It
            moves fewer bytes and rounds differently.
    """

    half_residual: bool = False

    def __init__(self, size: EncoderSize, options: EncoderOptions) -> None:
        super().__init__()
        self.options = options
        dim, depth = size.embed_dim, options.depth or size.depth
        class_token, num_registers = options.class_token, options.num_registers
        self.set_grid(pair(options.image_size), pair(options.patch_size or size.patch_size))
        self.channels, self.depth = options.channels, depth
        self.embed_dim = self.patch_dim = dim
        self.drop_path, self.uniform_drop_path = options.drop_path, options.uniform_drop_path
        self.dropout, self.layer_scale = options.dropout, options.layer_scale
        self.has_class_token = class_token
        self.num_prefix_tokens = class_token + num_registers
        self.patch_embed = PatchEmbed(self.channels, dim, self.patch_size, bias=not size.pre_norm)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if class_token else None
        self.reg_token = nn.Parameter(torch.zeros(1, num_registers, dim)) if num_registers else None
        self.gated = options.gated_registers
        self.register_gate = nn.Parameter(torch.empty(depth)) if self.gated else None
        dims = TransformerDims(dim, size.num_heads, depth, self.grid, class_token, num_registers)
        self.positions = build_positions(options.positions, dims)
        if options.fades_from is not None:
            old = build_positions(options.fades_from, dims)
            self.positions = Fading(dims, old, self.positions)
        self.norm_pre = nn.LayerNorm(dim, size.eps) if size.pre_norm else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(size, layer_scale=options.layer_scale, dropout=options.dropout)
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(dim, size.eps) if options.final_norm else nn.Identity()
        self.size = size
        self.init_parameters(options.init)
        self.built = parts_of(self)

    @torch.no_grad()
    def init_parameters(self, init: Init) -> None:
        """Reinitialise all weights; see ``build_encoder``."""
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
        if self.register_gate is not None:
            nn.init.constant_(self.register_gate, _GATE)
        self.positions.reset_parameters()

    def forward(
        self,
        images_BCHW: Tensor,
        visible_BK: Tensor | None = None,
        places: Places | None = None,
        *,
        content: Edit | None = None,
        context_BM: Tensor | None = None,
        keys_B: Tensor | None = None,
        prefix_only: bool = False,
        layers: Sequence[int] | None = None,
    ) -> Tensor | list[Tensor]:
        """Encode the visible patches of normalised images, whose sides the patch size divides.

        Args:
            images_BCHW: normalised float images.
            visible_BK: int64 indices of the patches to encode, in output order; None: all.
            places: of those patches; None: their places in the image.
            content: edits the embeddings (B, K, D) of those patches before positions are added.
            context_BM: int64 indices, among the K patches, of those that give keys and values in
                every layer; prefix tokens always do. None: all.
            keys_B: int64 draw keys of drop path and dropout; None: nothing is dropped.
            prefix_only: return only the prefix tokens; the last block then skips the others.
            layers: return a list of the tokens after each of these blocks instead, before the final
                norm; 0 is the input of the first block, 1 its output.

        Returns:
            (B, P+K, D) tokens after the final norm, if any; the P prefix tokens come first. With
            ``prefix_only`` these alone.

        Raises:
            UserError: the position scheme does not take such images, or a layer does not exist.
        """
        wrong = [layer for layer in layers or () if layer not in range(self.depth + 1)]
        if wrong:
            raise UserError(
                f"layer {wrong[0]!r}, but the encoder has {self.depth} blocks. Give numbers from 0 "
                f"(the input of the first) to {self.depth} (the output of the last)."
            )
        if places is None:
            places = self.places_of(images_BCHW, visible_BK)
        self.positions.check(places)
        tokens = self.patch_embed(self.pixels(images_BCHW, visible_BK))
        tokens = self.positions.added(tokens if content is None else content(tokens), places)
        # under autocast the sum is float32, and so is the residual stream unless ``half_residual``
        tokens = self.norm_pre(torch.cat([*self._prefix(images_BCHW.shape[0]), tokens], dim=1))
        dropping_B = keys_B if self.dropout else None  # a key is 18 kernels
        tokens = dropout(tokens, dropout_keys(dropping_B, 0), self.dropout, index=0)
        if self.half_residual and torch.is_autocast_enabled(tokens.device.type):
            tokens = tokens.bfloat16()
        layer_terms: Iterable[PositionTerms] = self.positions.layer_terms(places)
        order_BT, num_keys = None, None
        if context_BM is not None:
            # keys are then a slice in every block: the backward pass of gathers is slow
            order_BT, num_keys = self._context_first(context_BM, tokens.shape[1])
            tokens, layer_terms = (
                gather_tokens(tokens, order_BT),
                in_order(layer_terms, order_BT, num_keys),
            )
        hidden = self._through_blocks(
            tokens, layer_terms, num_keys, keys_B, prefix_only=prefix_only, layers=layers
        )
        if order_BT is not None and not prefix_only:
            before_BT = order_BT.argsort(1)
            hidden = [gather_tokens(each, before_BT) for each in hidden]
        return self.norm(hidden[0]) if layers is None else hidden

    def _through_blocks(
        self,
        tokens_BTD: Tensor,
        layer_terms: Iterable[PositionTerms],
        num_keys: int | None,
        keys_B: Tensor | None,
        *,
        prefix_only: bool,
        layers: Sequence[int] | None,
    ) -> list[Tensor]:
        """Return the tokens after the last block, or after each of ``layers``."""
        branches = residual_factors(
            keys_B, self.drop_path, self.depth, uniform=self.uniform_drop_path
        )
        hidden, last = [tokens_BTD], self.depth if layers is None else max(layers, default=0)
        parts = zip(self.blocks, layer_terms, branches, strict=True)
        for number, (block, terms, branch) in enumerate(parts, start=1):
            if number > last:
                break
            is_last = number == self.depth
            num_queries = self.num_prefix_tokens if prefix_only and is_last else None
            dropout_B = dropout_keys(keys_B if self.dropout else None, number)
            if self.register_gate is not None:
                terms = terms.plus(self._gate(number - 1, num_keys or tokens_BTD.shape[1]))
            tokens_BTD = block(tokens_BTD, terms, num_keys, branch, num_queries, dropout_B)
            if layers is not None:
                hidden.append(tokens_BTD)
        return [tokens_BTD] if layers is None else [hidden[layer] for layer in layers]

    def _prefix(self, num: int) -> list[Tensor]:
        """Return the class token, with its position, and the registers."""
        tokens: list[Tensor] = [t for t in (self.cls_token, self.reg_token) if t is not None]
        if not tokens:
            return []
        prefix, own = torch.cat(tokens, dim=1), self.positions.prefix()
        return [(prefix if own is None else prefix + own).expand(num, -1, -1)]

    def _gate(self, layer: int, num_keys: int) -> Tensor:
        """Return the gate's bias of attention to each key in a block: (1, 1, 1, keys)."""
        assert self.register_gate is not None
        prefix = self.num_prefix_tokens
        biases = self.register_gate[layer].expand(1, 1, 1, self.gated)
        return F.pad(biases, (prefix - self.gated, num_keys - prefix))

    def _context_first(self, context_BM: Tensor, num_tokens: int) -> tuple[Tensor, int]:
        """Return an order of all tokens with prefix and context first, and their number."""
        prefix = torch.arange(self.num_prefix_tokens, device=context_BM.device)
        prefix = prefix.expand(len(context_BM), -1)
        first_BM = torch.cat([prefix, context_BM + self.num_prefix_tokens], dim=1)
        return torch.cat([first_BM, others(first_BM, num_tokens)], dim=1), first_BM.shape[1]

    def as_timm(self) -> tuple[str, dict[str, Any]]:
        """Return timm's architecture and the arguments that differ from its defaults."""
        size = self.size
        options = {
            "img_size": _side(self.image_size),
            "patch_size": _side(self.patch_size),
            "depth": self.depth,
            "in_chans": self.channels,
            "class_token": self.has_class_token,
            "reg_tokens": self.num_prefix_tokens - self.has_class_token,
            "init_values": self.layer_scale,
            "final_norm": isinstance(self.norm, nn.LayerNorm),
            "pre_norm": size.pre_norm,
            "qkv_bias": size.qkv_bias,
            "qk_norm": size.qk_norm,
            "act_layer": size.activation,
        }
        if is_eva(size, self.positions):
            return eva_model(size, options, self.positions.as_given())
        return timm_model(size, options, self.positions)

    def timm_name_of(self, name: str) -> str:
        """Return timm's name of a tensor of this encoder."""
        return timm_name(name)

    def unknown_to_timm(self, *, wrapped: bool = False) -> str:
        """Return the option that no model of timm has, such as ``positions = alibi``, or none.

        A model that was ``wrapped`` has the periods and norms of its encoder.
        """
        if self.gated:
            return f"gated_registers = {self.gated}"
        if self.positions.timm is None:
            return f"positions = {self.positions.name}"
        odd = is_eva(self.size, self.positions) and not wrapped
        return odd_option(self) if odd else ""

    def _instead(self, odd: str) -> str:
        if "bf16" in odd:
            return "Read the file as timm:NAME,FILE, with the exact periods that timm has."
        usable = f"Positions that it has: {schemes_that('timm')}. " if "positions =" in odd else ""
        return f"{usable}pospre.export --format safetensors or onnx writes this encoder."

    def named_state(self) -> dict[str, Tensor]:
        """Return the weights by timm's names; what timm lacks has ours.

        Raises:
            UserError: parts were replaced.
        """
        check_parts(self, self.built, "encoder")
        return {self.timm_name_of(key): v.contiguous() for key, v in self.state_dict().items()}

    def timm_state(
        self, vit: nn.Module | None = None, grid: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Return the weights for timm's model ``timm_name``, complete.

        Args:
            vit: the timm model to load them, if ``wrap_encoder`` has wrapped it. Some models have
                no positions for class token and registers; these are then added to the tokens.
            grid: grid of the exported position table; None: the images'.

        Raises:
            UserError: timm has no model with this position scheme, or parts were replaced.
        """
        state = self.named_state()
        if odd := self.unknown_to_timm(wrapped=vit is not None):
            raise UserError(
                f"encoder.{odd} cannot be exported for timm, which has no such model. "
                f"{self._instead(odd)}"
            )
        for key, tensor in self.positions.exported(grid or self.grid).items():
            state[key] = tensor.to(next(self.parameters()).device)
        if vit is not None:
            state = as_their_table(state, vit.state_dict(), self.num_prefix_tokens)
        if is_eva(self.size, self.positions):
            return eva_state(self, state, vit)
        return state

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Return whether Composer's FSDP2 shards ``module``: yes for blocks."""
        return isinstance(module, Block)


def as_vit(encoder: PatchEncoder, reader: str = "it") -> Encoder:
    """Return the encoder; ``UserError`` that names the ``reader`` of its blocks if it is no ViT."""
    if not isinstance(encoder, Encoder):
        raise UserError(
            f"{reader} reads the blocks of a ViT, but the encoder is {encoder.timm_name}. Use a "
            "ViT; of others, model.encoder(images) gives the last tokens."
        )
    return encoder


def _side(size: tuple[int, int]) -> int | tuple[int, int]:
    return size[0] if size[0] == size[1] else size
