"""Images of more than 8 bits: which values become 0 and 255."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pospre.data.decode.bit_depth import (
    Decoding,
    DeepRange,
    given_range,
    parse_range,
    said_range,
    to_levels,
)
from pospre.data.decode.decoder import OpenedImage
from pospre.data.opening import open_reader
from pospre.data.views.options import ViewGroup
from tests.data.deep_files import RAMP, npy, png16, saved
from tests.data.loading import loader
from tests.refusals import refuses

TWELVE = (RAMP * 4095).astype(np.uint16)


def opened(data: bytes, deep_range: DeepRange | None = None) -> tuple[np.ndarray, DeepRange | None]:
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    image = OpenedImage(encoded, Decoding(3, deep_range))
    pixels = image.decode()[0]
    assert (pixels == pixels[..., :1]).all()
    return pixels[..., 0], image.deep


def signed(values: np.ndarray) -> np.ndarray:
    return (values * 4095 - 1024).astype(np.int32)


FILES = {
    "12 bits, PNG": (saved(TWELVE, "PNG"), "0..4096", True, TWELVE >> 4),
    "12 bits, TIFF": (saved(TWELVE), "0..4096", True, TWELVE >> 4),
    "12 bits, big endian": (saved(TWELVE.astype(">u2")), "0..4096", True, TWELVE >> 4),
    "12 bits, array": (npy(TWELVE), "0..4096", True, TWELVE >> 4),
    "10 bits": (saved(TWELVE >> 2), "0..1024", True, TWELVE >> 4),
    "8 bits in 16": (saved(TWELVE >> 4), "0..256", True, TWELVE >> 4),
    "16 bits": (saved(TWELVE << 4, "PNG"), "0..65536", False, TWELVE >> 4),
    "Hounsfield units": (saved(signed(RAMP)), "-4096..4096", True, (signed(RAMP) + 4096) >> 5),
    "unit": (saved(RAMP.astype(np.float32)), "0..1", True, np.minimum(RAMP * 256, 255)),
    "1.02": (saved((1.02 * RAMP).astype(np.float32)), "0..4", True, 1.02 * RAMP * 64),
    "-1 to 1": (saved((2 * RAMP - 1).astype(np.float32)), "-1..1", True,
     np.minimum(RAMP * 256, 255)),
    "grey map of 12 bits": (b"P5 48 32 4095\n" + TWELVE.astype(">u2").tobytes(), "0..65536", False,
     TWELVE / 4095 * 255.99),
    "colour": (png16(np.stack([TWELVE << 4] * 3, -1), 2), "0..65536", False, TWELVE >> 4),
    "with alpha": (png16(np.stack([TWELVE << 4, np.full_like(TWELVE, 65535)], -1), 4), "0..65536",
     False, TWELVE >> 4),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_the_range_is_a_function_of_the_image(name: str) -> None:
    data, text, guessed, expected = FILES[name]
    levels, found = opened(data)
    assert found is not None and (str(found), found.guessed) == (text, guessed)
    assert np.abs(levels - np.floor(expected)).max() <= (1 if "." in name or "map" in name else 0)


def test_a_given_range_makes_equal_values_equal_greys() -> None:
    wanted = DeepRange(-1024, 3072)
    levels, found = opened(saved(signed(RAMP)), wanted)
    assert found == wanted and np.array_equal(levels, (signed(RAMP) + 1024) >> 4)
    dark, _ = opened(saved(signed(RAMP / 8)), wanted)
    assert np.array_equal(dark, (signed(RAMP / 8) + 1024) >> 4)
    clipped, _ = opened(saved(TWELVE), DeepRange(1000, 2000))
    assert (clipped[TWELVE <= 1000] == 0).all() and (clipped[TWELVE >= 2000] == 255).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
def test_images_of_8_bits_have_no_range(mode: str) -> None:
    picture = Image.fromarray((RAMP * 255).astype(np.uint8)).convert(mode)
    levels, found = opened(saved(np.asarray(picture), "PNG"), DeepRange(0, 10))
    assert found is None and np.ptp(levels) == 255


def test_what_is_not_finite_is_no_maximum() -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 0.5, 0.25]], np.float32)
    levels, found = to_levels(values, None)
    assert found == DeepRange(0, 1, guessed=True)
    assert levels.tolist() == [[0, 255, 0, 128, 64]]
    assert to_levels(np.full((2, 2), np.nan), None)[0].tolist() == [[0, 0], [0, 0]]
    assert to_levels(np.array([1.7e308, -1.7e308]), None)[0].tolist()[0] > 128


def test_12_bit_tiffs_say_so_themselves() -> None:
    packed = Image.fromarray(np.zeros((2, 2), np.uint16))
    packed.format, packed.tag_v2 = "TIFF", {258: (12,)}  # type: ignore[attr-defined]
    assert said_range(packed) == DeepRange(0, 4096)


@pytest.mark.parametrize("text", ["5,5", "7,3", "0,inf", "0", "a,b", "0,1,2", ""])
def test_what_is_no_range_is_refused(text: str) -> None:
    refuses("--deep-range is", lambda: parse_range(text, "--deep-range"))


def test_ranges_as_recipes_and_commands_have_them() -> None:
    assert parse_range("auto", "") is None and given_range("auto") is None
    assert parse_range("-1024,3072", "") == given_range((-1024.0, 3072.0)) == DeepRange(-1024, 3072)


def test_training_from_a_folder_follows_the_same_rule(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(saved(TWELVE, "PNG"))
    views = [ViewGroup(size=(32, 48), crop="full", flip_rate=0.0)]
    batch = next(iter(loader(tmp_path, views=views)))
    assert np.array_equal(batch["view/image"][0, 0, 0], TWELVE >> 4)
    fixed = loader(tmp_path, views=views, deep_range=(0, 65536))
    assert np.array_equal(next(iter(fixed))["view/image"][0, 0, 0], TWELVE >> 8)


def test_a_guess_is_said_once_before_training(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(saved(TWELVE, "PNG"))
    with pytest.warns(UserWarning, match=r"the values 0\.\.4096 become 0 to 255. This is a guess"):
        loader(tmp_path, batch_size=1).probe()
    reader = open_reader(tmp_path, deep_range=(0, 4096))
    assert reader.decoding.deep_range == DeepRange(0, 4096)
