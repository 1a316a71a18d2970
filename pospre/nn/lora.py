"""LoRA: low-rank pairs beside frozen weights, W′ = W + s·B·A (Hu et al. 2022).

These are our own lines rather than peft's, for three reasons. peft wraps each layer and renames its
tensors, but names decide what a block is for FSDP2, layer decay, stages, exact resume and loading N
of N; here pairs are children of a layer that keeps its name. peft's one pair for the fused qkv
shares an input space and moves k, too; here q, k, v and SwiGLU's halves are row blocks with a pair
each. And peft draws A from torch's global generator; here it depends on the seed alone, so that all
ranks and starts agree. B starts at 0: the features are those of the weights, bit by bit.

With ``dora`` (Liu et al. 2024, arXiv 2402.09353) each row of V = W + s·B·A has a length of its own:
W′ = g·‖W‖/‖V‖·V, with g = 1 at first, so that it does not matter when W is loaded. As in the paper,
no gradient flows through ‖V‖.

A teacher averages A and B, not their product: for A from 1 to 3 and B from 0 to 2, at a momentum of
.5, its product is 2, not 3.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pospre.arguments import check_arguments
from pospre.errors import UserError
from pospre.nn.lora_options import LoraOptions
from pospre.nn.vit import Encoder

PAIRS = ".lora."
"""In the names of all tensors of pairs."""


class _Rows(NamedTuple):
    layer: str
    number: int = 0  # of the row block
    blocks: int = 1


_SMALLEST = 1e-12
_ROWS = {
    "q": _Rows("attn.qkv", 0, 3),
    "k": _Rows("attn.qkv", 1, 3),
    "v": _Rows("attn.qkv", 2, 3),
    "proj": _Rows("attn.proj"),
    "fc1": _Rows("mlp.fc1"),
    "gate": _Rows("mlp.fc1", 0, 2),  # of SwiGLU
    "value": _Rows("mlp.fc1", 1, 2),
    "fc2": _Rows("mlp.fc2"),
}


class Pair(nn.Module):
    """x·Aᵀ·Bᵀ, for rows of a weight (rows, width); g of DoRA is their relative length."""

    def __init__(
        self, width: int, rows: int, rank: int, like: Tensor, *, dora: bool = False
    ) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(rank, width, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.zeros(rows, rank, dtype=like.dtype, device=like.device))
        nn.init.uniform_(self.a, -(width**-0.5), width**-0.5)
        self.g = nn.Parameter(like.new_ones(rows)) if dora else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product (..., rows)."""
        return F.linear(F.linear(x, self.a), self.b)

    def stretch(self, own: Tensor, scale: float) -> Tensor | None:
        """Return the factor g·‖W‖/‖V‖ (rows,) of the rows ``own`` of a weight; None: no DoRA."""
        if self.g is None:
            return None
        added = own + scale * (self.b @ self.a)
        return self.g * (own.norm(dim=1) / added.norm(dim=1).clamp_min(_SMALLEST)).detach()


class Pairs(nn.Module):
    """The pairs of a linear layer, by the rows that they add to."""

    def __init__(self, layer: nn.Linear, parts: Sequence[str], options: LoraOptions) -> None:
        super().__init__()
        self.scale, self.parts = options.scale, tuple(parts)
        self.count = _ROWS[parts[0]].blocks
        width, rows = layer.in_features, layer.out_features // self.count
        for part in parts:
            if options.rank >= min(width, rows) / 2:
                raise UserError(
                    f"lora.rank = {options.rank}, but {part} is {rows} × {width}; give less than "
                    f"{min(width, rows) // 2}, or train it whole"
                )
            pair = Pair(width, rows, options.rank, layer.weight, dora=options.dora)
            self.add_module(part, pair)

    def forward(self, x: Tensor, out: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the layer's output with the products of its input."""
        blocks, rows = list(out.chunk(self.count, -1)), weight.chunk(self.count)
        for part in self.parts:
            index, pair = _ROWS[part].number, getattr(self, part)
            blocks[index] = blocks[index] + self.scale * pair(x)
            if (factor := pair.stretch(rows[index], self.scale)) is not None:
                own = 0 if bias is None else bias.chunk(self.count)[index]
                more = (factor - 1) * (blocks[index] - own)  # exactly 0 at first
                blocks[index] = blocks[index] + more.to(out.dtype)
        return blocks[0] if self.count == 1 else torch.cat(blocks, -1)


def _add_products(layer: Any, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    added: Tensor = layer.lora(inputs[0], out, layer.weight, layer.bias)
    return added


def add_lora(
    encoder: nn.Module, *, blocks: int | None = None, seed: int = 0, **options: Any
) -> None:
    """Add pairs to an encoder, and freeze the weights beside them; before ``PretrainModel``.

    Args:
        encoder: a ViT from ``build_encoder`` or ``wrap_encoder``.
        blocks: number of first blocks that get pairs; None: all.
        seed: of A.
        options: those of a recipe's ``lora``: ``rank``, ``alpha``, ``layers`` and so on.

    Raises:
        UserError: it is no ViT, has pairs, an option is wrong, or the rank is too large.
    """
    given = LoraOptions(**check_arguments("lora", LoraOptions, options, source="add_lora"))
    if not isinstance(encoder, Encoder):
        name = type(encoder).__name__
        raise UserError(f"lora needs the blocks of a ViT, but the encoder is {name}")
    count = encoder.depth if blocks is None else blocks
    if count < 1:
        raise UserError("lora: stages train all blocks whole, so none is left for pairs")
    if any(adapted(encoder)):
        raise UserError("the encoder has LoRA pairs already; call pospre.merge_lora(encoder) first")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        every: list[Any] = list(encoder.blocks)
        for block in every[:count]:
            for name, parts in _layers(given, is_gated=block.mlp.gated).items():
                layer = block.get_submodule(name)
                layer.requires_grad_(False)
                layer.lora = Pairs(layer, parts, given)
                layer.register_forward_hook(_add_products)


def _layers(options: LoraOptions, *, is_gated: bool) -> dict[str, list[str]]:
    """Return the parts with a pair, by the name of their layer."""
    layers: dict[str, list[str]] = {}
    for given in options.layers:
        for part in ("gate", "value") if given == "fc1" and is_gated else (given,):
            layers.setdefault(_ROWS[part].layer, []).append(part)
    return layers


def adapted(module: nn.Module) -> Iterator[Any]:
    """Yield the linear layers with pairs."""
    for layer in module.modules():
        if isinstance(getattr(layer, "lora", None), Pairs):
            yield layer


@torch.no_grad()
def merge_lora(encoder: nn.Module) -> None:
    """Put the products of an encoder's pairs into its weights, and remove the pairs."""
    for layer in list(adapted(encoder)):
        for part in layer.lora.parts:
            pair = getattr(layer.lora, part)
            layer.weight.copy_(
                _merged(layer.weight, part, pair.a, pair.b, layer.lora.scale, pair.g)
            )
        hooks = layer._forward_hooks
        for key in [key for key, hook in hooks.items() if hook is _add_products]:
            del hooks[key]
        del layer.lora
        layer.requires_grad_(True)


def merged_state(state: Mapping[str, Tensor], options: LoraOptions, name: str) -> dict[str, Tensor]:
    """Return the tensors of a model without pairs that computes the same.

    ``UserError`` if the tensors of ``name`` do not fit each other; they may be a stranger's.
    """
    merged = {key: tensor for key, tensor in state.items() if PAIRS not in key}
    for key in (key for key in state if PAIRS in key and key.endswith(".a")):
        layer, _, rest = key.partition(PAIRS)
        part, weight = rest.removesuffix(".a"), f"{layer}.weight"
        try:
            factors = state[key], state[f"{key[:-1]}b"]
            lengths = state[f"{key[:-1]}g"] if options.dora else None
            merged[weight] = _merged(merged[weight], part, *factors, options.scale, lengths)
        except (KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{name} is of another model: '{key}' fits no weight") from error
    return merged


def _merged(
    weight: Tensor, part: str, a: Tensor, b: Tensor, scale: float, g: Tensor | None = None
) -> Tensor:
    """Return W′, computed in float64 and rounded once; where it adds 0, the bytes of W."""
    rows = _ROWS[part]
    own = weight.chunk(rows.blocks)[rows.number]
    fits = a.dim() == b.dim() == 2 and (len(b), a.shape[1]) == tuple(own.shape)
    if not fits or (g is not None and g.shape != own.shape[:1]):
        raise ValueError(part)  # before a product that is larger than both
    more = scale * (b.double() @ a.double())
    if g is not None:
        both, lengths = own.double() + more, own.double().norm(dim=1)
        factor = g.double() * lengths / both.norm(dim=1).clamp_min(_SMALLEST)
        more = both * factor[:, None] - own.double()
    whole = weight.clone()
    new = torch.where(more == 0, own, (own.double() + more).to(own.dtype))
    whole.chunk(rows.blocks)[rows.number].copy_(new)
    return whole
