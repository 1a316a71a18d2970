"""Classification: pooling as in timm, targets, mixing, options, bad input."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm import create_model
from timm.data.mixup import mixup_target

from pospre.algorithms.supervised.supervised import Supervised
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.training.resolve import with_classes

MIXED: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1}


def make(
    encoder: dict[str, Any] | None = None, **options: Any
) -> tuple[PretrainModel, Supervised, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "depth": 2, **(encoder or {})}
    algorithm = Supervised(**{"num_classes": 5, "head_init": 0.5, **options})
    model = PretrainModel(build_encoder("vit_tiny16", **sizes), [algorithm], seed=3)
    batch = {
        "index": torch.arange(6),
        "epoch": torch.full((6,), 2),
        "label": torch.tensor([0, 4, 2, 2, 1, 3]),
        "view/image": torch.randint(0, 256, (6, 1, 3, 32, 32), dtype=torch.uint8),
        "view/flip": torch.zeros(6, 1, dtype=torch.bool),
    }
    return model, algorithm, model.draw(batch)


@pytest.mark.parametrize(("pooling", "timms"), [("cls", "token"), ("mean", "avg")])
def test_logits_are_timms(pooling: str, timms: str) -> None:
    bare = {"final_norm": pooling == "cls", "positions": "learned"}
    model, _, batch = make(bare, pooling=pooling)
    theirs = create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, num_classes=5, global_pool=timms
    ).eval()
    head = model.objectives["supervised"].head
    weights = model.encoder.timm_state()
    weights |= {f"head.{key}": value for key, value in head.linear.state_dict().items()}  # type: ignore[union-attr]
    weights |= {f"fc_norm.{key}": value for key, value in head.norm.state_dict().items()}  # type: ignore[union-attr]
    theirs.load_state_dict(weights)  # strict: the same tensors
    model.eval()
    ours = model(batch)["supervised"]["logits"]
    torch.testing.assert_close(ours, theirs(model.images(batch)[:, 0]), atol=1e-5, rtol=1e-5)


def test_cross_entropy_has_torchs_label_smoothing() -> None:
    model, _, batch = make(label_smoothing=0.1)
    outputs = model(batch)
    logits = outputs["supervised"]["logits"]
    expected = F.cross_entropy(logits, batch["label"], label_smoothing=0.1)
    torch.testing.assert_close(model.loss(outputs, batch)["total"], expected)
    accuracy = model.loss(outputs, batch)["metric/supervised_accuracy"]
    assert accuracy == (logits.argmax(-1) == batch["label"]).float().mean()


def test_targets_of_mixed_images_are_timms() -> None:
    model, _, batch = make(**MIXED)
    logits = model(batch)["supervised"]["logits"]
    loss = model.loss({"supervised": {"logits": logits}}, batch)["total"]
    share = batch["supervised/share"].unsqueeze(1)
    targets = mixup_target(batch["label"], 5, lam=share, smoothing=0.1)
    torch.testing.assert_close(loss, -(targets * F.log_softmax(logits, -1)).sum(-1).mean())


def test_images_are_mixed_in_training_only() -> None:
    model, _, batch = make(**MIXED)
    plain, _, _ = make()
    plain.load_state_dict(model.state_dict())
    assert not torch.equal(
        model(batch)["supervised"]["logits"], plain(batch)["supervised"]["logits"]
    )
    model.eval()
    plain.eval()
    outputs = model(batch)
    assert torch.equal(outputs["supervised"]["logits"], plain(batch)["supervised"]["logits"])
    expected = F.cross_entropy(outputs["supervised"]["logits"], batch["label"], label_smoothing=0.1)
    torch.testing.assert_close(model.loss(outputs, batch)["total"], expected)


def test_binary_cross_entropy_counts_every_mixed_class_as_present() -> None:
    model, _, batch = make(loss="bce", mixup=0.8)
    logits = model(batch)["supervised"]["logits"]
    present = F.one_hot(batch["label"], 5) | F.one_hot(batch["label"].flip(0), 5)
    loss = model.loss({"supervised": {"logits": logits}}, batch)["total"]
    expected = F.binary_cross_entropy_with_logits(logits, present.float())
    torch.testing.assert_close(loss, expected)


def test_head_starts_where_it_is_told() -> None:
    model, _, _ = make({"final_norm": False}, pooling="mean", head_init=2e-5, num_classes=1000)
    head = model.objectives["supervised"].head
    assert 1.5e-5 < float(head.linear.weight.detach().std()) < 2.2e-5  # type: ignore[union-attr,operator]
    assert not head.linear.bias.any()  # type: ignore[union-attr,operator]


def test_the_class_token_must_be_there() -> None:
    with pytest.raises(UserError, match=r"pooling = cls needs a class token"):
        make({"class_token": False})
    assert make({"class_token": False}, pooling="mean")[1].num_classes == 5


def test_classes_of_the_data() -> None:
    given = {"num_classes": None, "pooling": "cls"}
    assert with_classes("supervised", given, ["a", "b"], "x")["num_classes"] == 2
    assert with_classes("supervised", {"num_classes": 9}, ["a", "b"], "x")["num_classes"] == 9
    for classes, message in (
        (None, r"two or more classes, but data.path = x has no labels"),
        (["cat"], r"has one class, cat"),
    ):
        with pytest.raises(UserError, match=message):
            with_classes("supervised", given, classes, "x")
    with pytest.raises(UserError, match=r"num_classes = 2, but data.path = x has 3 classes"):
        with_classes("supervised", {"num_classes": 2}, ["a", "b", "c"], "x")
