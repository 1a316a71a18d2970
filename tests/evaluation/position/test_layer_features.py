"""What the encoder is shown for the position probe: positions left out, masked, patches moved."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.algorithms.droppos import DropPos
from pospre.batch import Batch
from pospre.evaluation.classification.robustness_conditions import no_places, reorder_tiles
from pospre.evaluation.layers import layer_tokens
from pospre.evaluation.position.layer_features import Features, Input, hold_out, layer_features
from pospre.evaluation.position.settings import Tokens
from pospre.evaluation.registry import Context
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.encoder_interface import patchify
from pospre.nn.places import Places
from pospre.nn.positions import scheme_class
from tests.evaluation.schemes import SCHEME_NAMES

GRID = (3, 4)


def model_of(positions: str = "learned") -> PretrainModel:
    encoder = build_encoder(
        "vit_tiny16", image_size=(24, 32), patch_size=8, depth=2, positions=positions
    )
    return PretrainModel(encoder, seed=0).eval()


@pytest.fixture(scope="module")
def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    shape = (6, 1, 3, 24, 32)
    return {
        "view/image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        "view/flip": torch.zeros(6, 1, dtype=torch.bool),
        "index": torch.arange(10, 16),
    }


def features(model: PretrainModel, batch: Batch, shown_as: Input, num_tokens: int = 12) -> Features:
    alone: dict[str, Any] = {"initial": lambda: model, "data": "", "device": torch.device("cpu")}
    context = Context(model, progress=False, **alone)
    return layer_features(context, model, batch, [0, 2], shown_as, Tokens(num_tokens=num_tokens))


def in_order(found: Features, places: Tensor, layer: int) -> Tensor:
    order = places.argsort(1).unsqueeze(-1).expand_as(found.tokens[layer])
    return found.tokens[layer].gather(1, order)


def test_patches_are_put_where_the_order_says(batch: Batch) -> None:
    images = batch["view/image"][:, 0].float()
    order = torch.stack([torch.randperm(12) for _ in range(6)])
    moved = patchify(reorder_tiles(images, order, GRID), (8, 8))
    for image, row in enumerate(order):
        assert torch.equal(moved[image], patchify(images, (8, 8))[image, row])


def test_shuffled_patches_without_positions_give_the_same_tokens_in_other_places(
    batch: Batch,
) -> None:
    model = model_of("none")
    plain, shuffled = features(model, batch, "image"), features(model, batch, "shuffled")
    assert torch.equal(plain.shown, plain.origin)
    assert not torch.equal(shuffled.shown, shuffled.origin)
    for layer in (0, 1):
        torch.testing.assert_close(
            in_order(plain, plain.origin, layer), in_order(shuffled, shuffled.origin, layer),
            atol=1e-4, rtol=1e-4,
        )  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEME_NAMES)
def test_forgotten_places_leave_no_trace_of_them(scheme: str, batch: Batch) -> None:
    """Without places patches in another order have the same tokens, in double precision."""
    model = model_of(scheme).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in model.encoder.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    images, order = model.images(batch)[:, 0].double(), torch.randperm(12, generator=generator)
    moved = reorder_tiles(images, order.expand(6, -1), GRID)
    whole = model.encoder.places_of(images)
    forgotten = no_places(whole, images.device)

    def difference(places: Places) -> float:
        plain, other = (model.features(each, [2], places)[0] for each in (images, moved))
        return float((other - plain[:, order]).detach().abs().max())

    assert difference(forgotten) < 1e-9
    if scheme_class(scheme).can_forget:
        assert difference(whole) > 1e-3


def test_masked_patches_have_no_position_and_their_neighbours_have(batch: Batch) -> None:
    model = model_of()
    masked, content = (features(model, batch, kind, 9) for kind in ("masked", "content"))
    assert torch.equal(masked.shown, content.shown)
    torch.testing.assert_close(masked.tokens[0], content.tokens[0])
    assert not torch.allclose(masked.tokens[1], content.tokens[1], atol=1e-3)
    assert features(model, batch, "masked").shown.shape == (6, 9)  # 75 % of 12, and no others


def test_a_model_with_a_token_for_masked_positions_is_given_it(batch: Batch) -> None:
    droppos = DropPos(decoder_dim=32, decoder_depth=1, decoder_heads=2)
    model = PretrainModel(model_of("sincos").encoder, [droppos])
    model.eval()
    mark: Any = model.places.named["droppos"].mark
    mark.data.normal_(generator=torch.Generator().manual_seed(2))
    masked = features(model, batch, "masked", 9)
    images = model.images(batch)[:, 0]
    forgotten = no_places(model.encoder.places_of(images), images.device)
    raw = layer_tokens(model, images, [0], norm=False, places=forgotten)[0][:, 1:]
    wanted = model.vit.norm(raw + mark)
    chosen = masked.shown.unsqueeze(-1).expand(-1, -1, wanted.shape[-1])
    torch.testing.assert_close(masked.tokens[0], wanted.gather(1, chosen).detach())


def test_images_of_one_colour_hold_no_more_than_it(batch: Batch) -> None:
    model = model_of("none")
    tokens = features(model, batch, "constant").tokens[1]
    torch.testing.assert_close(tokens, tokens[:, :1].expand_as(tokens), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(tokens[0], tokens[1], atol=1e-3)


def test_what_is_held_out_does_not_depend_on_the_order(batch: Batch) -> None:
    learn, measure = hold_out(batch, seed=0)
    assert len(learn["index"]) == 4 and len(measure["index"]) == 2
    assert set(learn["index"].tolist()) | set(measure["index"].tolist()) == set(range(10, 16))
    mixed = {key: value.flip(0) for key, value in batch.items()}
    assert set(hold_out(mixed, seed=0)[1]["index"].tolist()) == set(measure["index"].tolist())
