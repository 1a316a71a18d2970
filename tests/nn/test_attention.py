"""Attention with keys and values of some tokens only: a mask's numbers at less cost."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pospre.nn.block import Attention, Block
from pospre.nn.build import build_encoder
from pospre.nn.masking import slot_mask

TOKENS = 9


@pytest.fixture
def attention() -> Attention:
    torch.manual_seed(0)
    return Attention(24, 3, qkv_bias=True).double().eval()


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, TOKENS, 24, dtype=torch.float64)


def contexts(count: int) -> Tensor:
    return torch.rand(4, TOKENS).argsort(dim=1)[:, :count]


def closed(context: Tensor) -> Tensor:
    """Return what is added to the logits so that only the context is seen: (B, 1, 1, T)."""
    seen = slot_mask(context, TOKENS)
    hidden = torch.full(seen.shape, -torch.inf, dtype=torch.float64).masked_fill(seen, 0.0)
    return hidden[:, None, None]


@pytest.mark.parametrize("count", [1, 4, 9])
def test_gathering_keys_and_values_is_masking_them(
    attention: Attention, tokens: Tensor, count: int
) -> None:
    context = contexts(count)
    torch.testing.assert_close(
        attention(tokens, context_BM=context),
        attention(tokens, closed(context)),
        atol=1e-14,
        rtol=0,
    )


def test_the_gradients_are_the_masks_too(attention: Attention, tokens: Tensor) -> None:
    context = contexts(4)
    probe = torch.randn_like(tokens)
    gradients = []
    for options in ({"context_BM": context}, {"attn_mask": closed(context)}):
        given = tokens.clone().requires_grad_()
        parameters = [given, *attention.parameters()]
        mixed = attention(given, **options)
        gradients.append(torch.autograd.grad((mixed * probe).sum(), parameters))
    for gathered, masked in zip(*gradients, strict=True):
        torch.testing.assert_close(gathered, masked, atol=1e-13, rtol=0)


def test_the_order_of_the_context_is_free(attention: Attention, tokens: Tensor) -> None:
    context = contexts(5)
    torch.testing.assert_close(
        attention(tokens, context_BM=context),
        attention(tokens, context_BM=context.flip(1)),
        atol=1e-14,
        rtol=0,
    )


def test_without_bias_in_the_projection(tokens: Tensor) -> None:
    torch.manual_seed(0)
    attention = Attention(24, 3, qkv_bias=False).double().eval()
    context = contexts(4)
    torch.testing.assert_close(
        attention(tokens, context_BM=context),
        attention(tokens, closed(context)),
        atol=1e-14,
        rtol=0,
    )


def test_only_the_context_is_projected_to_keys_and_values() -> None:
    def flops(count: int | None) -> int:
        with torch.device("meta"):
            attention = Attention(64, 2, qkv_bias=True)
            context = None if count is None else torch.zeros(1, count, dtype=torch.int64)
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attention(torch.zeros(1, 100, 64), context_BM=context)
        return int(counter.get_total_flops())

    # per multiplication and addition: queries and output 2·T·D², keys and values 2·M·D², and
    # similarity and mixing 2·T·M·D
    assert flops(None) == flops(100) == 2 * (4 * 100 * 64**2 + 2 * 100 * 100 * 64)
    assert flops(25) == 2 * (2 * 100 * 64**2 + 2 * 25 * 64**2 + 2 * 100 * 25 * 64)


def test_every_layer_asks_the_context_of_its_own_layer() -> None:
    """Keys come from the current tokens; reusing the first layer's would be another method."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"mlp_ratio": 2.0, "qkv_bias": True}
    blocks = [Block(24, 3, **options).double().eval() for _ in range(2)]
    tokens, context = torch.randn(4, TOKENS, 24, dtype=torch.float64), contexts(4)
    gathered = masked = tokens
    for block in blocks:
        gathered, masked = block(gathered, None, context), block(masked, closed(context))
    torch.testing.assert_close(gathered, masked, atol=1e-13, rtol=0)


@pytest.mark.parametrize("registers", [0, 2])
def test_prefix_tokens_are_always_context(registers: int) -> None:
    torch.manual_seed(0)
    encoder = build_encoder(
        "vit_tiny16",
        image_size=32,
        patch_size=8,
        depth=1,
        positions="none",
        num_registers=registers,
    )
    images, context = torch.randn(2, 3, 32, 32), torch.tensor([[3], [5]])
    before = encoder(images, context_BM=context)
    with torch.no_grad():
        token = encoder.cls_token if not registers else encoder.reg_token
        assert token is not None
        token.add_(1)
    after = encoder(images, context_BM=context)
    prefix = 1 + registers
    assert ((after - before)[:, prefix:].abs().amax(-1) > 1e-6).all()


def test_bf16_context_attention_is_near_fp32(attention: Attention, tokens: Tensor) -> None:
    attention, tokens, context = attention.float(), tokens.float(), contexts(4)
    full = attention(tokens, context_BM=context)
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(tokens, context_BM=context)
    torch.testing.assert_close(half.float(), full, atol=0.02, rtol=0.05)
