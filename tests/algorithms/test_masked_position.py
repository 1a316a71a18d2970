"""Masked position prediction, beside an independent reference; crosses, beside the paper's loop."""

import pytest
import torch
import torch.nn.functional as F

from pospre import draws
from pospre.algorithms.masked_position import cross_order
from tests.algorithms.cases import NARROW, Case, written

CONTENT, KNOWN = "global/masked", "global/known"


def filled(*names, size=4, seed=None, dinov2=None, encoder=None, **options):
    case = Case(
        ("dinov2", *names, "masked_position"),
        {"masked_position": options, "dinov2": dinov2 or {}},
        encoder or {"positions": "learned"},
    )
    model = case.build()
    if seed is not None:
        model.seed = seed
    batch = case.batch(size)
    return model, written(model, batch)


def terms(model, batch):
    return model.loss(model(batch), batch)


@pytest.mark.parametrize("shape", ["cross", "box"])
@pytest.mark.parametrize("official", [False, True])
def test_each_global_crop_has_masked_content_or_masked_positions(shape, official):
    model, batch = filled(shape=shape, size=16, dinov2={"official": official})
    hidden = ~batch[KNOWN]
    content, position = batch[CONTENT].any(-1), hidden.any(-1)
    assert not (batch[CONTENT] & hidden).any()
    assert (content ^ position).all() and position.sum() == 16
    if not official:
        assert (position.sum(1) == 1).all()
    counts = hidden.sum(-1)[position]
    assert counts.max() <= 32 and counts.float().mean() == pytest.approx(0.3 * 64, rel=0.25)
    assert model.layout.passes["local"].places == ()
    assert model.layout.passes["teacher"].places == ()


def test_counts_of_crosses_are_those_drawn():
    _, batch = filled(mask_ratio=(0.25, 0.25), size=8)
    assert set((~batch[KNOWN]).sum(-1).flatten().tolist()) == {0, 16}


@pytest.mark.parametrize("names", [(), ("crop_field",)])
def test_the_student_does_not_see_masked_positions(names):
    model, batch = filled(*names)
    mask = ~batch[KNOWN].flatten(0, 1)
    places = model.pass_places(model.layout.passes["global"], batch, None)
    assert (places.box is not None) == bool(names)
    added = model.encoder.positions.added
    seen = added(torch.zeros(8, 64, NARROW.embed_dim), places)
    assert not seen[mask].any() and seen[~mask].any(-1).all()
    cells = torch.arange(64).expand(8, -1)
    moved = torch.where(mask, cells.flip(1), cells)
    assert torch.equal(added(torch.zeros(8, 64, NARROW.embed_dim), places.move(moved)), seen)


def test_the_token_takes_the_place_of_the_position_and_content_stays():
    model, batch = filled()
    with torch.no_grad():
        model.places.named["masked_position"].mark.fill_(3.0)
    places = model.pass_places(model.layout.passes["global"], batch, None)
    content = torch.randn(8, 64, NARROW.embed_dim)
    added = model.encoder.positions.added(content, places) - content
    mask, table = ~batch[KNOWN].flatten(0, 1), model.encoder.positions.at((8, 8))
    torch.testing.assert_close(added[mask], torch.full_like(added[mask], 3.0))
    torch.testing.assert_close(added[~mask], table.expand(8, -1, -1)[~mask])


def test_the_loss_is_that_of_a_plain_loop():
    """Per crop: the mean over masked patches of the cross-entropy; then the mean over 2B crops."""
    model, batch = filled("crop_field")
    objective = model.objectives["masked_position"]
    student = model.run_pass("global", model.images(batch, "global"), batch)[:, 1:]
    teacher = model.run_pass("teacher", model.images(batch, "global"), batch)[:, 1:]
    mask = ~batch[KNOWN].flatten(0, 1)
    logits = objective.teacher_head.module(teacher[mask]).double() / objective.temperature
    plan = (logits - logits.max()).exp()
    for _ in range(3):
        plan = plan / plan.sum(0) / plan.shape[1]
        plan = plan / plan.sum(1, keepdim=True) / plan.shape[0]
    targets = (plan * plan.shape[0]).detach()
    total, done = torch.zeros(()).double(), 0
    for crop in range(8):
        rows = int(mask[crop].sum())
        if rows:
            log_prob = F.log_softmax(objective.head(student[crop][mask[crop]]).double() / 0.1, -1)
            total = total - (targets[done : done + rows] * log_prob).sum(-1).mean()
            done += rows
    expected = total / 8
    measured = terms(model, batch)["masked_position"]
    torch.testing.assert_close(measured.double(), expected, rtol=1e-5, atol=1e-6)


def test_without_masked_positions_it_is_dinov2_to_the_bit():
    model, batch = filled()
    batch[KNOWN] = torch.ones_like(batch[KNOWN])
    alone = Case(("dinov2",), {}, {"positions": "learned"}).build()
    written(alone, batch)
    alone.load_state_dict(
        {key: value for key, value in model.state_dict().items() if "masked_position" not in key}
    )
    measured, expected = terms(model, batch), terms(alone, batch)
    assert torch.equal(measured["dinov2"], expected["dinov2"])
    assert float(measured["masked_position"]) == 0


def test_gradient_reaches_token_and_its_own_head_only():
    model, batch = filled("crop_field", dinov2={"separate_heads": True})
    batch[CONTENT] = torch.zeros_like(batch[CONTENT])
    terms(model, batch)["masked_position"].backward()
    mark = model.places.named["masked_position"].mark
    assert mark.grad is not None and mark.grad.any()
    head = model.objectives["masked_position"].head
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())
    others = [*model.objectives["dinov2"].parameters(), *model.contents.parameters()]
    assert all(p.grad is None or not p.grad.any() for p in others)
    own = model.objectives["masked_position"].teacher_head
    assert all(p.grad is None for p in (*model.teacher.parameters(), *own.parameters()))


def test_the_teacher_head_follows():
    model, _ = filled()
    objective = model.objectives["masked_position"]
    with torch.no_grad():
        objective.head.last.weight.add_(1.0)
    old = objective.teacher_head.module.last.weight.clone()
    model.teachers.update(0.0)
    moved = objective.teacher_head.module.last.weight - old
    torch.testing.assert_close(moved, torch.full_like(moved, 0.008))


def test_it_takes_over_the_temperature_of_the_host():
    model, _ = filled()
    host, own = (model.objectives[name].temperature for name in ("dinov2", "masked_position"))
    assert torch.equal(own, host) and float(own) == pytest.approx(0.07)


def test_all_positions_masked_is_an_ablation():
    model, batch = filled(dinov2={"mask_crop_rate": 0.0})
    assert not batch[CONTENT].any() and (~batch[KNOWN]).any(-1).all()
    measured = terms(model, batch)
    assert measured["total"].isfinite() and float(measured["metric/dinov2_ibot"]) == 0


def keys(count):
    return draws.sample_keys(0, 0, torch.arange(count), 0, "test")


def centres(key, grid):
    number = 8 * max(grid)
    draw = draws.uniform(key, 2 * number)
    return zip((draw[:number] * grid[0]).long(), (draw[number:] * grid[1]).long(), strict=True)


@pytest.mark.parametrize("grid", [(14, 14), (3, 5)])
def test_any_start_is_a_mask_grown_cross_by_cross(grid):
    rows, cols = grid
    orders = cross_order(keys(12), grid)
    for key, order in zip(keys(12), orders.tolist(), strict=True):
        assert sorted(order) == list(range(rows * cols))
        for count in (1, rows * cols // 3, rows * cols // 2):
            masked: set[int] = set()
            for row, col in centres(key, grid):
                cross = {row * cols + c for c in range(cols)} | {
                    r * cols + col for r in range(rows)
                }
                left = {int(cell) for cell in cross} - masked
                if len(masked) + len(left) >= count:
                    break
                masked |= left
            mask = set(order[:count])
            assert masked <= mask and mask - masked <= left

            def distance(cell: int, row: int = int(row), col: int = int(col)) -> int:
                return abs(cell // cols - row) + abs(cell % cols - col)

            taken = [distance(cell) for cell in mask - masked]
            others = [distance(cell) for cell in left - mask]
            assert not taken or not others or max(taken) <= min(others)


def test_one_cross_covers_27_of_196():
    order = cross_order(keys(1), (14, 14))[0, :27]
    rows, cols = (order // 14).bincount(minlength=14), (order % 14).bincount(minlength=14)
    assert sorted(rows.tolist()) == sorted(cols.tolist()) == [1] * 13 + [14]


def test_ties_are_broken_at_random():
    order = cross_order(keys(4000), (4, 4))
    masked = torch.zeros(4000, 16).scatter(1, order[:, :6], 1.0).mean(0).view(4, 4)
    for image in (masked.T, masked.flip(0), masked.flip(1)):
        torch.testing.assert_close(image, masked, rtol=0, atol=0.04)
    # of the four neighbours of a centre (tie at distance 1) each is taken second equally often
    first, second = order[:, 0], order[:, 1]
    inner = torch.isin(first, torch.tensor([5, 6, 9, 10]))
    for step in (-4, -1, 1, 4):
        share = ((second - first)[inner] == step).float().mean()
        assert share == pytest.approx(0.25, abs=0.06)
