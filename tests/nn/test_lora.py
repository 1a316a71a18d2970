"""LoRA: the products on row blocks, a start that changes nothing, and weights merged once."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.lora import PAIRS, Pair, _merged, add_lora, merge_lora, merged_state
from pospre.nn.lora_options import LoraOptions
from pospre.nn.vit import Encoder
from pospre.training.optimizer.optim import parameter_groups
from tests.algorithms.cases import made
from tests.nn.test_projections import EVA
from tests.refusals import refuses

SIX: dict[str, Any] = {"layers": ("q", "k", "v", "proj", "fc1", "fc2")}


def encoder_of(**options: Any) -> Any:
    return build_encoder("vit_tiny16", image_size=32, depth=2, **options)


def gated() -> Encoder:
    """Return an encoder with SwiGLU, and a bias of keys that does not count."""
    options = EncoderOptions("eva", image_size=16, depth=2, positions="rotary")
    return Encoder(EVA, options)


def filled(encoder: nn.Module, std: float = 0.02) -> None:
    """Let every B be as after some training."""
    generator = torch.Generator().manual_seed(0)
    for name, each in encoder.named_parameters():
        if name.endswith(".b"):
            each.data.normal_(0.0, std, generator=generator)
        if name.endswith(".g"):
            each.data.add_(std * torch.randn(len(each), generator=generator))


def test_golden() -> None:
    weight = torch.tensor([[1.0, 2], [3, 4]])
    a, b = torch.tensor([[1.0, -1]]), torch.tensor([[2.0], [1]])
    merged = _merged(weight, "proj", a, b, scale=2.0)
    assert merged.tolist() == [[5, -2], [5, 2]]
    assert (merged @ torch.tensor([1.0, 2])).tolist() == [1, 9]
    assert _merged(weight, "proj", a, b, scale=4.0).tolist() == [[9, -6], [7, 0]]
    pair = Pair(2, 2, 1, weight)
    pair.a.data, pair.b.data = a, b
    x = torch.tensor([1.0, 2])
    assert (weight @ x + 2 * pair(x)).tolist() == [1, 9]
    rows = torch.tensor([[2.076137, -0.830455], [4.642383, 1.856953]])
    stretched = _merged(weight, "proj", a, b, scale=2.0, g=torch.ones(2))
    torch.testing.assert_close(stretched, rows, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("size", "on", "rank", "count"),
    [
        ("vits16", ("q", "v"), 16, 294_912),
        ("vits16", ("q", "k", "v", "proj"), 16, 589_824),
        ("vitb16", SIX["layers"], 16, 2_654_208),
        ("vitl16", ("q", "v"), 64, 6_291_456),
    ],
)
def test_numbers_of_parameters(size: str, on: tuple[str, ...], rank: int, count: int) -> None:
    with torch.device("meta"):
        encoder = build_encoder(size)
        add_lora(encoder, rank=rank, layers=on)
    assert sum(p.numel() for n, p in encoder.named_parameters() if PAIRS in n) == count


@pytest.mark.parametrize("make", [encoder_of, gated])
@pytest.mark.parametrize(
    ("on", "dora"), [(("q", "v"), False), (SIX["layers"], False), (SIX["layers"], True)]
)
def test_it_starts_as_the_weights_and_merges_into_them(make: Any, on: Any, dora: bool) -> None:
    encoder = make()
    plain = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    side = encoder.image_size[0]
    images = torch.randn(2, 3, side, side)
    before: Tensor = encoder(images)
    add_lora(encoder, rank=3, layers=on, seed=1, dora=dora)
    assert torch.equal(encoder(images), before)
    state = encoder.state_dict()
    options = LoraOptions(rank=3, layers=on, dora=dora)
    assert same(merged_state(state, options, "x"), plain)  # B = 0: the same bytes
    filled(encoder)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    trained = encoder(images)
    assert not torch.allclose(trained, before, atol=1e-3)
    merged = merged_state(state, options, "x")
    assert same(merged, merged_state(state, options, "x"))
    merge_lora(encoder)
    assert same(dict(encoder.state_dict()), merged) and encoder.state_dict().keys() == plain.keys()
    assert (encoder(images) - trained).abs().max() < 1e-4 * trained.std() + 1e-5
    assert encoder.timm_state() if make is encoder_of else True  # no hook is left
    moved = {name for name in plain if not torch.equal(plain[name], merged[name])}
    assert all(name.endswith(".weight") and ".blocks." in f".{name}" for name in moved)
    if on == ("q", "v"):
        for name in moved:  # k has no pair
            assert torch.equal(plain[name].chunk(3)[1], merged[name].chunk(3)[1])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].numpy().tobytes() == other[name].numpy().tobytes() for name in one
    )


def test_pairs_depend_on_the_seed_alone_and_are_never_decayed() -> None:
    found = []
    for noise, seed in ((0, 4), (1, 4), (1, 5)):
        torch.manual_seed(noise)
        encoder = encoder_of()
        add_lora(encoder, rank=2, seed=seed)
        found.append(encoder.state_dict()["blocks.1.attn.qkv.lora.v.a"])
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    bound = 192**-0.5
    assert 0.9 * bound < found[0].abs().max() <= bound
    model = PretrainModel(encoder, [made("mae")], seed=0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in parameter_groups(model, 1.0):
        for name in (names[id(each)] for each in group["params"]):
            assert PAIRS not in name or group["weight_decay"] == 0.0
            assert not name.endswith("attn.qkv.weight") or "encoder" not in name  # frozen


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rank": 96}, "lora.rank = 96, but q is 192 × 192; give less than 96, or train it whole"),
        ({"layers": ("qkv",)}, r"'lora.layers' is .*q, k and v have pairs of their own"),
        ({"layers": ("w3",)}, "'lora.layers.0' is 'w3'"),
        ({"alpha": 0.0}, "'lora.alpha' is 0.0"),
        ({"rang": 4}, "unknown key 'lora.rang'. Did you mean 'rank'"),
        ({"blocks": 0}, "none is left for pairs"),
    ],
)
def test_pairs_that_cannot_be(options: dict[str, Any], words: str) -> None:
    encoder = encoder_of()
    refuses(words, lambda: add_lora(encoder, **options))


def test_weights_are_not_trained_beside_their_pairs() -> None:
    encoder = encoder_of()
    add_lora(encoder, rank=2)
    refuses("has LoRA pairs already", lambda: add_lora(encoder, rank=2))
    encoder.requires_grad_(True)
    model = PretrainModel(encoder, [made("mae")], seed=0)
    with pytest.raises(UserError, match=r"has LoRA pairs, and is trained itself.*merge_lora"):
        model.loop_watch.start(model)


def test_tensors_of_strangers_take_no_memory_beyond_theirs() -> None:
    state = {"x.weight": torch.zeros(4, 4), "x.lora.proj.a": torch.zeros(1, 1 << 20)}
    state["x.lora.proj.b"] = torch.zeros(1 << 20, 1)
    fit = {**state, "x.lora.proj.a": torch.zeros(1, 4), "x.lora.proj.b": torch.zeros(4, 1)}
    for odd, dora in (
        (state, False),
        ({**state, "x.lora.proj.b": torch.zeros(4)}, False),
        ({"y.lora.q.a": torch.zeros(1)}, False),
        (fit, True),
        ({**fit, "x.lora.proj.g": torch.zeros(1 << 20, 1)}, True),
    ):
        with pytest.raises(UserError, match=r"x is of another model: '.*\.a' fits no weight"):
            merged_state(odd, LoraOptions(dora=dora), "x")


def test_compiled_and_copied_encoders_keep_their_pairs() -> None:
    encoder = encoder_of()
    add_lora(encoder, rank=2, **SIX)
    filled(encoder)
    model = PretrainModel(encoder, [made("mae"), made("ema_teacher")], seed=0)
    assert model.teacher is not None
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = encoder(images)
        assert torch.equal(model.teacher(images), expected)
        compiled = torch.compile(encoder, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(images), expected, atol=1e-6)
