"""Patch kernels for other patches and channels: golden numbers, and what each rule keeps."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.augment.device import IMAGENET_MEAN, IMAGENET_STD
from pospre.nn.encoder_options import Kernel
from pospre.nn.weights.kernels import resized_kernel, to_grey, with_channels

SMALL = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None, None]
LARGE = torch.arange(16.0).view(1, 1, 4, 4)
BICUBIC = """
    .328704 .589506 .850309
    .850309 1.111111 1.371914
    1.371914 1.632716 1.893519"""


def numbers(text: str, over: float = 1.0) -> Tensor:
    return torch.tensor([float(each) for each in text.split()]) / over


@pytest.mark.parametrize(
    ("how", "kernel", "side", "expected"),
    [
        ("bicubic", SMALL, 3, numbers(BICUBIC)),
        ("bicubic", LARGE, 2, numbers("8.125 16.875 43.125 51.875")),
        ("pinv", SMALL, 3, numbers("1 4 7 7 10 13 13 16 19", 9)),
        ("pinv", SMALL, 4, numbers("1 5 13 17 9 13 21 25 25 29 37 41 33 37 45 49", 40)),
        ("pinv", LARGE, 2, numbers("10 18 42 50")),
        ("timm", SMALL, 3, numbers(".227390 .521964 .816537 .816537 1.111111 1.405685")),
    ],
)
def test_kernels_are_resized(how: Kernel, kernel: Tensor, side: int, expected: Tensor) -> None:
    found = resized_kernel(kernel, (side, side), how)
    assert found.shape == (1, 1, side, side) and found.dtype == torch.float32
    torch.testing.assert_close(found.flatten()[: len(expected)], expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(found.sum(), kernel.sum(), rtol=1e-5, atol=0)


def test_enlarged_images_embed_as_they_did_by_the_pseudo_inverse() -> None:
    image = torch.tensor([[5.0, 1.0], [2.0, 7.0]])[None, None]
    larger = F.interpolate(image, (3, 3), mode="bilinear")
    assert float((SMALL * image).sum()) == 41
    found = float((resized_kernel(SMALL, (3, 3), "pinv") * larger).sum())
    assert found == pytest.approx(41, abs=1e-5)
    plain = resized_kernel(SMALL, (3, 3), "bicubic") * 9 / 4  # unscaled, as users do
    assert float((plain * larger).sum()) == pytest.approx(90.536458, abs=1e-4)


def test_patches_need_not_be_square() -> None:
    for how in ("bicubic", "pinv", "timm"):
        found = resized_kernel(LARGE.expand(3, 2, 4, 4), (2, 6), how)
        assert found.shape == (3, 2, 2, 6)
        if how != "timm":  # antialias loses some of it
            torch.testing.assert_close(found.sum((2, 3)), torch.full((3, 2), 120.0))


def test_channels_are_added() -> None:
    kernel = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    found = with_channels(kernel, 4).flatten()
    assert found.tolist() == [0.75, 1.5, 2.25, 1.5]
    assert float((2 * found).sum()) == 12  # equal channels: the same
    assert float(found @ torch.tensor([1.0, 2.0, 3.0, 0.0])) == 10.5  # an empty one is not


def test_channels_are_added_up_for_grey_images() -> None:
    kernel = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1)
    theirs = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD}
    grey, bias = to_grey(kernel, theirs, {"mean": [0.0], "std": [1.0]})
    assert float(grey) == pytest.approx(26.628717, abs=1e-6)
    assert float(bias) == pytest.approx(-11.602665, abs=1e-6)
    assert float(0.5 * grey + bias) == pytest.approx(1.711693, abs=1e-6)
    grey, bias = to_grey(kernel, theirs, {"mean": [0.4], "std": [0.2]})  # normalised otherwise
    assert float((0.5 - 0.4) / 0.2 * grey + bias) == pytest.approx(1.711693, abs=1e-6)
