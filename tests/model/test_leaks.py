"""What an algorithm hides of places reaches no token, by no door: the swap tests.

Coordinates alone: hidden tokens get other places, those of tokens and of free cells, and nothing
may change. Pixels with places: hidden patches exchange what they show, and their tokens must be
exchanged with it, so that neither their order nor their slot tells anything. Both are of what the
head of places answers, if there is one. In float64, on noise, with every parameter drawn anew; each
case first shows that it finds the planted fault.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.batch import place_keys, view_keys
from pospre.evaluation.classification.robustness_conditions import reorder_tiles
from pospre.model.model import PretrainModel
from pospre.model.passes import EncoderPass
from pospre.model.position_task import PositionObjective
from pospre.nn.places import Places
from pospre.nn.positions import SCHEMES
from tests.algorithms.cases import Case, written

pytestmark = pytest.mark.science

EXACT, FELT = 1e-9, 1e-3  # in standard deviations of the tokens
HIDING = [
    ("droppos",),
    ("mae", "droppos"),
    ("ijepa", "droppos"),
    ("supervised", "droppos"),
    ("dinov2", "droppos"),
    ("droppos", "crop_field"),
    ("mae", "droppos", "crop_field"),
    ("dinov2", "masked_position"),
    ("dinov2", "masked_position", "crop_field"),
    ("mp3",),
    ("dinov2", "mp3"),
    ("mp3", "crop_field"),
    ("part",),
    ("mae", "part", "crop_field"),
]
PASSES = {"droppos": "student", "masked_position": "global", "mp3": "student", "part": "part"}
DRAWN = {"rotary": {"shift": 0.1, "jitter": 1.2, "rescale": 2.0}}
TELLING = [name for name in SCHEMES if name != "none"]

Change = Callable[[Places], Places]


def case(names: tuple[str, ...], scheme: Any, class_token: bool, **encoder: Any) -> Case:
    """Return small algorithms over a scheme; without a class token they weigh all patches alike."""
    options: dict[str, dict[str, Any]] = {
        "droppos": {"temperature": None},
        "mp3": {"position_rate": 0.25, "mask_ratio": 0.5},
        "supervised": {"mask_ratio": 0.5, "pooling": "mean"},
    }
    if "crop_field" in names:
        options["crop_field"] = {"field_size": 9 if scheme.startswith("learned") else None}
    encoder |= {"positions": scheme, "class_token": class_token, "final_norm": False}
    return Case(names, {key: options[key] for key in options if key in names}, encoder)


def accepted() -> list[Any]:
    """Return every case that is not refused."""
    found = []
    for names in HIDING:
        for scheme in TELLING:
            boxes = scheme not in ("relative", "shared_relative")
            if "crop_field" in names and not boxes:
                continue
            for class_token in (True, False):
                if "dinov2" in names and not (class_token and boxes):
                    continue  # it compares class tokens, and its crops have two grids
                title = f"{'+'.join(names)}-{scheme}-{int(class_token)}"
                found.append(pytest.param(names, scheme, class_token, id=title))
    return found


class Swap:
    """A model in float64 whose passes are run with changed places, or on changed pixels."""

    def __init__(self, names: tuple[str, ...], chosen: Case) -> None:
        self.model = chosen.build()
        self.model.double()
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.model.parameters():
                noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
                parameter.copy_(0.1 * noise + (parameter.ndim == 1))
        self.name = next(PASSES[name] for name in names if name in PASSES)
        self.batch = written(self.model, chosen.batch(3))
        self.declared = self.model.layout.passes[self.name]
        group = self.declared.group
        shape = self.batch[f"{group}/image"].shape
        if self.model.encoder.positions.is_drawn:
            self.batch[place_keys(group)] = view_keys(self.batch, shape[1], 7, "places")
        self.pixels = torch.randn(shape, generator=draw, dtype=torch.float64)

    @property
    def places(self) -> Places:
        """The places of the pass, as the algorithms leave them."""
        keep = None if self.declared.visible is None else self.batch[self.declared.visible]
        return self.model.pass_places(self.declared, self.batch, keep)

    def exchange_context(self, order: Tensor) -> None:
        """Let the patches that give keys be the same ones, in their new slots."""
        key = self.declared.context
        if key is not None:
            views = self.batch[key].shape[:2]
            slots = order.argsort(dim=1).gather(1, self.batch[key].flatten(0, 1))
            self.batch[key] = slots.unflatten(0, views)

    def modes(self) -> Iterator[bool]:
        """Put the model in training, then in evaluation."""
        for training in (True, False):
            self.model.train(training)
            yield training

    @torch.no_grad()
    def tokens(
        self, change: Change = lambda places: places, pixels: Tensor | None = None
    ) -> Tensor:
        """Return the pass' tokens of the patches, or what is answered, with the places changed."""
        own = PretrainModel.pass_places

        def changed(declared: EncoderPass, batch: dict[str, Tensor], keep: Any) -> Places:
            return change(own(self.model, declared, batch, keep))

        self.model.pass_places = changed  # type: ignore[assignment, method-assign]
        found = self.model.run_pass(
            self.name, self.pixels if pixels is None else pixels, self.batch
        )
        for name in self.model.objectives:
            head = self.model.objectives[name]
            if isinstance(head, PositionObjective):
                return head({self.name: found}, self.batch)["logits"]
        return found[:, self.model.encoder.num_prefix_tokens :]


def other_cells(places: Places) -> Places:
    """Give the hidden tokens other cells: any that no known token stands in."""
    assert places.known is not None
    (rows, cols), (count, tokens) = places.grid, places.known.shape
    cells = places.cells
    if cells is None:
        cells = torch.arange(rows * cols).expand(count, tokens)
    cells = cells.clone()
    draw = torch.Generator().manual_seed(2)
    for row, known in zip(cells, places.known, strict=True):
        free = sorted({*range(rows * cols)} - {*row[known].tolist()})
        order = torch.randperm(len(free), generator=draw)[: int((~known).sum())]
        row[~known] = torch.tensor(free, dtype=torch.int64)[order]
    return places.move(cells)


def apart(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, in standard deviations."""
    return float((one - other).abs().max() / one.std())


@pytest.mark.parametrize(("names", "scheme", "class_token"), accepted())
def test_hidden_places_reach_no_token(
    names: tuple[str, ...], scheme: str, class_token: bool
) -> None:
    check(Swap(names, case(names, scheme, class_token)))


@pytest.mark.parametrize("names", [("droppos",), ("mp3",), ("dinov2", "masked_position")])
def test_nor_where_places_are_moved_and_paths_dropped(names: tuple[str, ...]) -> None:
    check(Swap(names, case(names, DRAWN, True, drop_path=0.5)))


def check(swap: Swap) -> None:
    """In training and after it: a door may be open in one of them only."""
    places = swap.places
    assert places.known is not None and not places.known.all()
    pixels, order = exchanged(swap.pixels, places)

    def planted(places: Places) -> Places:
        return replace(places, known=None)

    moved = swap.tokens(lambda places: planted(other_cells(places)))
    assert apart(swap.tokens(planted), moved) > FELT
    found = [swap.tokens() for _ in swap.modes()]
    for before, _ in zip(found, swap.modes(), strict=True):
        assert apart(before, swap.tokens(other_cells)) < EXACT
    swap.exchange_context(order)
    for before, _ in zip(found, swap.modes(), strict=True):
        after = swap.tokens(pixels=pixels)
        assert apart(before, after) > FELT
        assert apart(before.gather(1, order.unsqueeze(-1).expand_as(before)), after) < EXACT


def exchanged(pixels: Tensor, places: Places) -> tuple[Tensor, Tensor]:
    """Return images whose hidden patches show what others of them did, and whose each slot has."""
    assert places.known is not None
    grid, (count, tokens) = places.grid, places.known.shape
    cells = torch.arange(tokens).expand(count, -1) if places.cells is None else places.cells
    order = torch.arange(tokens).repeat(count, 1)
    source = torch.arange(grid[0] * grid[1]).repeat(count, 1)
    for row, known in enumerate(places.known):
        hidden = (~known).nonzero()[:, 0]
        order[row, hidden] = hidden.roll(1)
        source[row, cells[row, hidden]] = cells[row, hidden.roll(1)]
    return reorder_tiles(pixels.flatten(0, 1), source, grid).view_as(pixels), order


def test_two_that_forget_are_joined() -> None:
    places = Places((2, 2)).forget(torch.tensor([[True, False, False, False]]))
    both = places.forget(torch.tensor([[False, True, False, False]]))
    assert both.known is not None and both.known.tolist() == [[False, False, True, True]]
