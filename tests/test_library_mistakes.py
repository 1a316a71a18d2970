"""pospre as a library: what a first user gets wrong, and what is taken in more than one form."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import pospre
from pospre.errors import UserError
from tests.algorithms.cases import Case
from tests.refusals import refuses

UNTYPED: Any = pospre  # as who has no type checker uses it


def pixels() -> torch.Tensor:
    return torch.zeros(4, 3, 32, 32, dtype=torch.uint8)


def test_what_is_no_batch_of_views_is_refused() -> None:
    model = Case(("mae",)).build()
    refuses(r"takes a batch, .* not Tensor. .*model.encoder\(images\)", lambda: model(pixels()))
    batch = UNTYPED.from_images(pixels(), index=torch.arange(4), epoch=torch.tensor(0))
    batch = model.prepare(batch, 0.0)
    with pytest.raises(UserError, match=r"images of torch.float32 .* give uint8"):
        model({**batch, "view/image": batch["view/image"] / 255})
    del batch["view/flip"]
    refuses(r"lacks 'view/flip', for views of the group 'view'", lambda: model(batch))


def test_view_groups_are_given_by_name_or_in_a_row(image_folder: Callable[..., Path]) -> None:
    encoder = pospre.build_encoder("vits16", image_size=32, depth=1)
    group = pospre.ViewGroup(size=32)
    named = pospre.PretrainModel(encoder, seed=0, views={"global": group, "local": group})
    assert [(name, each.name) for name, each in named.views.items()] == [
        ("global", "global"),
        ("local", "local"),
    ]
    assert pospre.PretrainModel(encoder, seed=0, views=[group]).views == {"view": group}
    with pytest.raises(UserError, match=r"with its own name, .* not view \(2 in all\)"):
        pospre.PretrainModel(encoder, seed=0, views=[group, group])
    loader = pospre.build_loader(image_folder(num_images=4), batch_size=2, views=named.views)
    assert {"global/image", "local/image"} <= next(iter(loader)).keys()
    assert pospre.build_loader(image_folder(num_images=4), batch_size=2, views=group)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_weights_of_another_type_train(kind: torch.dtype) -> None:
    model = Case(("mae", "droppos")).build()
    batch = pospre.from_images(pixels(), index=torch.arange(4), epoch=0)
    model.to(kind)
    batch = model.prepare(batch, 0.0)
    model.loss(model(batch), batch)["total"].backward()


def tiny(**options: Any) -> Any:
    return timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, **options)


def test_rates_of_timm_are_taken_or_named() -> None:
    with warnings.catch_warnings(action="error"):
        encoder = pospre.wrap_encoder(
            tiny(drop_path_rate=0.2, proj_drop_rate=0.1, pos_drop_rate=0.1)
        )
        chosen = pospre.wrap_encoder(tiny(proj_drop_rate=0.1), drop_path=0.3, dropout=0.0)
    assert encoder.drop_path == pytest.approx(0.2)
    assert encoder.dropout == 0.1
    assert (chosen.drop_path, chosen.dropout) == (0.3, 0.0)
    with pytest.warns(UserWarning, match=r"leaves out attn_drop_rate = 0.3, proj_drop_rate = 0.1 "):
        pospre.wrap_encoder(tiny(proj_drop_rate=0.1, attn_drop_rate=0.3))
    with pytest.warns(UserWarning, match=r"leaves out patch_drop_rate = 0.5"):
        assert pospre.wrap_encoder(tiny(patch_drop_rate=0.5)).dropout == 0.0


def test_a_wrapped_model_is_normalised_as_timm_has_it() -> None:
    vit = tiny()
    encoder = pospre.wrap_encoder(vit)
    augment = pospre.PretrainModel(encoder, seed=0).augment
    assert augment.mean.flatten().tolist() == list(vit.pretrained_cfg["mean"]) == [0.5] * 3
    model = pospre.PretrainModel(encoder, seed=0, mean=[0.4] * 3)
    assert model.augment.mean.flatten().tolist() == pytest.approx([0.4] * 3)
    assert model.augment.std.flatten().tolist() == [0.5] * 3
    grey = pospre.PretrainModel(pospre.wrap_encoder(tiny(in_chans=1)), seed=0)
    assert grey.augment.mean.flatten().tolist() == [0.0]


def test_weights_of_a_loop_of_ones_own_are_loaded(tmp_path: Path) -> None:
    model = Case(("mae",)).build()
    torch.save(model.timm_state(), tmp_path / "encoder.pth")
    assert pospre.load_weights(model, tmp_path / "encoder.pth").startswith("encoder: 3")
    with pytest.raises(UserError, match=r"which is 'techer': .*'student' or 'teacher'"):
        UNTYPED.load_weights(model, tmp_path / "encoder.pth", "techer")
    refuses(r"model is of type Encoder", lambda: UNTYPED.load_weights(model.encoder, "encoder.pth"))
    torch.save({"state": {"model": model.state_dict()}}, tmp_path / "composers.pt")
    with pytest.raises(UserError, match=r"of a known layout.*save\(model.timm_state\(\), 'enc"):
        pospre.load_weights(model, tmp_path / "composers.pt")


def test_a_table_that_was_a_field_is_read_at_the_grid(tmp_path: Path) -> None:
    """Weights from beside crop_field hold the field; an encoder alone has the images' grid."""
    file = str(tmp_path / "w.pth")
    learned = Case(("mae", "crop_field"), encoder={"positions": "learned"}).build().eval()
    other = Case(("mae",), encoder={"positions": "learned"}).build().eval()
    images = torch.randn(2, 3, 32, 32)
    for weights in (learned.state_dict(), learned.encoder.state_dict(), learned.timm_state()):
        torch.save(weights, file)
        pospre.load_weights(other, file)
        torch.testing.assert_close(other.encoder(images), learned.encoder(images))
        other.encoder.init_parameters("xavier")
