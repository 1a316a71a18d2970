"""MAE: invariants, options, bad input."""

import pytest
import torch

from pospre import attach
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from tests.algorithms.official import DECODER, batch, small_model


def model_and_batch(**options):
    torch.manual_seed(0)
    model = small_model()
    algorithm = attach(model, "mae", **{**DECODER, **options})
    inputs = batch() | {
        "view/image": torch.randint(0, 256, (4, 1, 3, 48, 48), dtype=torch.uint8),
        "view/flip": torch.tensor([[True], [False], [True], [False]]),
    }
    algorithm.write(inputs, model)
    return model, inputs


def test_only_removed_patches_are_predicted():
    model, inputs = model_and_batch()
    outputs = model(inputs)["mae"]
    assert outputs["predicted"].shape == outputs["target"].shape == (4, 27, 192)


def test_removed_patches_reach_the_target_and_never_the_prediction():
    model, inputs = model_and_batch(norm_pix=False)
    inputs["view/flip"][:] = False
    before = model(inputs)["mae"]
    images = inputs["view/image"].clone()
    for sample, patch in enumerate(inputs["view/hidden"][:, 3].tolist()):
        row, col = 8 * (patch // 6), 8 * (patch % 6)
        images[sample, 0, :, row : row + 8, col : col + 8] ^= 255
    after = model(inputs | {"view/image": images})["mae"]
    assert torch.equal(after["predicted"], before["predicted"])
    changed = (after["target"] != before["target"]).any(-1)
    assert changed.nonzero().tolist() == [[sample, 3] for sample in range(4)]


def test_normalised_targets_have_zero_mean_and_unit_unbiased_variance():
    model, inputs = model_and_batch()
    target = model(inputs)["mae"]["target"]
    torch.testing.assert_close(target.mean(-1), torch.zeros(4, 27), atol=1e-5, rtol=0)
    torch.testing.assert_close(target.var(-1), torch.ones(4, 27), atol=1e-3, rtol=0)


def test_the_loss_of_a_batch_is_the_mean_of_its_halves():
    model, inputs = model_and_batch()
    whole = model.loss(model(inputs), inputs)["total"]
    halves = []
    for part in (slice(0, 2), slice(2, 4)):
        rows = {key: value[part] for key, value in inputs.items()}
        halves.append(model.loss(model(rows), rows)["total"])
    torch.testing.assert_close(torch.stack(halves).mean(), whole)


def test_a_flipped_view_is_the_mirrored_image():
    model, inputs = model_and_batch()
    pixels = model.images(inputs)[:, 0]
    mirrored = inputs | {"view/flip": ~inputs["view/flip"]}
    assert torch.equal(model.images(mirrored)[:, 0], pixels.flip(-1))


@pytest.mark.parametrize("positions", ["relative", "shared_relative"])
def test_visible_patches_have_the_relative_biases_of_their_cells(positions):
    """All patches ask and the visible ones give keys: these learn the same as alone."""
    encoder = build_encoder("vit_tiny16", image_size=48, patch_size=8, depth=2, positions=positions)
    model = PretrainModel(encoder.double(), seed=0).double()
    algorithm = attach(model, "mae", **DECODER)
    with torch.no_grad():
        for table in encoder.positions.parameters():
            table.normal_()
    inputs = batch()
    algorithm.write(inputs, model)
    keep, images = inputs["view/visible"], torch.randn(4, 3, 48, 48, dtype=torch.float64)
    alone = model.encode("student", images.unsqueeze(1), inputs)
    whole = encoder(images, context_BM=keep)
    rows = torch.arange(4)[:, None]
    torch.testing.assert_close(alone[:, 1:], whole[rows, keep + 1], rtol=0, atol=1e-12)
    torch.testing.assert_close(alone[:, 0], whole[:, 0], rtol=0, atol=1e-12)


def test_parameter_count_of_vit_small_with_the_published_decoder():
    with torch.device("meta"):
        encoder = build_encoder("vits16")
        model = PretrainModel(encoder, seed=0)
        attach(model, "mae")
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 47_401_728


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 1.2}, r"'mae.mask_ratio' is 1.2 .*less than 1"),
        ({"mask_ratio": 0.0}, "hides no patch to predict"),
        ({"mask_ratio": 0.99}, "leaves none of the 36 tokens visible"),
        ({"decoder_dim": 36, "decoder_heads": 5}, "mae.decoder_heads = 5 does not divide"),
        ({"weight": -1.0}, "'mae.weight' is -1.0 .*greater than or equal to 0"),
    ],
)
def test_bad_options_are_refused_at_attachment(options, message):
    with pytest.raises(UserError, match=message):
        attach(small_model(), "mae", **options)
