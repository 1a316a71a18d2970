"""What algorithms draw has the stated law, by counting over many samples."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.algorithms.dinov2.masks import CropMasking, block_masks
from pospre.algorithms.ijepa.blocks import Blocks, draw_blocks
from pospre.algorithms.masked_position import cross_order
from pospre.batch import Batch
from pospre.nn.masking import PatchMasking, slot_mask
from tests.algorithms.cases import Case

pytestmark = pytest.mark.science

SAMPLES, LIMIT = 20_000, 5.5
GRID, PATCHES = (4, 4), 16  # of the cases below


def samples(count: int = SAMPLES, views: int = 1) -> Batch:
    """Return so many samples, each with a view that is never looked at."""
    zeros = torch.zeros(count, dtype=torch.int64)
    return {
        "index": torch.arange(count),
        "epoch": zeros,
        "label": zeros,
        "view/image": torch.zeros(count, views),
    }


def drawn(*names: str, **options: dict[str, Any]) -> Batch:
    """Return what algorithms write on a grid of 4×4 patches."""
    model = Case(names, options, {"patch_size": 8}).build()
    return model.draw(samples())


def excess(counts: Tensor, expected: Tensor | float, freedom: int | None = None) -> float:
    """Return by how many standard deviations Pearson's χ² exceeds its mean."""
    expected = torch.as_tensor(expected, dtype=torch.float64).expand(counts.shape)
    degrees = counts.numel() - 1 if freedom is None else freedom
    chi_square = ((counts.double() - expected) ** 2 / expected).sum()
    return float((chi_square - degrees) / math.sqrt(2 * degrees))


def check_random_subset(marked: Tensor, size: int) -> None:
    """Every row of bool (R, N) marks ``size``; every cell, and pair of cells, equally often."""
    rows, cells = marked.shape
    assert (marked.sum(1) == size).all()
    together = marked.double().T @ marked.double()  # the diagonal counts single cells
    once = size / cells
    for counts, share in (
        (together.diagonal(), once),
        (together[torch.ones_like(together).triu(1) > 0], once * (size - 1) / (cells - 1)),
    ):
        spread = math.sqrt(rows * share * (1 - share)) or 1.0
        assert float((counts - rows * share).abs().max()) < LIMIT * spread


def check_alike(values: Tensor, count: int) -> None:
    """Whole numbers from 0 to ``count`` are all drawn equally often."""
    counts = torch.bincount(values.flatten(), minlength=count)
    assert len(counts) == count and excess(counts, values.numel() / count) < LIMIT


def check_independent(first: Tensor, second: Tensor, sides: tuple[int, int]) -> None:
    """Pairs of whole numbers below these two are all drawn equally often."""
    check_alike(first.flatten() * sides[1] + second.flatten(), sides[0] * sides[1])


def distance(values: Tensor, law: Tensor) -> float:
    """Return √n times Kolmogorov's distance of draws from a law; ``law`` is its F of each."""
    share = law.double().flatten()[values.flatten().argsort()]
    steps = torch.arange(len(share) + 1, dtype=torch.float64) / len(share)
    far = torch.maximum((share - steps[:-1]).abs(), (share - steps[1:]).abs()).max()
    return float(far) * math.sqrt(len(share))


TOO_FAR = 2.2  # of Kolmogorov's distribution 1.2e-4 lie beyond


@pytest.mark.parametrize("name", ["mae", "droppos", "supervised"])
def test_visible_patches_are_a_random_subset(name: str) -> None:
    batch = drawn(name, **{name: {"mask_ratio": 0.75}})
    check_random_subset(slot_mask(batch["view/visible"], PATCHES), 4)
    visible, hidden = batch["view/visible"][:, 0], batch["view/hidden"][:, 0]  # in random order
    check_independent(visible, hidden - (hidden > visible).long(), (PATCHES, PATCHES - 1))


@pytest.mark.parametrize("names", [("droppos",), ("mae", "droppos")])
def test_known_places_are_a_random_subset_of_the_visible_ones(names: tuple[str, ...]) -> None:
    batch = drawn(*names, **{names[0]: {"mask_ratio": 0.5}})
    known = batch["droppos/known"]
    check_random_subset(known, 2)
    check_random_subset(slot_mask(batch["view/visible"][known].view(-1, 2), PATCHES), 2)


def test_uniform_sampling_draws_each_square_by_itself() -> None:
    in_rows = PatchMasking(GRID, 4, "uniform", in_rows=True)
    visible = in_rows.draw(samples(), 0)["view/visible"]
    member = visible // 4 % 2 * 2 + visible % 2  # of its square
    assert torch.equal(visible // 8 * 2 + visible % 4 // 2, torch.arange(4).expand(SAMPLES, -1))
    for square in range(3):
        check_independent(member[:, square], member[:, square + 1], (4, 4))
    shuffled = PatchMasking(GRID, 4, "uniform").draw(samples(), 0)["view/visible"]
    check_independent(shuffled[:, 0], shuffled[:, 1] % 2, (PATCHES, 2))


def test_hidden_visible_patches_are_a_random_subset() -> None:
    batch = drawn("mae", mae={"mask_ratio": 0.5, "second_mask_ratio": 0.25})
    check_random_subset(batch["view/masked"], 2)


def test_cells_of_simmim_are_a_random_subset() -> None:
    masked = drawn("simmim", simmim={"mask_cell": 16, "mask_ratio": 0.5})["view/masked"]
    cells = masked.unflatten(1, (2, 2, 2, 2)).transpose(2, 3).flatten(1, 2).flatten(2)
    assert torch.equal(cells.any(2), cells.all(2))
    check_random_subset(cells.all(2), 2)


def test_context_and_told_patches_of_mp3_are_random_subsets_that_know_nothing_of_each_other() -> (
    None
):
    case = Case(
        ("mp3",),
        {"mp3": {"mask_ratio": 0.75, "position_rate": 0.25}},
        {"patch_size": 8, "positions": "sincos"},
    )
    batch = case.build().draw(samples(views=2))
    context = slot_mask(batch["mp3/context"].flatten(0, 1), PATCHES)
    known = batch["mp3/known"].flatten(0, 1)
    for marked in (context, known):  # the paper's pseudo-code prefers the first patches: 25.4 %
        check_random_subset(marked, 4)
    pairs = context.double().T @ known.double()
    expected = 2 * SAMPLES / 16
    assert float((pairs - expected).abs().max()) < LIMIT * math.sqrt(expected)
    first, second = batch["mp3/context"][..., 0].unbind(1)
    check_independent(first, second, (PATCHES, PATCHES))


def test_the_second_view_and_the_targets_of_lut_are_random_subsets() -> None:
    batch = drawn(
        "mae", "lut", mae={"mask_ratio": 0.75}, lut={"symmetric": True, "target_mask_ratio": 0.5}
    )
    first, second = (slot_mask(batch[f"{view}/visible"], PATCHES) for view in ("view", "second"))
    assert not (first & second).any()
    check_random_subset(second, 4)
    for view in ("view", "second"):
        check_random_subset(slot_mask(batch[f"{view}/target"], PATCHES), 8)


def count_law(low: float, high: float, patches: int) -> Tensor:
    """Return how likely each count ⌊patches · U(low, high)⌋ is: (patches + 1,)."""
    edges = (torch.arange(patches + 2, dtype=torch.float64) / patches).clamp(low, high)
    return edges.diff() / (high - low)


@pytest.mark.parametrize("official", [False, True])
def test_dinov2_masks_crops_and_counts_by_its_law(official: bool) -> None:
    masking = CropMasking(0.5, (0.1, 0.5), stratified=official)
    keys = {key: samples()[key] for key in ("index", "epoch")}
    counts = (
        masking._stratified(keys, (8, 8), 0) if official else masking._per_sample(keys, (8, 8), 0)
    )
    masked = counts > 0
    assert int(masked.sum()) == SAMPLES
    check_alike(masked.flatten().nonzero()[:, 0] % 2, 2)
    if not official:
        check_random_subset(masked, 1)
    law = count_law(0.1, 0.5, 64)
    found = torch.bincount(counts[masked], minlength=65)
    assert not found[law == 0].any()
    assert excess(found[law > 0], SAMPLES * law[law > 0]) < LIMIT


def test_blocks_know_no_side_of_the_grid() -> None:
    """What is refused depends on what lies there already, so that only symmetries are exact."""
    count = 10_000
    keys = torch.arange(count)
    masks = block_masks(keys, torch.full((count,), 20), (8, 8)).unflatten(1, (8, 8))
    shares = masks.double().mean(0)
    for image in (shares.flip(0), shares.flip(1), shares.T):
        spread = (2 * shares * (1 - shares) / count).sqrt()
        assert float(((shares - image) / spread).abs().max()) < LIMIT


def test_crosses_have_their_centres_anywhere() -> None:
    order = cross_order(torch.arange(SAMPLES), (5, 6))
    check_alike(order[:, 0], 30)  # a centre comes first


@pytest.mark.parametrize("shape", ["cross", "box"])
def test_hidden_places_of_crops_have_counts_by_their_law(shape: str) -> None:
    case = Case(
        ("dinov2", "masked_position"),
        {"masked_position": {"shape": shape}, "dinov2": {"mask_crop_rate": 0.0}},
        {"patch_size": 4},
    )
    batch = case.build().draw({**samples(4000), "global/image": torch.zeros(4000, 2)})
    counts = (~batch["global/known"]).sum(-1)
    law = count_law(0.1, 0.5, 64)
    found = torch.bincount(counts.flatten(), minlength=65)
    if shape == "box":  # a block stops short now and then
        assert int(found[law > 0].sum()) > 0.98 * counts.numel()
        return
    assert not found[law == 0].any()
    assert excess(found[law > 0], counts.numel() * law[law > 0]) < LIMIT


def test_blocks_of_ijepa_are_placed_alike_and_by_themselves() -> None:
    shares = 9 / 64
    blocks = Blocks((8, 8), 2, (shares, shares), (1.0, 1.0), (1.0, 1.0), 9, 16)
    masks = draw_blocks(torch.arange(SAMPLES), blocks)
    assert not masks.failed.any()  # a layout that is drawn again has another law
    corner = masks.targets[..., 0]
    place = corner // 8 * 6 + corner % 8
    assert (corner % 8 < 6).all()
    check_independent(place[:, 0], place[:, 1], (36, 36))


def test_shapes_of_ijepas_blocks_are_uniform() -> None:
    """Among 32×32 tokens, where rounding leaves most of the ratio that was drawn."""
    blocks = Blocks((32, 32), 1, (0.15, 0.15), (0.75, 1.5), (1.0, 1.0), 153, 256)
    count = 4000
    targets = draw_blocks(torch.arange(count), blocks).targets[:, 0]
    height = targets[:, -1] // 32 - targets[:, 0] // 32 + 1
    edges = torch.arange(11, 17, dtype=torch.float64) - 0.5  # √(153 · ratio) is rounded
    law = (edges**2 / 153).clamp(0.75, 1.5).diff() / 0.75
    found = torch.bincount(height, minlength=16)
    assert int(found[:11].sum()) == 0 and excess(found[11:], count * law) < LIMIT


@pytest.mark.parametrize("box_scale", ["beta", "uniform"])
def test_field_boxes_have_their_areas_and_places_by_law(box_scale: str) -> None:
    options = {"crop_field": {"box_scale": box_scale, "scale_range": [0.2, 0.8], "field_size": 9}}
    model = Case(("mae", "crop_field"), options, {"patch_size": 8}).build()
    batch = samples()
    batch["view/box"] = torch.tensor([0.3, 0.2, 0.5, 0.4]).expand(SAMPLES, 1, 4)  # a square fits
    batch["view/flip"] = torch.zeros(SAMPLES, 1, dtype=torch.bool)
    model.draw(batch)
    box = batch["view/field_box"][:, 0].double()
    size = box[:, 2:] - box[:, :2]
    share = (size.prod(1) - 0.2) / 0.6
    order = torch.arange(2, 7, dtype=torch.float64)
    choose = torch.tensor([math.comb(6, int(n)) for n in order], dtype=torch.float64)
    inside = share.clamp(0, 1).unsqueeze(1)
    beta = (choose * inside**order * (1 - inside) ** (6 - order)).sum(1)  # of Beta(2, 5)
    assert distance(share, beta if box_scale == "beta" else share) < TOO_FAR
    assert distance(share, share if box_scale == "beta" else beta) > 10 * TOO_FAR  # not the other
    for axis in range(2):
        place = box[:, axis] / (1 - size[:, axis])
        assert distance(place, place) < TOO_FAR


def test_the_laws_would_be_missed() -> None:
    """The checks themselves, on draws that are a little off."""
    biased = torch.rand(SAMPLES, PATCHES, generator=torch.Generator().manual_seed(0))
    biased[:, 0] -= 0.02
    with pytest.raises(AssertionError):
        check_random_subset(slot_mask(biased.argsort(dim=1)[:, :4], PATCHES), 4)
    run = torch.arange(SAMPLES).unsqueeze(1) % PATCHES + torch.arange(4)
    with pytest.raises(AssertionError):  # every cell equally often, but never alone
        check_random_subset(slot_mask(run % PATCHES, PATCHES), 4)
    with pytest.raises(AssertionError):
        check_alike((torch.rand(SAMPLES) * 8.2).long().clamp_max(7), 8)
    with pytest.raises(AssertionError):
        check_independent(torch.arange(SAMPLES) % 4, torch.arange(SAMPLES) % 2, (4, 2))
