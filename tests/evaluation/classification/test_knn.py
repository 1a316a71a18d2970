"""The kNN core against plain Python, its limits, and a whole evaluation."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.classification import knn
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.features import centre_batches, open_labelled
from pospre.evaluation.registry import Context
from pospre.training.build import load_model
from tests.evaluation.checkpoints import measured


def theirs(bank: Tensor, labels: Tensor, k: int, temperature: float) -> KNeighborsClassifier:
    """Return scikit-learn's classifier with the same votes."""
    return KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / temperature)
    ).fit(bank, labels)


@pytest.mark.parametrize(("k", "temperature"), [(1, 0.07), (7, 0.07), (20, 1.0)])
def test_votes_match_scikit_learn(k, temperature, monkeypatch):
    monkeypatch.setattr(knn, "SIMILARITIES_AT_ONCE", 7 * 80)  # several chunks, the last one ragged
    generator = torch.Generator().manual_seed(5)
    bank, queries = torch.randn(80, 6, generator=generator), torch.randn(40, 6, generator=generator)
    labels = torch.randint(0, 5, (80,), generator=generator)
    found = knn.nearest_class(queries, bank, labels, k=k, temperature=temperature)
    assert found.tolist() == theirs(bank, labels, k, temperature).predict(queries).tolist()


def test_leave_one_out_never_votes_for_itself(monkeypatch):
    monkeypatch.setattr(knn, "SIMILARITIES_AT_ONCE", 3 * 20)
    bank = torch.randn(20, 6, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 3
    found = knn.nearest_class(bank, bank, labels, k=4, temperature=0.07, leave_one_out=True)
    for i in range(20):
        others = [j for j in range(20) if j != i]
        wanted = theirs(bank[others], labels[others], 4, 0.07).predict(bank[i : i + 1])
        assert found[i] == int(wanted[0])


def test_tiny_temperature_stays_finite():
    bank = torch.tensor([[1.0, 0.5], [1.0, 0.0]])  # both weights overflow if taken plainly
    query = torch.tensor([[1.0, 0.0]])
    found = knn.nearest_class(query, bank, torch.tensor([0, 1]), k=2, temperature=1e-4)
    assert found.tolist() == [1]


evaluate = partial(measured, "knn")


def test_results_state_what_was_measured(mae_checkpoint, image_folder):
    results = evaluate(mae_checkpoint, image_folder(num_images=10), k=3, batch_size=4)
    assert (results["k"], results["temperature"], results["features"]) == (3, 0.07, "mean")
    assert (results["bank_samples"], results["query_samples"], results["classes"]) == (10, 10, 2)
    assert results["leave_one_out"] and results["left_out"] == 0 and results["chance"] == 0.5
    assert 0 <= results["top1"] <= 1 and 0 <= results["initial_top1"] <= 1


def test_images_that_are_in_the_bank_are_found_and_that_is_said(
    mae_checkpoint, image_folder, capsys
):
    data = image_folder(num_images=10)
    for features in ("mean", "cls", "prefix"):
        results = evaluate(mae_checkpoint, data, bank=str(data), k=1, features=features)
        assert results["top1"] == results["initial_top1"] == 1.0
        assert not results["leave_one_out"]
        assert f"warning: knn: bank={data} is the measured data" in capsys.readouterr().err


def test_single_images_of_a_class_are_left_out(mae_checkpoint, image_folder):
    data = image_folder(num_images=6)
    image_folder(num_images=1, classes=("single",), name="images")
    results = evaluate(mae_checkpoint, data, k=2, baseline=False)
    assert (results["query_samples"], results["left_out"], results["classes"]) == (6, 1, 3)
    assert results["initial_top1"] is None


def test_one_image_per_class_says_why_it_is_meaningless(mae_checkpoint, image_folder):
    data = image_folder(num_images=4, classes=("a", "b", "c", "d"))
    with pytest.raises(UserError, match=r"one image per class.*no image has a neighbour"):
        evaluate(mae_checkpoint, data, k=2)


def test_a_class_folder_without_images_is_said(image_folder):
    data = image_folder(num_images=4)
    (data / "zebra").mkdir()
    (data / ".cache").mkdir()
    with pytest.warns(UserWarning, match=rf"{data}: folders that are no classes, .*: zebra$"):
        assert open_labelled(str(data)).classes is not None


def test_small_views_show_the_whole_image(mae_checkpoint, image_folder):
    model, _ = load_model(str(mae_checkpoint))
    data = str(image_folder(num_images=2))
    boxes = {}
    for side in (32, 64):
        model.encoder.image_size = (side, side)
        context = Context(model, lambda: model, data, torch.device("cpu"), progress=False)
        (batch,) = centre_batches(context, Sampling(batch_size=2, num_workers=1))
        boxes[side] = batch["view/box"][0, 0].tolist()
    assert boxes[32] == [0, 0, 1, 1]
    assert boxes[64][0] > 0


def test_every_layer_is_measured(mae_checkpoint, image_folder):
    data = image_folder(num_images=10)
    common = {"k": 3, "bank": str(data), "num_samples": 8, "num_bank": 6}
    whole = evaluate(mae_checkpoint, data, **common)
    assert whole["bank_samples"] == 6
    results = evaluate(mae_checkpoint, data, **common, layers="all")
    assert [row["layer"] for row in results["layers"]] == [0, 1, 2]
    for key in ("top1", "initial_top1", "standard_error"):  # the last layer is the encoder's output
        assert results[key] == results["layers"][-1][key] == whole[key]
    assert whole["layers"] is None
    one = evaluate(mae_checkpoint, data, **common, layers="1", features="cls", baseline=False)
    assert [row["layer"] for row in one["layers"]] == [1] and one["initial_top1"] is None


@pytest.mark.parametrize(("classes", "least"), [(2, 0.625), (10, 0.2), (1000, 0.002)])
def test_a_start_near_guessing_is_told(classes: int, least: float) -> None:
    found: dict[str, Any] = {"chance": 1 / classes}
    assert knn.alarms(found) == knn.alarms({**found, "start_top1": 1.001 * least}) == []
    (line,) = knn.alarms({**found, "start_top1": 0.999 * least})
    assert line.startswith("the start hardly tells these classes apart: ")
