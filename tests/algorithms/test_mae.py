"""MAE: biases of visible patches, bad options; parity and contracts have the rest."""

import pytest
import torch

from pospre.algorithms.mae import MAE
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from tests.algorithms.official import DECODER, batch


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
