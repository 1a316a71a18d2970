"""The class head's accuracy, and evaluating and exporting a teacher."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchmetrics.functional.classification import multiclass_accuracy

from pospre import evaluate as command
from pospre.errors import UserError
from pospre.evaluation.classification.accuracy import log_probabilities, rank_of
from pospre.evaluation.classification.class_sets import HeadClasses
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.features import centre_batches
from pospre.evaluation.registry import Context
from pospre.exporting.export import export
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.build import load_model
from tests.evaluation.checkpoints import measured, printed_model, save_checkpoint, tiny_recipe
from tests.refusals import refuses
from tests.run.checkpoints.checkpoint_files import write_checkpoint

Images = Callable[..., Path]


measure = partial(measured, "accuracy")


def make(
    folder: Path,
    *others: str,
    encoder: dict[str, Any] | None = None,
    classes: Sequence[str] | None = None,
    **options: Any,
) -> Path:
    """Return a checkpoint of a classifier, of two classes without names by default."""
    number = 2 if classes is None else len(classes)
    algorithms = {"supervised": {"num_classes": number, **options}, **{name: {} for name in others}}
    recipe = tiny_recipe(folder, algorithms, **{"depth": 1, **(encoder or {})})
    return save_checkpoint(recipe, classes=classes)


def test_ranks() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0], [1.0, 1.0, 1.0]])
    assert rank_of(logits, torch.tensor([1, 0, 2])).tolist() == [0, 2, 2]


def test_accuracy_is_counted_over_the_images(tmp_path: Path, image_folder: Images) -> None:
    checkpoint = make(tmp_path / "runs")
    data = image_folder(num_images=10)
    model, _ = load_model(str(checkpoint))
    bias = model.objectives["supervised"].head.linear.bias  # type: ignore[union-attr]
    content = read_checkpoint(str(checkpoint)).content
    key = "objectives.named.supervised.head.linear.bias"
    content["state"]["model"][key] = torch.tensor([100.0, -100.0]).to(bias.dtype)  # type: ignore[arg-type]
    write_checkpoint(content, checkpoint)
    results = measure(checkpoint, data, batch_size=4)
    assert results == {
        "top1": 0.5,
        "top5": None,
        "standard_error": pytest.approx(0.025**0.5),
        "members": None,
        "samples": 10,
        "classes": 2,
        "chance": 0.5,
    }


def test_what_cannot_be_measured(tmp_path: Path, image_folder: Images) -> None:
    checkpoint = make(tmp_path / "runs")
    three = image_folder(num_images=6, classes=("a", "b", "c"), name="three")
    refuses(r"has 3 classes, but the head has 2", lambda: measure(checkpoint, three))
    with pytest.raises(UserError, match=r"accuracy: it needs labels"):
        measure(checkpoint, image_folder(classes=(), name="flat"))


def test_classes_are_matched_by_name(
    tmp_path: Path, image_folder: Images, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = ("bird", "cat", "dog", "elk", "fox", "gnu")
    checkpoint = make(tmp_path / "runs", classes=kinds, head_init=1.0)
    data = image_folder(12, classes=("dog", "fox"), name="some")
    results = measure(checkpoint, data, batch_size=12)
    assert "has 2 of the head's 6 classes" in capsys.readouterr().err
    model, _ = load_model(str(checkpoint))
    context = Context(model, lambda: model, str(data), torch.device("cpu"), progress=False)
    (batch,) = centre_batches(context, Sampling(batch_size=12, num_workers=1))
    scores = log_probabilities(model, model.images(batch)[:, 0], batch)
    places = torch.tensor([2, 4])[batch["label"]]
    for key, top_k in (("top1", 1), ("top5", 5)):
        wanted = multiclass_accuracy(scores, places, 6, average="micro", top_k=top_k)
        assert results[key] == pytest.approx(float(wanted))
    whole = image_folder(12, classes=kinds, name="whole")
    assert measure(checkpoint, whole)["classes"] == 6 and not capsys.readouterr().err


def test_other_classes_are_refused(
    tmp_path: Path, image_folder: Images, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make(tmp_path / "runs", classes=("cat", "dog", "elk"))
    other = image_folder(6, classes=("dog", "elk", "fox"), name="other")
    for evaluation, settings in (
        ("accuracy", {}),
        ("grad_cam", {"target": "label"}),
        ("robustness", {}),
    ):
        with pytest.raises(UserError, match=f"{evaluation}: the class 'fox' of .*other is not"):
            measured(evaluation, checkpoint, other, **settings)
    member = make(tmp_path / "member", classes=("cat", "dog", "fox"))
    same = image_folder(6, classes=("cat", "dog", "elk"), name="same")
    with pytest.raises(UserError, match=r"other classes than .* \(first difference: 'elk'\)"):
        measure(checkpoint, same, ensemble=str(member))
    unnamed = make(tmp_path / "unnamed")
    capsys.readouterr()
    assert measure(unnamed, image_folder(6, name="ab"))["samples"] == 6
    assert "classes of the training data have no names" in capsys.readouterr().err


def test_the_teacher_is_measured(
    tmp_path: Path, image_folder: Images, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = make(tmp_path / "runs", "ema_teacher")
    student, _ = load_model(str(checkpoint))
    teacher, _ = load_model(str(checkpoint), weights="teacher")
    saved = read_checkpoint(str(checkpoint)).content["state"]["model"]
    for key, value in teacher.encoder.state_dict().items():
        assert torch.equal(value, saved[f"teacher.module.{key}"])
        assert not torch.equal(student.encoder.state_dict()[key], value)
    head = teacher.objectives["supervised"].head.linear.weight  # type: ignore[union-attr]
    assert torch.equal(
        head,  # type: ignore[arg-type]
        saved["objectives.named.supervised.teacher_head.module.linear.weight"],
    )
    arguments = ["accuracy", "--model", str(checkpoint), "--data", str(image_folder())]
    assert command.main([*arguments, "--weights", "teacher"]) == 0
    document = json.loads((checkpoint.parents[1] / "evaluation/accuracy_teacher.json").read_text())
    assert document["weights"] == "teacher" and document["name"] == "accuracy"


@pytest.mark.parametrize(
    ("pooling", "final", "positions"),
    [
        ("cls", True, "sincos"),
        ("cls", False, "relative"),
        ("mean", True, "relative"),
        ("mean", False, "sincos"),
    ],
)
def test_timm_gets_the_trained_classifier(
    tmp_path: Path, pooling: str, final: bool, positions: str
) -> None:
    encoder = {"final_norm": final, "positions": positions}
    checkpoint = make(tmp_path / "runs", encoder=encoder, pooling=pooling, head_init=0.5)
    out = tmp_path / "classifier.pth"
    lines = export(str(checkpoint), out, format="timm")
    assert "features and logits are ours" in "\n".join(lines)
    images = torch.randn(2, 3, 64, 64)
    model, _ = load_model(str(checkpoint))
    ours = model.objectives["supervised"]({"student": model.encoder(images)}, {})["logits"]
    torch.testing.assert_close(printed_model(lines)(images), ours, atol=1e-4, rtol=1e-4)


def test_a_label_that_the_head_does_not_know_is_said() -> None:
    with pytest.raises(UserError, match="val has a label 5, but there are 2 classes"):
        HeadClasses(["a", "b"], None).numbers(torch.tensor([0, 5]), "val")


def test_an_ensemble_averages_probabilities(tmp_path: Path, image_folder: Images) -> None:
    data = image_folder(num_images=12)
    runs = [make(tmp_path / name, head_init=1.0) for name in ("a", "b")]
    model, _ = load_model(str(runs[0]))
    context = Context(model, lambda: model, str(data), torch.device("cpu"), progress=False)
    (batch,) = centre_batches(context, Sampling(batch_size=12, num_workers=1))
    with torch.no_grad():  # one encoder, two heads that share the images out in halves
        features = model.encoder(model.images(batch)[:, 0])[:, 0]
    each = []
    for turn, run in enumerate(runs):
        content = read_checkpoint(str(run)).content
        weights, key = content["state"]["model"], "objectives.named.supervised.head.linear."
        weights[f"{key}weight"] = weights[f"{key}weight"].roll(7 * turn, 1) * (1 + turn)
        logits = features @ weights[f"{key}weight"].T
        weights[f"{key}bias"] = -logits.median(0).values
        write_checkpoint(content, run)
        each.append((logits + weights[f"{key}bias"]).softmax(1))
    results = measure(runs[0], data, ensemble=str(runs[1]))
    mean = (each[0] + each[1]) / 2
    for probabilities, top1 in (
        (mean, results["top1"]),
        *zip(each, results["members"], strict=True),
    ):
        wanted = multiclass_accuracy(probabilities, batch["label"], 2, average="micro")
        assert top1 == pytest.approx(float(wanted))
    assert len({tuple(p.argmax(1).tolist()) for p in (mean, *each)}) > 1


def test_an_ensemble_that_does_not_fit_is_said(
    tmp_path: Path, image_folder: Images, mae_checkpoint: Path
) -> None:
    checkpoint, data = make(tmp_path / "runs"), image_folder()
    with pytest.raises(UserError, match=r"was trained with mae and has no class head"):
        measure(checkpoint, data, ensemble=str(mae_checkpoint))
    small = make(tmp_path / "small", encoder={"image_size": 32})
    with pytest.raises(UserError, match=r"has 2 classes and images of \[32, 32\] pixels"):
        measure(checkpoint, data, ensemble=str(small))
    refuses("nowhere", lambda: measure(checkpoint, data, ensemble="nowhere"))
    with pytest.raises(UserError, match="has the same weights as the measured model"):
        measure(checkpoint, data, ensemble=str(checkpoint))
