"""MAE: biases of visible patches, bad options; parity and contracts have the rest."""

import pytest
import torch

from pospre.algorithms.mae import MAE
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.masking import cell_patches, others, slot_mask
from tests.algorithms.official import DECODER, batch, small_model


@pytest.mark.parametrize("positions", ["relative", "shared_relative"])
def test_visible_patches_have_the_relative_biases_of_their_cells(positions):
    """All patches ask and the visible ones give keys: these learn the same as alone."""
    encoder = build_encoder("vit_tiny16", image_size=48, patch_size=8, depth=2, positions=positions)
    model = PretrainModel(encoder.double(), [MAE(**DECODER)], seed=0).double()
    with torch.no_grad():
        for table in encoder.positions.parameters():
            table.normal_()
    inputs = model.draw(batch())
    keep, images = inputs["view/visible"], torch.randn(4, 3, 48, 48, dtype=torch.float64)
    alone = model.run_pass("student", images.unsqueeze(1), inputs)
    whole = encoder(images, context_BM=keep)
    rows = torch.arange(4)[:, None]
    torch.testing.assert_close(alone[:, 1:], whole[rows, keep + 1], rtol=0, atol=1e-12)
    torch.testing.assert_close(alone[:, 0], whole[:, 0], rtol=0, atol=1e-12)


def test_squares_of_patches_are_hidden_as_one():
    """Pixio's golden set, and a block of one patch draws what no block does."""
    assert cell_patches(torch.tensor([[2]]), (4, 4), (2, 2)).tolist() == [[8, 9, 12, 13]]
    model = small_model(MAE(mask_block=2, mask_ratio=0.6, **DECODER))
    inputs = model.draw(batch())
    visible = slot_mask(inputs["view/visible"], 36).unflatten(1, (3, 2, 3, 2)).transpose(2, 3)
    squares = visible.flatten(3).flatten(1, 2)
    assert torch.equal(squares.any(2), squares.all(2))
    assert squares.all(2).sum(1).tolist() == [3] * 4  # int(9 · .4) of 9
    assert torch.equal(inputs["view/hidden"].sort(1).values, others(inputs["view/visible"], 36))
    assert model.layout.num_visible == 12
