"""What the library says of arguments of the wrong type, size or name, before any work."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
from timm.layers import GluMlp

import pospre
from pospre.schedules import duration_steps
from tests.algorithms.cases import Case
from tests.refusals import refuses
from tests.test_library import UNTYPED, pixels

SMALL: dict[str, Any] = {"img_size": 28, "patch_size": 14, "depth": 1}
TINY = "vit_tiny_patch16_224"


def batch(**options: Any) -> object:
    return UNTYPED.from_images(**{"images": pixels(), "index": torch.arange(4), **options})


def wrapped(name: str, **options: Any) -> object:
    return pospre.wrap_encoder(timm.create_model(name, **options))


def model_of(encoder: Any, *algorithms: Any) -> object:
    return UNTYPED.PretrainModel(encoder, [*algorithms], seed=0)


def shown(*shape: int) -> object:
    """Show the model, which takes images of 3×32×32, a batch of others."""
    model = Case(("mae",)).build()
    given = pospre.from_images(pixels(*shape), index=torch.arange(4), epoch=0)
    return model(model.prepare(given, 0.0))


def loader(**options: Any) -> object:
    return UNTYPED.build_loader("photos", **{"batch_size": 2, **options})


ROWS: list[tuple[str, Callable[[], object]]] = [
    # images
    (r"index of torch.int64 and shape \(3,\) for 4 images", lambda: batch(index=torch.arange(3))),
    ("index of torch.float32", lambda: batch(index=torch.rand(4))),
    (r"index = \['0.jpg', .*\(list\); give one who",
     lambda: batch(index=[f"{i}.jpg" for i in range(4)])),
    (r"index = array.* \(ndarray\); .* Turn names into numbers",
     lambda: batch(index=np.array(["a", "b"]))),
    (r"index = None \(NoneType\)", lambda: batch(index=None)),
    (r"label = \('cat', .* \(tuple\)", lambda: batch(label=("cat",) * 4)),
    ("label of torch.float32", lambda: batch(label=torch.zeros(4))),
    ("epoch=0.5; give the number", lambda: batch(epoch=0.5)),
    ("a ndarray of images, but takes a tensor", lambda: batch(images=pixels().numpy())),
    *((r"mean is \[.*of pixels divided by 255", lambda mean=mean: pospre.DeviceAugment(mean=mean))
      for mean in ([127.5] * 3, [0.5, 0.5], [-0.1, 0.5, 0.5])),
    (r"std is \[0.*above 0", lambda: pospre.DeviceAugment(std=[0.0, 0.2, 0.2])),
    (r"\(4, 1, 3, 48, 48\), but the model needs \(B, 1, 3, 32, 32\)", lambda: shown(3, 48, 48)),
    (r"\(4, 1, 1, 32, 32\)", lambda: shown(1, 32, 32)),
    (r"\(4, 2, 3, 32, 32\)", lambda: shown(2, 3, 32, 32)),
    # encoders and models of timm
    ("or a timm ViT, not str", lambda: model_of("vits16")),
    *((r"make algorithms with their options, such as \[pospre.MAE",
       lambda wrong=wrong: model_of(timm.create_model(TINY, img_size=32, depth=1), wrong))
      for wrong in ("mae", pospre.MAE)),
    ("image_size is 'a': .*integer", lambda: UNTYPED.build_encoder("vits16", image_size="a")),
    ("build_encoder: name is 5: .*string", lambda: UNTYPED.build_encoder(5)),
    ("Unexpected .*'image_size'", lambda: UNTYPED.build_encoder("vits16", image_sise=32)),
    ("num_registers is -1: .*or equal to 0",
     lambda: UNTYPED.build_encoder("vits16", num_registers=-1)),
    ("Did you mean 'vits16'", lambda: UNTYPED.build_encoder("ViTS16")),
    (f"mean 'timm:{TINY}'", lambda: UNTYPED.build_encoder(TINY)),
    (r"no model 'vit_smal'\. Did you mean '.*vit_small",
     lambda: UNTYPED.build_encoder("timm:vit_smal")),
    ("not a plain Vision Transformer", lambda: wrapped("resnet18")),
    ("not a plain Vision", lambda: wrapped(TINY, **SMALL, mlp_layer=GluMlp)),
    ("not a plain Vision", lambda: wrapped("vit_small_patch16_18x2_224", **SMALL)),
    (r"lacks: blocks\.0\.attn\.norm", lambda: wrapped(TINY, **SMALL, scale_attn_norm=True)),
    (r"\(14, 14\) do not divide its img_size \(30",
     lambda: wrapped(TINY, **{**SMALL, "img_size": 30})),
    ("its tokens differ", lambda: wrapped(TINY, **SMALL, act_layer="relu")),
    # loaders and views
    ("mean 'num_workers'", lambda: loader(num_worker=2)),
    ("mean 'cache_dir'", lambda: loader(cachedir="/")),
    ("of type Tensor", lambda: loader(views=torch.zeros(99))),
    ("batch_size is 2.5: .*integer", lambda: loader(batch_size=2.5)),
    ("'size' is '32' .*whole number", lambda: UNTYPED.ViewGroup(size="32")),
    (r"'size' is \(32,\) .*more entries", lambda: UNTYPED.ViewGroup(size=(32,))),
    *(("10ep", lambda text=text: duration_steps(text, steps_per_epoch=10, batch_size=8))
      for text in ("10", "1.5ep", "10batches", "")),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_a_wrong_argument_is_said(words: str, call: Callable[[], object]) -> None:
    refuses(words, call)
