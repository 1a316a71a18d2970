"""Feature maps: what drop path drops while an encoder is fine-tuned."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from pospre.evaluation.dense.maps import FeatureMaps
from pospre.evaluation.dense.settings import Learned
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from tests.evaluation.dense.pictures import mask_folder, voc_folder
from tests.evaluation.dense.test_detection import SMALL
from tests.refusals import refuses


@pytest.fixture
def model() -> PretrainModel:
    encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=3)
    encoder.drop_path = 0.9  # of its pre-training: no business of a fine-tuning
    return PretrainModel(encoder, seed=0).eval()


def learned(model: PretrainModel, images_BCHW: Tensor, **options: Any) -> list[Tensor]:
    """Return what two steps of a fine-tuning see of the same images."""
    maps = FeatureMaps(model, (3,), norm=True, learned=Learned(finetune=True, **options))
    return [maps(images_BCHW)[0] for _ in range(2)]


def test_paths_are_dropped_while_an_encoder_learns_and_by_the_seed(model: PretrainModel) -> None:
    images = torch.randn(8, 3, 32, 32)
    whole, same = learned(model, images)
    assert torch.equal(whole, same)
    first, second = learned(model, images, drop_path=0.5)
    again = learned(model, images, drop_path=0.5)
    others = learned(model, images, drop_path=0.5, seed=1)
    assert not torch.equal(first, whole) and not torch.equal(first, second)
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])
    assert not torch.equal(first, others[0])
    alike = torch.randn(1, 3, 32, 32).expand(8, -1, -1, -1)
    shown, _ = learned(model, alike, drop_path=0.5)
    assert len(shown.flatten(1).detach().unique(dim=0)) > 1  # each image for itself


def test_nothing_is_dropped_where_it_is_measured_or_does_not_learn(model: PretrainModel) -> None:
    images = torch.randn(4, 3, 32, 32)
    (wanted,) = FeatureMaps(model, (3,), norm=True)(images)
    with torch.no_grad():
        learned = Learned(finetune=True, drop_path=0.5)
        (measured,) = FeatureMaps(model, (3,), norm=True, learned=learned)(images)
    torch.testing.assert_close(measured, wanted)
    assert model.encoder.drop_path == 0.9


@pytest.mark.parametrize("name", ["detection", "segmentation"])
def test_both_evaluations_drop_paths(
    name: str, measure: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any]
    if name == "detection":
        data, settings = voc_folder(tmp_path, {"train": 2, "val": 1}), {**SMALL}
    else:
        data, settings = mask_folder(tmp_path, {"train": 4, "val": 2}), {"batch_size": 2}
    settings |= {"iterations": 2, "baseline": False, "drop_path": 0.25, "seed": 5}
    refuses(r"drop_path=0.25 needs a trained encoder", lambda: measure(name, data, **settings))
    made = Mock(wraps=FeatureMaps)
    monkeypatch.setattr(f"pospre.evaluation.dense.{name}.{name}.FeatureMaps", made)
    measure(name, data, finetune=True, **settings)
    (call,) = made.call_args_list
    assert (call.kwargs["learned"].drop_path, call.kwargs["learned"].seed) == (0.25, 5)
