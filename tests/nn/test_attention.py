"""Attention with keys and values of some tokens only: a mask's numbers at less cost."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pospre.nn.block import Attention, Block, CrossBlock
from pospre.nn.build import build_encoder
from pospre.nn.masking import slot_mask
from pospre.nn.places import Places
from pospre.nn.positions.scheme import PositionTerms
from pospre.nn.sizes import EncoderSize
from pospre.nn.vit import as_vit
from tests.operators import CountedOperators

TOKENS = 9
SIZE = EncoderSize("", 1, 24, 1, 3)


@pytest.fixture
def attention() -> Attention:
    torch.manual_seed(0)
    return Attention(SIZE).double().eval()


@pytest.fixture
def tokens() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(4, TOKENS, 24, dtype=torch.float64)


def first(count: int) -> Tensor:
    """Return the indices of the first tokens of four images."""
    return torch.arange(count).expand(4, -1)


def closed(context: Tensor, bias: Tensor | float = 0.0) -> PositionTerms:
    """Return a bias by which only the context is seen, besides another one: (B, heads, T, T)."""
    seen = slot_mask(context, TOKENS)
    hidden = torch.full(seen.shape, -torch.inf, dtype=torch.float64).masked_fill(seen, 0.0)
    return PositionTerms(bias=(hidden[:, None, None] + bias).expand(-1, -1, TOKENS, -1))


def turning(heads: int, width: int) -> PositionTerms:
    """Return random angles and biases of nine tokens of each of four images."""
    angles = torch.randn(4, heads, TOKENS, width // 2, dtype=torch.float64)
    bias = torch.randn(4, heads, TOKENS, TOKENS, dtype=torch.float64)
    return PositionTerms((angles.cos(), angles.sin()), bias)


@pytest.mark.parametrize("qkv_bias", [True, False])
@pytest.mark.parametrize("count", [1, 4, 9])
def test_keys_and_values_of_the_first_tokens_are_a_mask(
    tokens: Tensor, count: int, qkv_bias: bool
) -> None:
    attention = Attention(replace(SIZE, qkv_bias=qkv_bias)).double().eval()
    torch.testing.assert_close(
        attention(tokens, num_keys=count),
        attention(tokens, closed(first(count))),
        atol=1e-14,
        rtol=0,
    )


def test_the_gradients_are_the_masks_too(attention: Attention, tokens: Tensor) -> None:
    probe = torch.randn_like(tokens)
    gradients = []
    for options in ({"num_keys": 4}, {"terms": closed(first(4))}):
        given = tokens.clone().requires_grad_()
        parameters = [given, *attention.parameters()]
        mixed = attention(given, **options)
        gradients.append(torch.autograd.grad((mixed * probe).sum(), parameters))
    for gathered, masked in zip(*gradients, strict=True):
        torch.testing.assert_close(gathered, masked, atol=1e-13, rtol=0)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("key_bias", [False, True])
def test_the_context_and_the_first_queries_keep_their_places(
    tokens: Tensor, key_bias: bool, qk_norm: bool
) -> None:
    attention = Attention(replace(SIZE, key_bias=key_bias, qk_norm=qk_norm)).double()
    torch.nn.init.normal_(attention.qkv.bias)
    terms = turning(3, 8)
    assert terms.bias is not None
    masked = attention(tokens, closed(first(4), terms.bias)._replace(rotation=terms.rotation))
    of_keys = terms._replace(bias=terms.bias[..., :4])
    for count in (None, 1, 3):
        found = attention(tokens, of_keys, 4, count)
        torch.testing.assert_close(found, masked[:, :count], atol=1e-13, rtol=0)
        whole = attention(tokens, terms)
        torch.testing.assert_close(attention(tokens, terms, None, count), whole[:, :count])


@pytest.mark.parametrize("count", [None, 2])
def test_where_all_tokens_ask_none_is_sliced(tokens: Tensor, count: int | None) -> None:
    """A slice of all has a backward pass that fills zeros, and adds to them."""
    block, terms = Block(SIZE).double(), turning(3, 8)
    assert terms.rotation is not None and terms.bias is not None
    for given in (tokens, terms.rotation[0], terms.bias):
        given.requires_grad_()
    terms = terms._replace(rotation=(terms.rotation[0], terms.rotation[1].detach()))
    with CountedOperators() as operators:
        block(tokens, terms, num_queries=count).sum().backward()
    assert (operators.counts["slice_backward"] == 0) == (count is None)


def test_weights_are_those_that_mix_the_values(attention: Attention, tokens: Tensor) -> None:
    terms = turning(3, 8)
    weights = attention.weights(tokens, terms)
    torch.testing.assert_close(weights.sum(-1), torch.ones(4, 3, TOKENS, dtype=torch.float64))
    value = attention.qkv(tokens)[..., 48:].unflatten(2, (3, 8)).transpose(1, 2)
    mixed = attention.proj((weights @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(tokens, terms), mixed, atol=1e-13, rtol=0)


def test_a_bias_of_keys_does_nothing_where_there_is_none(tokens: Tensor) -> None:
    attention = Attention(replace(SIZE, key_bias=False)).double()
    terms = turning(3, 8)
    before = attention(tokens, terms)
    with torch.no_grad():
        attention.qkv.bias[24:48] = 5
    assert torch.equal(attention(tokens, terms), before)
    biased = Attention(SIZE).double()
    biased.load_state_dict(attention.state_dict())
    assert not torch.allclose(biased(tokens, terms), before)


def test_only_the_context_is_projected_to_keys_and_values() -> None:
    def flops(count: int | None) -> int:
        with torch.device("meta"):
            attention = Attention(EncoderSize("", 1, 64, 1, 2))
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                attention(torch.zeros(1, 100, 64), num_keys=count)
        return int(counter.get_total_flops())

    # per multiplication and addition: queries and output 2·T·D², keys and values 2·M·D², and
    # similarity and mixing 2·T·M·D
    assert flops(None) == flops(100) == 2 * (4 * 100 * 64**2 + 2 * 100 * 100 * 64)
    assert flops(25) == 2 * (2 * 100 * 64**2 + 2 * 25 * 64**2 + 2 * 100 * 25 * 64)


@pytest.mark.parametrize("prefix_only", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary", "relative", "shared_relative"])
def test_the_context_of_an_encoder_is_a_mask(positions: str, prefix_only: bool) -> None:
    """Of some patches, in any order, whose places are turned and compared as they stand."""
    options = {"image_size": 32, "patch_size": 8, "depth": 2, "positions": positions}
    encoder = as_vit(build_encoder("vit_tiny16", **options).double())  # type: ignore[arg-type]
    for parameter in encoder.positions.parameters():
        torch.nn.init.normal_(parameter)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    keep = torch.rand(4, 16).argsort(1)[:, : TOKENS - 1]
    context = torch.rand(4, TOKENS - 1).argsort(dim=1)[:, :4]
    tokens = encoder(images, keep, layers=[0])[0]
    seen = torch.cat([torch.zeros(4, 1, dtype=torch.int64), context + 1], dim=1)
    expected = [tokens]
    for block, terms in zip(
        encoder.blocks, encoder.positions.layer_terms(Places((4, 4), keep)), strict=True
    ):
        assert (terms.bias is None) == (positions in ("learned", "rotary"))
        masked = closed(seen, 0.0 if terms.bias is None else terms.bias)
        expected.append(block(expected[-1], masked._replace(rotation=terms.rotation)))
    end = encoder.norm(expected[-1])
    found = encoder(images, keep, context_BM=context, prefix_only=prefix_only)
    torch.testing.assert_close(found, end[:, :1] if prefix_only else end, atol=1e-12, rtol=0)
    if not prefix_only:
        layers = encoder(images, keep, context_BM=context, layers=[0, 1, 2])
        torch.testing.assert_close(layers, expected, atol=1e-12, rtol=0)


def test_no_block_gathers_its_context() -> None:
    """A gather's backward pass adds atomically into zeros."""
    counts = []
    for depth in (1, 3):
        encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=depth)
        context = torch.rand(2, 16).argsort(dim=1)[:, :4]
        with CountedOperators() as operators:
            encoder(torch.rand(2, 3, 32, 32), context_BM=context).sum().backward()
        counts.append((operators.counts["gather"], operators.counts["scatter_add"]))
    assert counts == [(2, 2), (2, 2)]


@pytest.mark.parametrize("registers", [0, 2])
def test_prefix_tokens_are_always_context(registers: int) -> None:
    encoder = as_vit(
        build_encoder(
            "vit_tiny16",
            image_size=32,
            patch_size=8,
            depth=1,
            positions="none",
            num_registers=registers,
        )
    )
    images, context = torch.randn(2, 3, 32, 32), torch.tensor([[3], [5]])
    before = encoder(images, context_BM=context)
    with torch.no_grad():
        token = encoder.cls_token if not registers else encoder.reg_token
        assert token is not None
        token.normal_()  # a norm takes away what all channels gain alike
    after = encoder(images, context_BM=context)
    prefix = 1 + registers
    assert ((after - before)[:, prefix:].abs().amax(-1) > 1e-3).all()


def test_bf16_context_attention_is_near_fp32(attention: Attention, tokens: Tensor) -> None:
    attention, tokens = attention.float(), tokens.float()
    full = attention(tokens, num_keys=4)
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(tokens, num_keys=4)
    torch.testing.assert_close(half.float(), full, atol=0.02, rtol=0.05)


def test_a_cross_block_attends_to_its_context_alone() -> None:
    block, oracle = CrossBlock(16, 2), torch.nn.MultiheadAttention(16, 2, batch_first=True)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.3)
        oracle.in_proj_weight.copy_(torch.cat([block.query.weight, block.key_value.weight]))
        oracle.in_proj_bias.copy_(torch.cat([block.query.bias, block.key_value.bias]))
    oracle.out_proj = block.proj  # type: ignore[assignment]
    tokens, context = torch.randn(3, 5, 16), torch.randn(3, 7, 16)
    keys = block.norm_context(context)
    attended = tokens + oracle(block.norm_query(tokens), keys, keys)[0]
    expected = attended + block.mlp(block.norm(attended))
    torch.testing.assert_close(block(tokens, context), expected)
    torch.testing.assert_close(block(tokens[:, 2:3], context), expected[:, 2:3])
