"""What replaces a layer, or hooks into it, is heard in every call; exports refuse to lose it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from pospre.algorithms.ijepa.ijepa import FeaturePrediction
from pospre.data.views.options import ViewGroup
from pospre.model.algorithm import algorithm_class
from pospre.model.model import PretrainModel
from pospre.nn.block import Attention, Mlp
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.projections import bias_of, weight_of
from pospre.nn.vit import Encoder
from tests.algorithms.cases import NARROW, OPTIONS, Case, written
from tests.refusals import refuses

BEIT, EVA = replace(NARROW, key_bias=False), replace(NARROW, swiglu=True, mlp_norm=True)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (NARROW, {}),
    "dinov3": (BEIT, {"positions": "rotary", "layer_scale": 1.0, "num_registers": 1}),
    "eva02": (replace(EVA, key_bias=False), {"positions": "learned_rotary"}),
    "beit": (BEIT, {"positions": "relative"}),
}
"""Sizes and options of encoders like those of these families."""
METHODS: dict[tuple[str, ...], dict[str, Any]] = {
    ("mp3",): {"position_rate": 0.25, "mask_ratio": 0.5},
    ("mae", "droppos"): {},
    ("dinov2",): {},  # its small crops give class tokens only
    ("ijepa",): {},
    ("supervised",): {},
}


class Lora(nn.Module):
    """A layer with a low-rank addition, named as peft does."""

    def __init__(self, base_layer: Any, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        out, width = base_layer.weight.flatten(1).shape
        dtype = base_layer.weight.dtype
        self.lora_A = nn.Parameter(0.3 * torch.randn(rank, width, dtype=dtype))
        self.lora_B = nn.Parameter(0.3 * torch.randn(out, rank, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        low = (x if x.shape[-1] == self.lora_A.shape[1] else x.flatten(1)) @ self.lora_A.T
        base: Tensor = self.base_layer(x)
        return base + (low @ self.lora_B.T).view_as(base)

    def merged(self) -> nn.Module:
        """Return the layer with the addition in its weight."""
        weight = self.base_layer.weight
        with torch.no_grad():
            weight += (self.lora_B @ self.lora_A).view_as(weight)
        return self.base_layer


class Added(nn.Module):
    """A parametrisation: a weight plus a learned one."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(0.3 * torch.randn_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


def give_lora(model: nn.Module, *names: str) -> None:
    """Replace the layers of these last names by ones with LoRA."""
    for name, layer in [*model.named_modules()]:
        home, _, last = name.rpartition(".")
        if last in names:
            setattr(model.get_submodule(home), last, Lora(layer))


def merge(model: nn.Module) -> None:
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, Lora):
            home, _, last = name.rpartition(".")
            setattr(model.get_submodule(home), last, layer.merged())


def encoder_of(kind: str) -> Encoder:
    size, options = KINDS[kind]
    small = {"image_size": 32, "patch_size": 4, "depth": 2}
    return Encoder(size, EncoderOptions("vit_tiny16", **{**small, **options}))


def model_of(kind: str, names: tuple[str, ...], *, lora: bool = False) -> PretrainModel:
    torch.manual_seed(0)
    encoder = encoder_of(kind)
    if lora:  # before a method copies the encoder into a teacher
        give_lora(encoder, "qkv")
    algorithms = [
        algorithm_class(name)(**{**OPTIONS.get(name, {}), **(METHODS[names] if i == 0 else {})})
        for i, name in enumerate(names)
    ]
    views: dict[str, ViewGroup] = Case(names).views
    return PretrainModel(encoder, algorithms, seed=7, views=views)


PAIRS = [(kind, names) for kind in KINDS for names in METHODS]
PAIRS.remove(("beit", ("dinov2",)))  # its crops have two grids


@pytest.mark.parametrize(("kind", "names"), PAIRS)
def test_lora_learns_in_every_block(kind: str, names: tuple[str, ...]) -> None:
    model = model_of(kind, names, lora=True)
    batch = Case(names).batch()
    loss = model(written(model, batch), progress=0.5).loss
    loss.backward()
    for name, parameter in model.encoder.named_parameters():
        if "lora" in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
    merge(model)  # what it computes is W + B·A
    again = model(written(model, batch), progress=0.5).loss
    torch.testing.assert_close(again, loss, rtol=1e-4, atol=1e-5)


Call = dict[str, Any]
CALLS: tuple[Call, ...] = (
    {},
    {"num_keys": 4},
    {"num_queries": 1},
    {"num_keys": 4, "num_queries": 2},
)


@pytest.mark.parametrize("call", CALLS, ids=str)
@pytest.mark.parametrize("key_bias", [False, True])
def test_whatever_computes_the_projection_is_heard(key_bias: bool, call: dict[str, Any]) -> None:
    attention: Any = Attention(replace(NARROW, key_bias=key_bias)).double()
    nn.init.normal_(attention.qkv.bias)
    tokens = torch.randn(2, 9, 48, dtype=torch.float64)
    seen: list[torch.Size] = []
    handle = attention.qkv.register_forward_hook(lambda *given: seen.append(given[2].shape))
    before = attention(tokens, **call)
    handle.remove()
    assert seen == [(2, 9, 144)]
    torch.testing.assert_close(attention(tokens, **call), before, rtol=0, atol=1e-12)
    parametrize.register_parametrization(attention.qkv, "weight", Added(attention.qkv.weight))
    changed = attention(tokens, **call)
    changed.sum().backward()
    assert attention.qkv.parametrizations.weight[0].delta.grad.abs().max() > 0
    parametrize.remove_parametrizations(attention.qkv, "weight")
    torch.testing.assert_close(attention(tokens, **call), changed, rtol=0, atol=1e-12)
    assert not torch.allclose(changed, before)
    attention.qkv.forward = lambda given: 2 * type(attention.qkv).forward(attention.qkv, given)
    doubled = attention(tokens, **call)
    del attention.qkv.forward
    with torch.no_grad():
        attention.qkv.weight.mul_(2)
        attention.qkv.bias.mul_(2)
    torch.testing.assert_close(attention(tokens, **call), doubled, rtol=0, atol=1e-12)


def test_the_other_layers_are_called_too() -> None:
    encoder = encoder_of("plain").double().eval()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    seen: list[str] = []
    for name, part in encoder.named_modules():
        if isinstance(part, nn.Linear | nn.Conv2d | nn.LayerNorm | Mlp | Attention):
            part.register_forward_hook(lambda *_, name=name: seen.append(name))
    plain = encoder(images)
    assert len(seen) == len({*seen}) == 1 + 2 * (2 + 4 + 2) + 1
    give_lora(encoder, "proj", "fc1", "fc2")  # also the patches' convolution
    adapted = encoder(images)
    assert not torch.allclose(adapted, plain)
    adapted.sum().backward()
    assert all(each.grad is not None for name, each in encoder.named_parameters() if "lora" in name)
    merge(encoder)
    torch.testing.assert_close(encoder(images), adapted)


def test_patches_are_embedded_as_by_timms_convolution() -> None:
    embed = encoder_of("plain").patch_embed
    images = torch.randn(2, 3, 32, 32)
    convolved = nn.functional.conv2d(images, embed.proj.weight, embed.proj.bias, 4)
    patches = images.unflatten(3, (8, 4)).unflatten(2, (8, 4)).permute(0, 2, 4, 1, 3, 5)
    found = embed(patches.flatten(1, 2))
    torch.testing.assert_close(found, convolved.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(embed.proj(images), convolved)


def pruned(encoder: Any) -> None:
    prune.l1_unstructured(encoder.blocks[1].attn.proj, "weight", 0.5)


def parametrised(encoder: Any) -> None:
    layer = encoder.blocks[0].attn.qkv
    parametrize.register_parametrization(layer, "weight", Added(layer.weight))


def doubled(encoder: Any) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    encoder.blocks[0].mlp.fc2.__class__ = Doubled  # tensors of the same names


def cut(encoder: Any) -> None:
    encoder.norm = nn.Identity()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda encoder: give_lora(encoder, "qkv"), r"qkv is now .*\.Lora, but was .*Linear"),
        (lambda encoder: give_lora(encoder.patch_embed, "proj"), r"proj is now .*Lora, but was"),
        (parametrised, r"qkv is now .*ParametrizedLinear.*remove_parametrizations"),
        (pruned, r"proj.weight is now missing, but was torch.Tensor"),
        (doubled, r"blocks.0.mlp.fc2 is now .*Doubled, but was .*Linear"),
        (cut, r"encoder.norm is now .*Identity, but was .*LayerNorm"),
    ],
)  # fmt: skip
def test_an_export_refuses_what_its_weights_do_not_hold(
    change: Callable[[Any], None], message: str
) -> None:
    encoder = encoder_of("plain")
    change(encoder)
    state = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    refuses(message, encoder.timm_state)
    assert all(torch.equal(state[name], each) for name, each in encoder.state_dict().items())


@pytest.mark.parametrize("kind", ["plain", "beit"])
def test_merged_weights_are_exported(kind: str) -> None:
    encoder = encoder_of(kind)
    give_lora(encoder, "qkv", "proj")
    before = encoder(torch.ones(1, 3, 32, 32))
    merge(encoder)
    vit = timm.create_model(encoder.timm_name, **encoder.timm_kwargs, num_classes=0).eval()
    vit.load_state_dict(encoder.timm_state())
    found: Any = vit
    torch.testing.assert_close(found.forward_features(torch.ones(1, 3, 32, 32)), before)


@pytest.mark.parametrize(
    "options", [{}, {"official": True}, {"variant": "both"}, {"variant": "l1"}]
)
def test_stop_reads_what_the_projection_computes(options: dict[str, Any]) -> None:
    case = Case(("ijepa", "stop"), {"stop": options})
    model = case.build()
    predictor = model.objectives.of(FeaturePrediction).predictor
    give_lora(predictor, "embed")
    batch = written(model, case.batch())
    found = model.loss(model(batch), batch)
    merge(predictor)
    expected = model.loss(model(batch), batch)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_weight_and_bias_of_what_computes_them() -> None:
    layer = nn.Linear(5, 3).double()
    adapted = Lora(layer)
    weight, bias = weight_of(adapted, 5), bias_of(adapted, 5)
    adapted.merged()
    torch.testing.assert_close((weight, bias), (layer.weight, layer.bias), check_stride=False)
    assert weight_of(layer, 5) is layer.weight and bias_of(layer, 5) is layer.bias
