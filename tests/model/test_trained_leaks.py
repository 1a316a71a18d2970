"""Nothing but content tells where a patch is, as a training through the real loader finds out.

The swap tests look at the model alone; a leak in draws, labels or data they cannot see. Here small
models are trained on images that tell nothing, blank ones and noise, and asked about others. What
they answer may fit the true places no better than places that are drawn anew (``redraw``), by
accuracy and by log-likelihood. Noise is not resized: neighbours in a resized one have like edges.
masked_position has no place to find: it predicts content, of a teacher that knows the place.

``python -m tests.model.test_trained_leaks`` prints the table of pospre/algorithms/README.md.
"""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pospre import build_encoder
from pospre.batch import Batch
from pospre.data.loader import build_loader
from pospre.data.views.crop_plan import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import algorithm_class
from pospre.model.model import PretrainModel
from pospre.model.passes import ForgottenPlaces
from pospre.model.position_task import Answers, PlaceObjective, Relations
from pospre.nn.places import Places
from pospre.nn.positions import SCHEMES
from pospre.output import markdown_table
from tests.algorithms.cases import DECODER

SIDE, PATCH, BATCH = 24, 4, 64
STEPS, REDRAWS, LIMIT = 36, 48, 5.0
COVERING = [
    ("droppos", "sincos", True, "blank"),
    ("droppos", "learned", True, "blank"),
    ("droppos", "rotary", False, "blank"),
    ("droppos", "alibi", False, "blank"),
    ("droppos", "relative", True, "noise"),
    ("mae+droppos", "learned_sincos", True, "blank"),
    ("mae+droppos", "rotary_mixed", False, "noise"),
    ("mae+droppos", "learned_rotary", True, "blank"),
    ("mae+droppos", "lookhere", True, "noise"),
    ("mae+droppos", "shared_relative", False, "blank"),
    ("mae+droppos", "torus", True, "blank"),
    ("droppos+crop_field", "rotary_mixed", True, "blank"),
    ("droppos+crop_field", "learned", False, "noise"),
    ("mp3", "sincos", False, "noise"),
    ("mp3", "rotary", True, "noise"),
    ("mp3", "alibi", True, "noise"),
    ("mp3", "torus", False, "noise"),
    ("mp3", "relative", False, "blank"),
    ("mp3", "shared_relative", True, "noise"),
    ("mp3+crop_field", "learned_sincos", False, "noise"),
    ("mp3+crop_field", "learned_rotary", False, "noise"),
    ("mp3+crop_field", "lookhere", True, "blank"),
]
"""Methods, scheme, whether there is a class token, and the images."""
OPTIONS: dict[str, dict[str, Any]] = {
    "mae": DECODER,
    "droppos": {**DECODER, "temperature": None},
    "mp3": {"mask_ratio": 0.5, "position_rate": 0.25},
    "crop_field": {},
}
Batches = Callable[[str], tuple[list[Batch], list[Batch]]]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Batches:
    return told_nothing(tmp_path_factory.mktemp("told_nothing"))


def told_nothing(root: Path) -> Batches:
    """Return ``get(kind)``: the loader's batches to train on, and of other images to ask about."""
    random, loaded = np.random.default_rng(0), {}
    for kind, view, shape in (
        ("blank", ViewGroup(size=SIDE), (1, 1, 3)),
        ("noise", ViewGroup(size=SIDE, crop="full"), (SIDE, SIDE, 3)),
    ):
        for part, count in (("train", STEPS), ("test", 4)):
            folder = root / kind / part / "images"
            folder.mkdir(parents=True)
            for number in range(4 * BATCH):
                pixels = np.zeros((SIDE, SIDE, 3), np.uint8) + random.integers(0, 256, shape, "u1")
                Image.fromarray(pixels).save(folder / f"{number:03}.png")
            loader = build_loader(
                folder.parent, batch_size=BATCH, views=view, num_workers=0, seed=1
            )
            epochs = itertools.chain.from_iterable(itertools.repeat(loader))
            loaded[kind, part] = list(itertools.islice(epochs, count))
    return lambda kind: (loaded[kind, "train"], loaded[kind, "test"])


def answers(
    names: str, scheme: str, class_token: bool, kind: str, batches: Batches, **options: Any
) -> Answers | Relations:
    """Train a small model and ask it where the patches of images are that it has never seen.

    It is asked in training mode, in which it could learn to use a leak.
    """
    torch.manual_seed(0)
    encoder = build_encoder(
        "speech8",
        image_size=SIDE,
        patch_size=PATCH,
        channels=3,
        depth=2,
        positions=scheme,
        class_token=class_token,
    )
    made = [algorithm_class(name)(**OPTIONS[name], **options) for name in names.split("+")]
    model = PretrainModel(encoder, made, seed=3)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    train, test = batches(kind)
    for step, batch in enumerate(train):
        optimizer.zero_grad()
        model(dict(batch), progress=step / STEPS).loss.backward()
        optimizer.step()
        model.after_step(step / STEPS)
    name, head = next(
        (name, each)
        for name, each in model.objectives.named.items()
        if isinstance(each, PlaceObjective)
    )
    found: list[Any] = []
    with torch.no_grad():
        for given in test:
            batch = model.prepare(dict(given), 1.0)
            outputs = model(batch)[name]
            found.append(head.answers(outputs, batch))
    return type(found[0])(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def excess(found: Answers | Relations) -> float:
    """Return by how many standard deviations truths fit better than those drawn anew."""
    drawn = torch.stack([fit(found.redraw(number)) for number in range(REDRAWS)])
    # an answer more, where all draws are alike
    floor = 0.0 if isinstance(found, Relations) else 1 / int(found.counted.sum())
    return float(((fit(found) - drawn.mean(0)) / drawn.std(0).clamp_min(floor)).max())


def fit(found: Answers | Relations) -> Tensor:
    """Return accuracy and log-likelihood of the places that count, or R² of each number."""
    if isinstance(found, Relations):
        return found.r2().double()
    log_prob = found.logits.double().log_softmax(-1)
    given = log_prob.gather(2, found.places.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([found.accuracy().double(), given[found.counted].mean()])


@pytest.mark.parametrize(("names", "scheme", "class_token", "kind"), COVERING)
def test_what_cannot_be_seen_is_not_found(
    names: str, scheme: str, class_token: bool, kind: str, batches: Batches
) -> None:
    assert excess(answers(names, scheme, class_token, kind, batches)) < LIMIT


@pytest.mark.parametrize(
    "options", [{"position_token": "wrong"}, {"sampling": "uniform"}, {"mask_ratio": 0.0}]
)
def test_what_else_is_drawn_tells_nothing(options: dict[str, Any], batches: Batches) -> None:
    assert excess(answers("droppos", "sincos", True, "blank", batches, **options)) < LIMIT


@pytest.mark.parametrize("names", ["droppos", "mp3"])
def test_a_planted_leak_is_found(
    names: str, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(self: ForgottenPlaces, places: Places, *_: Any) -> Places:
        return places

    monkeypatch.setattr(ForgottenPlaces, "forward", keep)
    assert excess(answers(names, "sincos", True, "blank", batches)) > 2 * LIMIT


def test_each_scheme_and_each_method_is_trained_on_both_kinds_of_images() -> None:
    for place in (0, 1):
        found = [case[place] for case in COVERING]
        assert {(case[place], case[3]) for case in COVERING} == {
            *itertools.product(found, ("blank", "noise"))
        }
    assert {case[1] for case in COVERING} == {*SCHEMES} - {"none"}


def table() -> str:
    """Return by how many standard deviations each pair finds places, on blank and noise images."""
    schemes = [scheme for scheme in SCHEMES if scheme != "none"]
    rows = []
    with tempfile.TemporaryDirectory() as root:
        batches = told_nothing(Path(root))
        for names in dict.fromkeys(case[0] for case in COVERING):
            cells = [_cell(names, scheme, batches) for scheme in schemes]
            rows.append([names.replace("+", ", "), *cells])
    return markdown_table(["", *schemes], rows)


def _cell(names: str, scheme: str, batches: Batches) -> str:
    try:
        found = [answers(names, scheme, True, kind, batches) for kind in ("blank", "noise")]
    except UserError:
        return "refused"
    return " ".join(f"{excess(each):.1f}" for each in found)


if __name__ == "__main__":
    print(table())
