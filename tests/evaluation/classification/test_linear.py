"""The published linear probes: optimiser and schedule, what they learn, and their bad input."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torchmetrics.functional.classification import multiclass_accuracy

from pospre.errors import UserError
from pospre.evaluation.classification import linear
from pospre.evaluation.classification.heads import (
    PROTOCOLS,
    Features,
    Kind,
    LinearHead,
    Protocol,
    _optimizer,
    classify,
    kinds_of,
    rate,
    train_heads,
)
from pospre.evaluation.features import Part
from pospre.evaluation.run import check_evaluation
from tests.evaluation.checkpoints import measured, save_checkpoint, tiny_recipe

Images = Callable[..., Path]
CPU = torch.device("cpu")
PART: Part = (1, "mean")
ONE = Features((PART,))


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of five blocks at 32 pixels."""
    recipe = tiny_recipe(
        tmp_path_factory.mktemp("runs"), "mae", depth=5, image_size=32, patch_size=8
    )
    return save_checkpoint(recipe)


def evaluate(checkpoint: Path, data: Path, **settings: Any) -> dict[str, Any]:
    return measured("linear", checkpoint, data, bank=str(data), **settings)


def test_lars_steps_as_in_maes_code() -> None:
    """MAE's: q = 0.001·‖w‖/‖g‖ for matrices alone, μ ← 0.9·μ + q·g, w ← w − lr·μ."""
    draw = torch.Generator().manual_seed(0)
    head = LinearHead(Kind(ONE, "batch", 0.1), 5, 3, draw)
    weight, bias = (p.detach().clone() for p in head.linear.parameters())
    speed_w, speed_b = torch.zeros_like(weight), torch.zeros_like(bias)
    optimizer, lr = _optimizer([head], PROTOCOLS["mae"], 512), 0.2
    for _ in range(3):
        gradient_w = torch.randn(weight.shape, generator=draw)
        gradient_b = torch.randn(bias.shape, generator=draw)
        head.linear.weight.grad, head.linear.bias.grad = gradient_w.clone(), gradient_b.clone()
        optimizer.step()
        speed_w = 0.9 * speed_w + 0.001 * weight.norm() / gradient_w.norm() * gradient_w
        speed_b = 0.9 * speed_b + gradient_b
        weight, bias = weight - lr * speed_w, bias - lr * speed_b
        torch.testing.assert_close(head.linear.weight.detach(), weight, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(head.linear.bias.detach(), bias, atol=1e-6, rtol=1e-5)


def test_rates_are_the_published_ones() -> None:
    assert [rate(PROTOCOLS["vissl"], epoch) for epoch in (0, 7.9, 8, 16, 27)] == pytest.approx(
        [1, 1, 0.1, 0.01, 0.001]
    )
    assert [rate(PROTOCOLS["mae"], epoch) for epoch in (0, 5, 10, 50, 90)] == pytest.approx(
        [0, 0.5, 1, 0.5, 0]
    )
    assert rate(PROTOCOLS["vissl_clevr_count"], 50) == pytest.approx(0.01)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    for epoch in range(10):
        assert rate(PROTOCOLS["dinov2"], epoch) == pytest.approx(torchs.get_last_lr()[0])
        optimizer.step()
        torchs.step()
    short = linear.adjusted(PROTOCOLS["vissl"], {"epochs": 7, "base_lr": 0.5})
    assert (short.milestones, short.base_lrs, short.batch) == ((2, 4, 6), (0.5,), 2048)


def test_what_each_protocol_trains() -> None:
    (mae,) = kinds_of(PROTOCOLS["mae"], "cls", 12)
    assert (mae.features.parts, mae.norm, mae.base_lr) == (((12, "cls"),), "batch", 0.1)
    grid = kinds_of(PROTOCOLS["dinov2"], "cls", 12)
    assert len(grid) == 52 and len({kind.base_lr for kind in grid}) == 13
    assert [str(kind.features) for kind in grid[::13]] == [
        "cls of the last block",
        "cls of the last block + mean",
        "cls of the last 4 blocks",
        "cls of the last 4 blocks + mean",
    ]
    assert grid[-1].features.parts == (*((n, "cls") for n in (9, 10, 11, 12)), (12, "mean"))
    vissl = kinds_of(PROTOCOLS["vissl"], "mean", 12)
    assert [(len(kind.features.parts), kind.norm) for kind in vissl] == [
        (1, "none"),
        (1, "affine"),
        (4, "none"),
        (4, "affine"),
    ]


def test_heads_trained_together_end_where_logistic_regression_does() -> None:
    """Full batches with weight decay have one optimum, scikit-learn's at C = 1/(n·decay)."""
    draw = torch.Generator().manual_seed(0)
    vectors, labels = torch.randn(60, 4, generator=draw), torch.arange(60) % 3
    kinds = [Kind(ONE, "none", lr) for lr in (10.0, 20.0)]
    protocol = Protocol("mean", (1,), ("none",), (10.0,), epochs=400, batch=60, weight_decay=0.05)
    heads = train_heads(
        kinds, protocol, [{PART: vectors}] * 400, labels, 3, dim=4, seed=0, device=CPU
    )
    reference = LogisticRegression(C=1 / (60 * 0.05), fit_intercept=False, tol=1e-9, max_iter=5000)
    both = torch.cat([vectors, torch.ones(60, 1)], 1)  # the bias is decayed, as a weight
    wanted = torch.from_numpy(reference.fit(both, labels).predict_proba(both)).float()
    for head in heads:
        found = head({PART: vectors}).softmax(1).detach()
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)
    predicted = classify(heads[0], {PART: vectors}, CPU)
    assert float((predicted == labels).float().mean()) == pytest.approx(
        float(multiclass_accuracy(predicted, labels, 3, average="micro"))
    )


def test_the_choice_is_made_on_what_was_held_back() -> None:
    four = Features(tuple((layer, "mean") for layer in (1, 2, 3, 4)))
    kinds = [Kind(ONE, "none", 0.1), Kind(ONE, "none", 0.2), Kind(four, "none", 0.1)]
    measured = zip(kinds, (0.5, 0.6, 0.55), (60, 40, 70), strict=True)
    heads = [linear.Measured(kind, held, torch.arange(100) < n) for kind, held, n in measured]
    found = linear.summarise({"": heads})
    assert (found["top1"], found["best_top1"], found["initial_top1"]) == (0.4, 0.7, None)
    assert found["standard_error"] == pytest.approx((0.4 * 0.6 / 100) ** 0.5)
    assert [row["top1"] for row in found["features"]] == [0.4, 0.7]
    assert [row["best_top1"] for row in found["features"]] == [0.6, 0.7]


@pytest.mark.parametrize("protocol", ["mae", "dinov2", "vissl", "vissl_clevr_count"])
def test_results_state_what_was_measured(deep: Path, image_folder: Images, protocol: str) -> None:
    data = image_folder(num_images=20)
    settings = {"protocol": protocol, "epochs": 2, "batch": 8}
    results = evaluate(deep, data, **settings)
    assert results["chance"] == 0.5
    held = 0 if protocol == "mae" else 2
    assert (results["bank_samples"], results["held_back"], results["epochs"]) == (20, held, 2)
    assert 0 <= results["initial_top1"] <= 1 and results["best_top1"] >= results["top1"]
    if protocol == "vissl":
        assert evaluate(deep, data, **settings, batch_size=3) == results


def test_crops_and_labels(deep: Path, image_folder: Images, tmp_path: Path) -> None:
    data = image_folder(num_images=40)
    common = {"protocol": "mae", "epochs": 2, "baseline": False}
    results = evaluate(deep, data, **common, augment=True, label_fraction=0.5)
    assert results["bank_samples"] == 20
    names = [path.name for path in sorted(data.rglob("*.jpg"))[:25]]
    (tmp_path / "list.txt").write_text("\n".join(names))
    results = evaluate(deep, data, **common, labels=str(tmp_path / "list.txt"))
    assert results["bank_samples"] == 25


def test_patches_are_enough_without_a_class_token(image_folder: Images, tmp_path: Path) -> None:
    data, bare = image_folder(num_images=12), tiny_recipe(tmp_path, "mae", class_token=False)
    settings = {"bank": str(data), "protocol": "mae", "features": "mean"}
    check_evaluation("linear", bare, data, settings, None)


def test_a_bank_smaller_than_the_batch_is_one_batch() -> None:
    """The rate follows the batch that there is."""
    protocol = replace(PROTOCOLS["mae"], epochs=1, warmup=0)
    vectors = {PART: torch.randn(12, 3)}
    (head,) = train_heads(
        [Kind(ONE, "none", 256 / 12)], replace(protocol, optimizer="sgd"),
        [vectors], torch.arange(12) % 2, 2, dim=3, seed=3, device=CPU,
    )  # fmt: skip
    start = LinearHead(head.kind, 3, 2, torch.Generator().manual_seed(3))
    loss = torch.nn.functional.cross_entropy(start(vectors), torch.arange(12) % 2)
    loss.backward()
    wanted = start.linear.weight - start.linear.weight.grad  # type: ignore[operator]
    torch.testing.assert_close(head.linear.weight, wanted)


def test_classifiers_of_which_none_stays_finite_are_refused(
    deep: Path, image_folder: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverged(*arguments: Any, **options: Any) -> list[LinearHead]:
        heads = train_heads(*arguments, **options)
        heads[0].linear.weight.data.fill_(float("nan"))
        return heads

    monkeypatch.setattr(linear, "train_heads", diverged)
    with pytest.raises(UserError, match=r"no classifier's weights are finite; lower base_lr"):
        evaluate(deep, image_folder(12), protocol="mae", epochs=1, baseline=False)
