"""Corrupted images, other positions and other data sets: what is done, and who counts as right."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from sklearn.metrics import average_precision_score
from torchmetrics.functional.classification import multiclass_accuracy

from pospre.errors import UserError
from pospre.evaluation.classification import robustness_conditions
from pospre.evaluation.classification.accuracy import log_probabilities
from pospre.evaluation.classification.class_sets import open_class_set
from pospre.evaluation.classification.settings import Robustness
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.features import centre_batches
from pospre.evaluation.registry import Context
from pospre.evaluation.run import check_evaluation
from pospre.nn.places import Places
from pospre.training.build import build_model, load_model
from tests.algorithms.cases import random_views
from tests.evaluation.checkpoints import measured, save_checkpoint, tiny_recipe
from tests.swin_runs import SUPERVISED, small_swin

Images = Callable[..., Path]
NAMES = ("n01", "n02", "n03", "n04")
BATCH_SIZE = 5


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of a classifier of four classes at 32 pixels."""
    algorithms = {"supervised": {"num_classes": 4, "head_init": 1.0}}
    small = {"image_size": 32, "patch_size": 8, "depth": 1}
    recipe = tiny_recipe(tmp_path_factory.mktemp("runs"), algorithms, **small)
    return save_checkpoint(recipe, classes=NAMES)


def scores_of(checkpoint: Path, data: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities (M, C) and labels of a data set's centre views.

    Batches are as large as below: others change last bits, and by them the order of equals.
    """
    model, _ = load_model(str(checkpoint))
    context = Context(model, lambda: model, str(data), torch.device("cpu"), progress=False)
    sampling = Sampling(batch_size=BATCH_SIZE, num_workers=1)
    batches = [*centre_batches(context, sampling)]
    scores = [log_probabilities(model, model.images(each)[:, 0], each) for each in batches]
    return torch.cat(scores), torch.cat([each["label"] for each in batches])


def batch_of(*indices: int) -> dict[str, torch.Tensor]:
    return {"index": torch.tensor(indices)}


def test_boxes_are_painted() -> None:
    images = torch.rand(3, 3, 20, 12) + 1
    middle = robustness_conditions.occlude(images, batch_of(0, 1, 2), 0, side=0.5, anywhere=False)
    assert (middle[..., 5:15, 3:9] == 0).all() and int((middle == 0).sum()) == 3 * 3 * 10 * 6
    assert torch.equal(middle[..., :5, :], images[..., :5, :])
    box = partial(robustness_conditions.occlude, side=0.5, anywhere=True)
    moved = box(images, batch_of(0, 1, 2), 0)
    assert ((moved == 0).sum((1, 2, 3)) == 3 * 10 * 6).all()
    assert torch.equal(moved[1:], box(images[1:], batch_of(1, 2), 0))
    assert not torch.equal(moved, box(images, batch_of(0, 1, 2), 1))


def test_whole_patches_are_painted() -> None:
    images = torch.rand(2, 3, 16, 24) + 1
    dropped = robustness_conditions.drop_patches(images, batch_of(4, 5), 0, grid=(4, 6), ratio=0.75)
    patches = (dropped == 0).unflatten(3, (6, 4)).unflatten(2, (4, 4)).float().mean((1, 3, 5))
    assert sorted(patches[0].flatten().tolist()) == [0] * 6 + [1] * 18
    assert not torch.equal(patches[0], patches[1])


def test_tiles_change_places() -> None:
    images = torch.arange(2 * 4 * 4.0).view(2, 1, 4, 4)
    mixed = robustness_conditions.shuffle_tiles(images, batch_of(0, 7), 0, tiles=(2, 2))

    def tiles(image: torch.Tensor) -> list[list[float]]:
        cut = image.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 4)
        return sorted(cut.tolist())

    assert all(tiles(a) == tiles(b) for a, b in zip(images, mixed, strict=True))
    assert not torch.equal(images, mixed)


def test_positions_move() -> None:
    places, device = Places((4, 6)), torch.device("cpu")
    sides = torch.tensor([4, 6])

    def patches(moved: Places) -> torch.Tensor:  # (4, 6, 2) in patches, 0 the first one's centre
        return moved.coordinates(device)[0].unflatten(0, (4, 6)) * sides - 0.5

    shifted = patches(robustness_conditions.shifted_places(places, device, by=1))
    assert shifted[0, 0].tolist() == pytest.approx([1, 1])
    assert shifted[3, 5].tolist() == pytest.approx([0, 0], abs=1e-6)
    scaled = patches(robustness_conditions.middle_places(places, device, by=0.5))
    assert scaled[0, 0].tolist() == pytest.approx([0.75, 1.25])  # (0.5·x + middle) in patches
    whole = patches(robustness_conditions.middle_places(places, device, by=1.0))
    torch.testing.assert_close(whole, patches(places))
    known = robustness_conditions.no_places(places, device).known
    assert known is not None and not known.any()


def test_figures_are_those_of_other_libraries(
    classifier: Path, image_folder: Images, tmp_path: Path
) -> None:
    data = image_folder(num_images=24, classes=NAMES)
    some = image_folder(num_images=18, classes=("n02", "n04"), name="some")
    numbered = image_folder(num_images=16, classes=("0", "3", "1"), name="numbered")
    objects = image_folder(num_images=12, classes=("bear", "car"), name="objects")
    strange = image_folder(num_images=7, classes=(), name="strange")
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"bear": ["n01", "n03"], "car": [1]}), encoding="utf-16")
    real = tmp_path / "real.json"  # of images 1 to 23; the files here count from 0
    (data / "n01" / "0000.jpg").rename(data / "n01" / "val_0024.jpg")
    real.write_text(json.dumps([[n % 4, (n + 1) % 4] if n % 3 else [] for n in range(1, 25)]))
    results = measured(
        "robustness", classifier, data, sets=f"{some},{numbered},{objects}", lists=str(lists),
        outliers=str(strange), reassessed=str(real), batch_size=BATCH_SIZE,
    )  # fmt: skip
    scores, labels = scores_of(classifier, data)
    clean = multiclass_accuracy(scores, labels, 4, average="micro")
    assert results["clean"] == pytest.approx(float(clean))
    numbers = [int(path.stem.split("_")[-1]) for path in sorted(data.rglob("*.jpg"))]
    answers = dict(zip(numbers, scores.argmax(1).tolist(), strict=True))
    asked = {number: answer for number, answer in answers.items() if number % 3}
    right = [answer in (number % 4, (number + 1) % 4) for number, answer in asked.items()]
    assert results["reassessed"]["top1"] == pytest.approx(sum(right) / 16)
    assert results["reassessed"]["images"] == 16
    kinds = [row["name"] for row in results["conditions"]]
    assert len(kinds) == 9 and kinds[0] == "clean" and "positions shifted by 1" in kinds
    by_name = {Path(row["name"]).name: row for row in results["sets"]}
    found, labels = scores_of(classifier, some)
    wanted = multiclass_accuracy(found[:, [1, 3]], labels, 2, average="micro")
    assert by_name["some"]["top1"] == pytest.approx(float(wanted))
    assert by_name["some"]["classes"] == 2
    found, labels = scores_of(classifier, numbered)  # folders 0, 1 and 3
    wanted = multiclass_accuracy(found[:, [0, 1, 3]], labels, 3, average="micro")
    assert by_name["numbered"]["top1"] == pytest.approx(float(wanted))
    found, labels = scores_of(classifier, objects)
    right = [answer in ({0, 2}, {1})[label] for answer, label in zip(
        found.argmax(1).tolist(), labels.tolist(), strict=True)]  # fmt: skip
    assert by_name["objects"]["top1"] == pytest.approx(sum(right) / len(right))
    surest = torch.cat([scores, scores_of(classifier, strange)[0]]).amax(1)
    aupr = average_precision_score([0] * 24 + [1] * 7, -surest)
    assert results["outlier_aupr"] == pytest.approx(aupr)
    others = [row["top1"] for row in [*results["conditions"][1:], *results["sets"]]]
    assert results["mean"] == pytest.approx(sum(others) / len(others))
    assert "2 x 2 tiles shuffled" in [row["name"] for row in results["conditions"]]


def test_outliers_called_as_classes_are_told_from_images_of_these(
    classifier: Path, image_folder: Images
) -> None:
    data = image_folder(num_images=24, classes=NAMES)
    strange = image_folder(num_images=10, classes=("n02", "n03"), name="strange")
    results = measured("robustness", classifier, data, outliers=str(strange), batch_size=BATCH_SIZE)
    (scores, labels), (others, _) = (scores_of(classifier, each) for each in (data, strange))
    own = scores[(labels == 1) | (labels == 2)]
    surest = torch.cat([own, others])[:, [1, 2]].softmax(1).amax(1)
    aupr = average_precision_score([0] * len(own) + [1] * 10, -surest)
    assert len(own) == 12 and results["outlier_aupr"] == pytest.approx(aupr)


def test_what_cannot_be_measured_is_said_before(
    classifier: Path, image_folder: Images, tmp_path: Path
) -> None:
    data = image_folder(num_images=8, classes=NAMES)
    other = image_folder(num_images=8, classes=("n01", "cow"), name="other")
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"cow": ["n99"]}))
    short = tmp_path / "short.json"
    short.write_text("[[0], [3]]")
    wrong = tmp_path / "wrong.json"
    wrong.write_text("[1]")
    _, recipe = load_model(str(classifier))
    for settings, said in (
        ({"sets": str(other)}, r"the folder 'cow' of .* matches the class 'cow'"),
        ({"sets": str(other), "lists": str(lists)}, r"'cow' of .* matches the class 'n99'"),
        ({"sets": str(other), "lists": str(wrong)}, "is not a JSON object of lists"),
        ({"sets": str(other), "lists": "no.json"}, "lists=no.json cannot be read"),
        ({"lists": str(lists)}, "give sets=PATH"),
        ({"reassessed": str(short)}, r"lists 2 images by .*0000.jpg has none of these"),
        ({"reassessed": str(wrong)}, "is not a JSON list with a list of class numbers"),
        ({"sets": "nowhere"}, "nowhere does not exist"),
        ({"outliers": "nowhere"}, "nowhere does not exist"),
        ({"shift": "4"}, "shift=4 wraps around the grid of 4 x 4 patches; give less than 4"),
        ({"outliers": str(data)}, "is the measured data itself"),
        ({"tiles": "5"}, "tiles=5 does not divide images of 32 x 32"),
        ({"patch_drop": "0.99"}, "robustness: patch_drop = 0.99 leaves none of the 16"),
    ):
        with pytest.raises(UserError, match=said):
            check_evaluation("robustness", recipe, data, settings, None)


def test_data_of_some_classes_are_measured_as_such(classifier: Path, image_folder: Images) -> None:
    data = image_folder(num_images=12, classes=("n02", "n04"), name="part")
    some = image_folder(num_images=8, classes=("n01", "n03"), name="some")
    strange = image_folder(num_images=6, classes=("n04",), name="strange")
    results = measured(
        "robustness", classifier, data, sets=str(some), outliers=str(strange), batch_size=BATCH_SIZE
    )
    scores, labels = scores_of(classifier, data)
    clean = multiclass_accuracy(scores, torch.tensor([1, 3])[labels], 4, average="micro")
    assert results["clean"] == pytest.approx(float(clean))
    found, labels = scores_of(classifier, some)
    wanted = multiclass_accuracy(found[:, [0, 2]], labels, 2, average="micro")
    assert results["sets"][0]["top1"] == pytest.approx(float(wanted))
    assert results["outlier_aupr"] == pytest.approx(0.5)  # one class: all are equally sure


@pytest.mark.parametrize(
    ("scheme", "wanted"),
    [
        ("none", []),
        ("relative", ["positions shifted by 1"]),
        ("learned", ["positions shifted by 1", "positions of the middle 0.5"]),
    ],
)
def test_positions_are_moved_where_the_scheme_takes_it(
    scheme: str, wanted: list[str], tmp_path: Path
) -> None:
    recipe = tiny_recipe(tmp_path, {"supervised": {"num_classes": 4}}, positions=scheme)
    positions = build_model(recipe).encoder.positions
    settings = Robustness(patch_drop=(0.5,), tiles=())
    names = [row.name for row in robustness_conditions.conditions(settings, (2, 2), positions)]
    assert [name for name in names if "positions" in name] == wanted
    assert len(names) == 4 + len(wanted)


@torch.no_grad()
def test_a_swin_takes_shifted_positions_too(tmp_path: Path) -> None:
    model = build_model(small_swin(tmp_path, "supervised", SUPERVISED, image_size=128)).eval()
    images = random_views(size=2, side=128, seed=0)["view/image"][:, 0].float() / 64 - 2
    moved = robustness_conditions.shifted_places(
        model.encoder.places_of(images), images.device, by=1
    )
    tokens = model.encoder(images, places=moved)
    each = torch.cat([model.encoder(image[None], places=moved) for image in images])
    torch.testing.assert_close(tokens, each, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(tokens, model.encoder(images), atol=1e-3)


def test_class_sets_by_number_and_by_name(image_folder: Images) -> None:
    numbered = image_folder(num_images=4, classes=("0", "2"), name="numbered")
    by_number = open_class_set(str(numbered), list(NAMES), None)
    assert by_number.right.nonzero().tolist() == [[0, 0], [1, 2]]
    by_name = open_class_set(str(numbered), ["2", "1", "0"], None)
    assert by_name.right.nonzero().tolist() == [[0, 2], [1, 0]]
