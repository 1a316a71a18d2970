"""What our encoder inherits from timm's is right, or says what to use instead."""

from typing import Any

import pytest
import timm
import torch
from pospre.nn.timm_methods import INSTEAD
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import pospre
from pospre.errors import UserError
from pospre.nn.vit import Encoder
from tests.algorithms.cases import Case

RIGHT = {"forward", "forward_features", "pool"}
PUBLIC = {name for name in dir(VisionTransformer) if not name.startswith("_")} - set(dir(nn.Module))


def encoder_of(**options: Any) -> Encoder:
    encoder = pospre.build_encoder("vit_tiny16", image_size=64, patch_size=8, depth=2, **options)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return encoder.eval()


def images() -> Tensor:
    return torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


def test_every_public_method_of_timms_is_right_or_refused() -> None:
    assert PUBLIC | {"forward"} == set(INSTEAD) | RIGHT


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_is_refused_says_what_to_use(name: str) -> None:
    with pytest.raises(UserError) as caught:
        getattr(encoder_of(), name)(images())
    said = str(caught.value)
    assert said.startswith(f"{name} of timm is not right") and INSTEAD[name] in said
    for word in INSTEAD[name].split():
        if word.startswith("pospre."):
            path = word.partition("(")[0].split(".")[1:]
            module = __import__(".".join(["pospre", *path[:-1]]), fromlist=path[-1:])
            assert callable(getattr(module, path[-1])), word


@pytest.mark.parametrize("positions", ["sincos", "learned", "none", "relative", "shared_relative"])
@pytest.mark.parametrize("class_token", [True, False])
def test_what_is_right_is_timms_of_the_same_weights(positions: str, class_token: bool) -> None:
    encoder = encoder_of(positions=positions, class_token=class_token)
    vit: Any = timm.create_model(encoder.timm_name, num_classes=0, **encoder.timm_kwargs).eval()
    vit.load_state_dict(encoder.timm_state(), strict=False)
    found = encoder.forward_features(images())
    torch.testing.assert_close(found, vit.forward_features(images()), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, encoder(images())) and found.shape[1] == 64 + class_token
    assert torch.equal(encoder.pool(found, "avg"), found[:, int(class_token) :].mean(1))
    with pytest.raises(UserError, match="no attn_mask; forward has context_BM"):
        encoder.forward_features(images(), torch.ones(1))


def test_an_encoder_whose_positions_a_field_gives_is_not_run_without_them() -> None:
    model, _ = Case(("mae", "crop_field", "ema_teacher")).build()
    whole = torch.randn(2, 3, 32, 32)
    assert model.eval().tokens(whole).shape[:2] == (2, 65)
    assert model.teacher is not None
    for encoder in (model.encoder, model.teacher):
        with pytest.raises(UserError, match=r"crop_field gives .* take model.tokens\(images\)"):
            encoder(whole)
    with pytest.raises(UserError, match=r"crop_field gives"):
        model.encoder.forward_features(whole)
