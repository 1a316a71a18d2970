"""Nothing but content tells where a patch is, as a training through the real loader finds out.

The swap tests look at the model alone; a leak in draws, labels or data they cannot see. Here small
models are trained on images that tell nothing, blank ones and noise, and asked about others. What
they answer may fit the true places no better than places that are drawn anew (``redraw``), by
accuracy and by log-likelihood, or R². Noise is not resized: neighbours in a resized one have like
edges. sp, loca and part get no noise: their views, or patches, share pixels, which tell rightly how
they lie. Their null is how those of other images lie. masked_position and lejepa have no place to
find: they predict content, of a teacher that knows the place, or of other views.

``python -m tests.model.test_trained_leaks`` prints the table of pospre/algorithms/README.md.
"""

import itertools
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pospre import build_encoder
from pospre.batch import Batch, box_key, field_box_key, flip_key
from pospre.data.loader import build_loader
from pospre.data.views.crop_plan import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import algorithm_class
from pospre.model.model import PretrainModel
from pospre.model.passes import ForgottenPlaces
from pospre.model.position_task import Answers, PlaceObjective, Relations
from pospre.nn.places import Places, mirrored_boxes
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
    ("sp", "sincos", True, "blank"),
    ("sp", "rotary", False, "blank"),
    ("loca", "learned", True, "blank"),
    ("loca", "alibi", False, "blank"),
    ("part", "sincos", True, "blank"),
    ("part", "relative", False, "blank"),
]
"""Methods, scheme, whether there is a class token, and the images."""
OPTIONS: dict[str, dict[str, Any]] = {
    "mae": DECODER,
    "droppos": {**DECODER, "temperature": None},
    "mp3": {"mask_ratio": 0.5, "position_rate": 0.25},
    "crop_field": {},
    "sp": {},
    "loca": {"num_prototypes": 32, "head_hidden": 32, "head_bottleneck": 16},
    "part": {"sizes": (1.0, 1.0)},
}
WHOLE, PART = (0.32, 1.0), (0.05, 0.32)
VIEWS = {
    "sp": {"pair": ViewGroup(name="pair", count=2, size=16, scale=PART)},
    "loca": {
        "view": ViewGroup(size=SIDE, scale=WHOLE),
        "query": ViewGroup(name="query", size=SIDE, scale=WHOLE),
        "focal": ViewGroup(name="focal", count=2, size=12, scale=PART),
    },
    "part": {"part": ViewGroup(name="part", size=SIDE)},
}
Batches = Callable[[str, str], tuple[list[Batch], list[Batch]]]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> Batches:
    return told_nothing(tmp_path_factory.mktemp("told_nothing"))


def told_nothing(root: Path) -> Batches:
    """Return ``get(names, kind)``: the loader's batches to train on, and those to ask about."""
    random = np.random.default_rng(0)
    for kind, shape in (("blank", (1, 1, 3)), ("noise", (SIDE, SIDE, 3))):
        for part in ("train", "test"):
            folder = root / kind / part / "images"
            folder.mkdir(parents=True)
            for number in range(4 * BATCH):
                pixels = np.zeros((SIDE, SIDE, 3), np.uint8) + random.integers(0, 256, shape, "u1")
                Image.fromarray(pixels).save(folder / f"{number:03}.png")

    @cache
    def load(names: str, kind: str, part: str, count: int) -> list[Batch]:
        alone = ViewGroup(size=SIDE, crop="random" if kind == "blank" else "full")
        views = VIEWS.get(names, alone)
        loader = build_loader(
            root / kind / part, batch_size=BATCH, views=views, num_workers=0, seed=1
        )
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        return list(itertools.islice(epochs, count))

    def get(names: str, kind: str) -> tuple[list[Batch], list[Batch]]:
        own = names if names in VIEWS else ""
        return load(own, kind, "train", STEPS), load(own, kind, "test", 4)

    return get


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
    model = PretrainModel(encoder, made, seed=3, views=VIEWS.get(names))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    train, test = batches(names, kind)
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
    counted = found.true[..., 0] if isinstance(found, Relations) else found.places[found.counted]
    # an answer more, where all draws are alike
    return float(((fit(found) - drawn.mean(0)) / drawn.std(0).clamp_min(1 / counted.numel())).max())


def fit(found: Answers | Relations) -> Tensor:
    """Return accuracy and log-likelihood of the places that count, or R² of each number."""
    if isinstance(found, Relations):
        return found.score().double()
    log_prob = found.logits.double().log_softmax(-1)
    given = log_prob.gather(2, found.places.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    return torch.stack([found.score().double(), given[found.counted].mean()])


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


@pytest.mark.parametrize("names", ["sp", "loca"])
def test_a_view_that_knows_where_it_lies_is_found(
    names: str, batches: Batches, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = PretrainModel.prepare

    def tell(self: PretrainModel, batch: Batch, progress: Any) -> Batch:
        batch = prepare(self, batch, progress)
        for group in self.views:
            box = mirrored_boxes(batch[box_key(group)], batch[flip_key(group)])
            batch[field_box_key(group)] = box
        return batch

    monkeypatch.setattr(PretrainModel, "prepare", tell)
    assert excess(answers(names, "sincos", True, "blank", batches)) > 1.5 * LIMIT


def test_each_scheme_and_each_method_is_trained_on_both_kinds_of_images() -> None:
    kinds = {(names, kind) for names, _, _, kind in COVERING}
    assert kinds == {(names, kind) for names, *_ in COVERING for kind in kinds_of(names)}
    kinds = {(scheme, kind) for _, scheme, _, kind in COVERING}
    assert kinds == {*itertools.product({*SCHEMES} - {"none"}, ("blank", "noise"))}


def kinds_of(names: str) -> tuple[str, ...]:
    return ("blank",) if names in VIEWS else ("blank", "noise")


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
        found = [answers(names, scheme, True, kind, batches) for kind in kinds_of(names)]
    except UserError:
        return "refused"
    return " ".join(f"{excess(each):.1f}" for each in found)


if __name__ == "__main__":
    print(table())
