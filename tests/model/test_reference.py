"""The reference: the same features as published, never changed, and outside of checkpoints."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pospre.algorithms.distill.distill import Distill
from pospre.algorithms.gram import Gram
from pospre.data.views.augment_options import Augment
from pospre.data.views.options import ViewGroup
from pospre.model.comparison import Comparison, in_box, on_grid
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.places import mirrored_boxes
from tests.algorithms.cases import (
    GROUPS,
    Case,
    made,
    make_optimizer,
    random_views,
    tiny_model,
    train,
    written,
)
from tests.refusals import refuses


def encoder_of(**options: Any) -> nn.Module:
    return build_encoder("vit_tiny16", **{"image_size": 32, "patch_size": 8, "depth": 1, **options})


def started(*methods: Any, **encoder: Any) -> PretrainModel:
    """Return a model with a copy of its encoder as the reference."""
    torch.manual_seed(0)
    own = encoder_of(**encoder)
    return PretrainModel(own, methods, seed=7, views=[ViewGroup(size=32)], reference=own)


def bytes_of(module: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in (*module.parameters(), *module.buffers())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["distill", "gram"])
def test_a_copy_of_the_start_gives_the_same_bits_and_no_loss(name: str, autocast: bool) -> None:
    model = started(made(name), positions="learned")
    batch = written(model, random_views())
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        images = model.images(batch)
        own, copied = (
            model.run_pass(key, images, batch) for key in ("student", "reference/student")
        )
        loss = model.loss(model(batch), batch)[name]
    assert torch.equal(own, copied) and not copied.requires_grad
    assert loss.item() == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_steps_change_no_byte_and_checkpoints_do_not_grow() -> None:
    model = started(Gram(), made("droppos"), made("ema_teacher", momentum_start=0.5))
    assert model.reference is not None
    before, name = bytes_of(model.reference), model.reference.sha256
    train(model, make_optimizer(model), random_views(), range(3))
    assert all(map(torch.equal, before, bytes_of(model.reference)))
    assert not any("reference" in key for key in model.state_dict())
    other = started(Gram(), made("droppos"), made("ema_teacher", momentum_start=0.5))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert other.reference is not None and other.reference.sha256 == name
    less = {key: each for key, each in model.state_dict().items() if "teacher" not in key}
    with pytest.raises(RuntimeError, match=r"Missing key.*teacher\.module"):
        other.load_state_dict(less)


def test_the_hash_is_of_names_shapes_bytes_and_pixels() -> None:
    model = started(Gram())
    assert model.reference is not None
    hashes = {model.reference.sha256, copy.deepcopy(model).reference.sha256}  # type: ignore[union-attr]
    assert len(hashes) == 1
    encoder = encoder_of()
    hashes.add(PretrainModel(encoder, [Gram()], reference=encoder).reference.sha256)  # type: ignore[union-attr]
    shown = PretrainModel(encoder, mean=[0.5] * 3, std=[0.5] * 3)
    hashes.add(PretrainModel(encoder, [Gram()], reference=shown).reference.sha256)  # type: ignore[union-attr]
    assert len(hashes) == 3


def ramp(side: int) -> Tensor:
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return (10.0 * rows + columns).view(1, -1, 1)


def test_maps_are_read_at_the_centres_before_lengths_are_normalised() -> None:
    rows = [[1.8333, 3.1667, 4.5], [15.1667, 16.5, 17.8333], [28.5, 29.8333, 31.1667]]
    thirds = on_grid(ramp(4), (4, 4), (3, 3)).view(3, 3)
    torch.testing.assert_close(thirds, torch.tensor(rows), rtol=0, atol=1e-4)
    halves = on_grid(ramp(4), (4, 4), (2, 2)).flatten()
    torch.testing.assert_close(halves, torch.tensor([5.5, 7.5, 25.5, 27.5]))
    vectors = torch.tensor([[[3.0, 4.0], [0.0, 1.0]]])
    one = nn.functional.normalize(on_grid(vectors, (1, 2), (1, 1)), dim=-1).flatten()
    torch.testing.assert_close(one, torch.tensor([0.514496, 0.857493]), rtol=0, atol=1e-6)
    assert on_grid(ramp(4), (4, 4), (3, 3), "bicubic").shape == (1, 9, 1)


def test_local_views_are_compared_at_their_places_in_the_view_that_it_sees() -> None:
    whole, part = torch.tensor([[0.0, 0, 1, 1]]), torch.tensor([[0.25, 0.1, 0.75, 0.6]])

    def read(outer: Tensor, inner: Tensor) -> list[float]:
        return in_box(ramp(4), (4, 4), (2, 2), outer, inner).flatten().tolist()

    assert read(whole, part) == pytest.approx([5, 6, 15, 16])
    mirror = torch.tensor([True])
    assert read(whole, mirrored_boxes(part, mirror)) == pytest.approx([6, 5, 16, 15])
    assert read(mirrored_boxes(whole, mirror), part) == pytest.approx([6, 5, 16, 15])
    assert read(0.5 * whole, 0.5 * part) == pytest.approx([5, 6, 15, 16])
    thirds = in_box(ramp(4), (4, 4), (3, 3), whole, whole)
    torch.testing.assert_close(thirds, on_grid(ramp(4), (4, 4), (3, 3)))


LOCAL = ViewGroup(name="local", count=2, size=16, inside="global")
VIEWS = {"global": ViewGroup(name="global", count=2, size=32), "local": LOCAL}
SIDES = {"global": 32, "local": 16}


def test_each_local_view_has_the_patches_of_its_own_outer_view() -> None:
    model = tiny_model(made("dinov2"), Distill(local=True), views=VIEWS, reference=encoder_of())
    assert model.layout.passes["local"].needs_patches
    outer, inner = (random_views(name, views=2, side=side) for name, side in SIDES.items())
    batch = {**outer, **inner}
    batch["global/box"] = torch.rand(4, 2, 4) * 0.2 + torch.tensor([0.0, 0.0, 0.6, 0.6])
    batch["local/box"] = torch.rand(4, 2, 4) * 0.1 + torch.tensor([0.2, 0.2, 0.4, 0.4])
    refuses("the batch lacks 'local/box'", lambda: written(model, {**outer, **inner}))
    batch["global/flip"][0], batch["local/flip"][:2] = True, True
    inputs = written(model, batch)
    distances, loss = model(inputs)["distill"], model.objectives["distill"]
    assert set(distances) == {"patches", "class"}  # the reference sees no local view's own class
    assert isinstance(loss, Comparison)
    places = torch.arange(16.0).view(1, 16, 1).expand(8, -1, 192)
    tokens = torch.cat([torch.zeros(8, 1, 192), places + 100 * torch.arange(8.0)[:, None, None]], 1)
    passes = {name: torch.zeros(8, 17, 192) for name in ("global", "local")}
    *_, local = loss._pairs({**passes, "reference/global": tokens}, inputs)
    assert local.target_prefix is None
    for row in range(8):
        flip = {name: bool(batch[f"{name}/flip"].flatten()[row]) for name in VIEWS}
        box = {name: batch[f"{name}/box"].flatten(0, 1)[row] for name in VIEWS}
        (x0, y0, x1, y1), (a0, b0, a1, b1) = (box[name].tolist() for name in VIEWS)
        for cell, found in enumerate(local.target[row, :, 0].tolist()):
            high, across = (cell // 2 + 0.5) / 2, (cell % 2 + 0.5) / 2
            x = a0 + (a1 - a0) * (1 - across if flip["local"] else across)
            u, v = (x - x0) / (x1 - x0), (b0 + (b1 - b0) * high - y0) / (y1 - y0)
            u = 1 - u if flip["global"] else u
            column, line = (min(3.0, max(0.0, 4 * each - 0.5)) for each in (u, v))
            assert found == pytest.approx(100 * row + 4 * line + column, abs=1e-3)


def test_it_sees_neither_masks_nor_colours_but_the_same_flips() -> None:
    own = encoder_of()
    views = [ViewGroup(size=32, augment=Augment(grayscale_rate=1.0))]
    model = PretrainModel(own, [made("mae"), Gram()], seed=7, views=views, reference=own)
    batch = written(model, random_views())
    batch["view/flip"][:] = True
    declared = model.layout.passes["reference/student"]
    plain = model.augment(batch["view/image"], batch["view/flip"])
    assert torch.equal(model.pass_images(declared, batch), plain)
    assert not torch.equal(model.images(batch), plain)
    assert model.run_pass("reference/student", plain, batch).shape == (4, 1 + 16, 192)
    assert model.layout.passes["student"].count == 4
    assert model(batch)["gram"]["gram"] > 0


def test_an_anchor_shows_it_the_same_boxes_in_another_size() -> None:
    views = [ViewGroup(size=32), ViewGroup(name="anchor", of="view", size=64)]
    model = PretrainModel(
        encoder_of(), [Gram()], seed=7, views=views, reference=encoder_of(image_size=64)
    )
    assert model.layout.passes["reference/student"].group == "anchor"
    batch = {**random_views(), **random_views("anchor", side=64)}
    batch["view/flip"][:] = True  # a method may change the flips of the group itself
    inputs = written(model, batch)
    declared = model.layout.passes["reference/student"]
    flipped = model.augment(inputs["anchor/image"], inputs["view/flip"])
    assert torch.equal(model.pass_images(declared, inputs), flipped)
    assert model.loss(model(inputs), inputs)["gram"].isfinite()


def other(**options: Any) -> dict[str, Any]:
    return {"reference": encoder_of(**options)}


@pytest.mark.parametrize(
    ("methods", "given", "words"),
    [
        ((Gram(),), {}, r"gram needs a reference.*reference: \{weights: start\}"),
        ((made("mae"),), other(), "none of the algorithms listed reads it"),
        ((Gram(),), other(channels=1), "takes 1 channels, but encoder.channels = 3"),
        ((Gram(),), other(final_norm=False), "no final norm"),
        ((Gram(),), other(image_size=28, patch_size=7),
         r"patches of 7 pixels do not divide .*anchor=\{of: view, size: 35\}"),
        ((Gram(),), other(image_size=64, positions="relative"),
         r"support only views of \[64, 64\] pixels.*anchor=\{of: view, size: 64\}"),
        ((Gram(), made("simmim")), other(), r"gram\.on = unmasked, .*Use gram\.on: all"),
        ((Distill(),), other(class_token=False),
         "class_weight = 0.2 needs a class token, but the ref"),
        ((Distill(projection=False),),
         {"reference": build_encoder("vits16", image_size=32, patch_size=8, depth=1)},
         r"encoder has width 192 and the reference 384"),
        ((Gram(), made("supervised", mixup=0.8)),
         other() | {"views": {"view": ViewGroup(size=32), "a": ViewGroup(of="view", size=64)}},
         "supervised mixes the images of data.views.view, but not those of data.views.a"),
        ((Gram(local=True),), other() | {"views": {**VIEWS, "local": GROUPS["local"]}},
         r"gram.local = True, but data.views.local.inside = None: .*Set .*inside: global"),
        ((Gram(local=True),), other(), "gram .* data.views.local"),
        ((Gram(local=True), made("supervised", mixup=0.8)),
         other() | {"views": {"view": ViewGroup(size=32), "local": replace(LOCAL, inside="view")}},
         "gram.local = True, but algorithms.supervised mixes the images of data.views.view"),
        ((Distill(local=True, patch_weight=0.0),), other(), "distill.local = True has no effect"),
        ((Gram(),), other() | {"views": {"crop": ViewGroup(size=32)}},
         "gram reads one of the view groups global and view, but data.views has crop"),
    ],
)  # fmt: skip
def test_a_reference_that_does_not_fit_is_refused(
    methods: tuple[Any, ...], given: dict[str, Any], words: str
) -> None:
    refuses(words, lambda: tiny_model(*methods, **given))


def test_a_reference_of_another_width_and_patch_teaches_through_a_linear_map() -> None:
    wide = build_encoder("vits16", image_size=32, patch_size=4, depth=1)
    for method in (Distill(), Gram()):
        model = tiny_model(method, reference=wide)
        batch = written(model, random_views())
        model.loss(model(batch), batch)["total"].backward()
        assert all(p.grad is not None for p in model.objectives.parameters())
    assert sum(
        p.numel() for p in tiny_model(Distill(), reference=wide).objectives.parameters()
    ) == (2 * (192 * 384 + 384))


def test_only_unmasked_crops_count_unless_all_do() -> None:
    case = Case(("dinov2", "gram"))
    model = case.build()
    inputs = written(model, case.batch())
    value = model(inputs)["gram"]["gram"]
    masked = inputs["global/masked"].any(-1)
    assert masked.sum(1).eq(1).all()
    changed = dict(inputs)
    changed["global/image"] = torch.where(
        masked[..., None, None, None], inputs["global/image"] ^ 255, inputs["global/image"]
    )
    torch.testing.assert_close(model(changed)["gram"]["gram"], value)
    every = Case(("dinov2", "gram"), options={"gram": {"on": "all"}}).build()
    assert every(inputs)["gram"]["gram"] != every(changed)["gram"]["gram"]
