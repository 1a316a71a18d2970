"""Methods have as many trained parameters as their papers, or their codes, say."""

import pytest
import torch

from pospre import PretrainModel, build_encoder
from pospre.data.views.options import ViewGroup
from pospre.model.algorithm import algorithm_class

# 6 blocks of 12·384² + 13·384, two projections, the last norm and the mask token
PREDICTOR = 6 * (12 * 384**2 + 13 * 384) + 2 * 384 * 768 + 768 + 384 * 4


@pytest.mark.parametrize(
    ("names", "size", "part", "count"),
    [
        ("mae", "vits16", "", 47_401_728),
        ("droppos", "vits16", "", 28_193_860),
        ("droppos", "vitb16", "", 92_448_196),
        ("droppos", "vitl16", "", 310_032_068),
        ("mae+lut", "vits16", "", 53_709_568),
        ("mae+lut", "vits16", "objectives.named.lut.", 6_307_840),
        ("mae+lut", "vitb16", "objectives.named.lut.", 12_599_296),
        ("ijepa", "vitb16", "objectives.", PREDICTOR),
        ("mp3", "vitb16", "objectives.", 768 * 196 + 196),
    ],
)
def test_trained_parameters(names: str, size: str, part: str, count: int) -> None:
    views = {name: ViewGroup(name=name) for name in ("view", "second")}
    views = views if "lut" in names else {"view": views["view"]}
    with torch.device("meta"):
        positions = "none" if names == "mp3" else "sincos"
        algorithms = [algorithm_class(name)() for name in names.split("+")]
        model = PretrainModel(build_encoder(size, positions=positions), algorithms, views=views)
    trained = [(key, each.numel()) for key, each in model.named_parameters() if each.requires_grad]
    assert sum(number for key, number in trained if key.startswith(part)) == count
