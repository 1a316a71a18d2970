"""timm's rotary encoders become ours: the same tokens and gradients of the same weights."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from pospre.evaluation.models import open_model
from pospre.nn.places import Places
from pospre.nn.positions.scheme import PositionTerms
from pospre.nn.weights.timm_models import timm_size, wrap_encoder
from pospre.training.foreign import Shown

DINOV3 = ("vit_small_patch16_dinov3", "vit_small_patch16_dinov3_qkvb")
GATED = ("vit_small_plus_patch16_dinov3", "vit_small_plus_patch16_dinov3_qkvb")
CELLS = (
    "vit_small_patch16_rope_224",
    "vit_small_patch16_rope_ape_224",
    "vit_small_patch16_rope_mixed_224",
    "vit_small_patch16_rope_mixed_ape_224",
    "vit_medium_patch16_rope_reg1_gap_256",
    "eva02_tiny_patch14_224",
    "eva02_base_patch14_224",
)
NARROW: dict[str, Any] = {"embed_dim": 128, "num_heads": 2, "depth": 2, "num_classes": 0}


def redrawn(model: nn.Module) -> Any:
    """Give every parameter another value, so that attention is sharp and branches count."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.12 if "qkv.weight" in name or "_proj.weight" in name else 0.05
            noise = scale * torch.randn(parameter.shape, generator=generator)
            one = "gamma" in name or (parameter.ndim == 1 and name.endswith("weight"))
            if "freqs" in name:
                parameter.mul_(1 + noise)
            else:
                parameter.copy_(0.5 * one + 0.5 * ("norm" in name and one) + noise)
    model.double().eval()
    if hasattr(getattr(model, "rope", None), "freqs"):
        model.rope.float()  # timm's own takes no other
    return model


def close(found: Tensor, expected: Tensor, share: float, title: str = "") -> None:
    largest = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= share * largest, title


def theirs_of(name: str, **options: Any) -> Any:
    patch = 14 if "patch14" in name else 16
    chosen = {"img_size": 4 * patch, **NARROW, **options}
    return redrawn(timm.create_model(name, **chosen))


def images(vit: Any, rows: int = 4, columns: int = 4) -> Tensor:
    side = vit.patch_embed.patch_size[0]
    shape = (2, 3, rows * side, columns * side)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def with_turn(encoder: Any, monkey: pytest.MonkeyPatch, change: Any) -> None:
    """Let the encoder's rotation be told other angles."""
    scheme = encoder.positions
    layer_terms = scheme.layer_terms

    def changed(places: Places) -> Any:
        for terms in layer_terms(places):
            assert terms.rotation is not None
            yield PositionTerms(change(*terms.rotation), terms.bias)

    monkey.setattr(scheme, "layer_terms", changed)


CHANGES = {
    "no rotation": lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)),
    "the other sense": lambda cos, sin: (cos, -sin),
    "axes swapped": lambda cos, sin: tuple(
        part.unflatten(-1, (2, -1)).flip(-2).flatten(-2) for part in (cos, sin)
    ),
    "other layout": lambda cos, sin: tuple(
        part.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for part in (cos, sin)
    ),
}


@pytest.mark.parametrize("name", [*DINOV3, *GATED, *CELLS])
def test_tokens_and_gradients_are_timms(name: str) -> None:
    vit = theirs_of(name)
    encoder: Any = wrap_encoder(vit).eval()
    x = images(vit)
    with torch.no_grad():
        ours = encoder(x)
        for title, change in CHANGES.items():
            with pytest.MonkeyPatch.context() as monkey:
                with_turn(encoder, monkey, change)
                assert (encoder(x) - ours).abs().max() > 0.05, f"{title} is not felt"
    expected = vit.forward_features(x)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weights).sum().backward()
    ours = encoder(x)
    (ours * weights).sum().backward()
    close(ours, expected, 1e-6)
    found = encoder.timm_state(vit)
    assert found.keys() == {k for k in vit.state_dict() if not k.startswith("fc_norm.")}
    with torch.no_grad():
        for parameter in encoder.parameters():
            grad = parameter.grad
            parameter.copy_(torch.zeros_like(parameter) if grad is None else grad)
        if vit.pos_embed is not None and vit.no_embed_class:  # a row that timm has not
            encoder.positions.pos_embed[:, : encoder.num_prefix_tokens] = 0
    for key, grad in encoder.timm_state(vit).items():
        close(grad, vit.get_parameter(key).grad, 1e-5, key)


@pytest.mark.parametrize("name", [*DINOV3, GATED[1], *CELLS])
def test_other_sizes_are_read_as_timm_reads_them(name: str) -> None:
    vit = theirs_of(name, dynamic_img_size=True)
    encoder: Any = wrap_encoder(vit).eval()
    for rows, columns in ((4, 6), (6, 4), (3, 3)):
        x = images(vit, rows, columns)
        with torch.no_grad():
            close(encoder(x), vit.forward_features(x), 1e-6, f"{rows}×{columns}")


@pytest.mark.parametrize("size", ["base", "large", "huge_plus", "7b"])
def test_all_sizes_of_dinov3_are_known_by_name(size: str) -> None:
    found = timm_size(f"vit_{size}_patch16_dinov3")
    assert found.eps == 1e-5 and not found.key_bias and not found.qkv_bias
    assert found.swiglu == (size in ("huge_plus", "7b"))


@pytest.mark.parametrize(
    "name",
    [
        "vit_base_patch16_dinov3",
        "vit_large_patch16_dinov3_qkvb",
        "vit_huge_plus_patch16_dinov3_qkvb",
    ],
)
def test_every_tensor_of_dinov3s_larger_sizes_goes_to_us_and_back(
    name: str, tmp_path: Path
) -> None:
    """At their widths, with one block; a file tells which size it is."""
    vit = redrawn(timm.create_model(name, depth=1, num_classes=0, img_size=64))
    encoder: Any = wrap_encoder(vit).eval()
    x = images(vit, 2, 3)
    with torch.no_grad():
        expected = vit.forward_features(x)
        close(encoder(x), expected, 1e-6)
    returned, own = encoder.timm_state(vit), vit.state_dict()
    assert returned.keys() == own.keys()
    assert all(torch.equal(returned[key], own[key]) for key in own)
    save_file({key: value.float() for key, value in own.items()}, tmp_path / "vit.safetensors")
    subject = open_model(str(tmp_path / "vit.safetensors"), shown=Shown((32, 48)))
    count = len(encoder.state_dict())
    assert f"{count} of {count} tensors" in subject.origin
    assert subject.recipe.encoder.name == f"timm:{name}"
    with torch.no_grad():
        close(subject.model.eval().encoder(x.float()).double(), expected, 1e-4)


def test_a_frozen_part_stays_frozen() -> None:
    vit = theirs_of(GATED[1])
    vit.blocks[0].requires_grad_(False)
    for name, parameter in wrap_encoder(vit).named_parameters():
        assert parameter.requires_grad != name.startswith("blocks.0."), name
