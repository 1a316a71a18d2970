import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.files.matlab import read_matlab
from tests.data_prep.sources.imagenet_meta import META

PLAIN = META[:128] + zlib.decompress(META[136:])
FLAGS, SHAPE = 136, 152  # where in it these parts of the first matrix begin


def test_the_structs_of_imagenet() -> None:
    synsets = read_matlab(META)["synsets"]
    assert [synset["WNID"] for synset in synsets] == [
        "n00000030",
        "n00000010",
        "n00000020",
        "n00000001",
    ]
    assert [int(synset["ILSVRC2012_ID"][0]) for synset in synsets] == [1, 2, 3, 4]
    assert synsets[1]["words"] == "tench, Tinca tinca" and synsets[2]["words"] == "plant × odd"
    assert np.array_equal(synsets[3]["children"], [1, 2, 3]) and synsets[2]["gloss"] == ""


def test_another_file() -> None:
    with pytest.raises(ValueError, match=r"no little-endian MATLAB file"):
        read_matlab(b"\x89HDF\r\n" * 40)


@pytest.mark.parametrize("data", [META, PLAIN], ids=["compressed", "plain"])
@given(place=st.integers(0, 9999), change=st.binary(min_size=1, max_size=4))
@settings(max_examples=100)
def test_damage_is_said(data: bytes, place: int, change: bytes) -> None:
    at = 128 + place % (len(data) - 128)
    for damaged in (data[:at], data[:at] + change + data[at + len(change) :]):
        try:
            read_matlab(damaged)
        except ValueError as error:
            assert "damaged" in str(error)


@pytest.mark.parametrize(
    ("at", "change", "said"),
    [
        (SHAPE, struct.pack("<I", 7), r"damaged \(TypeError"),  # a number of structs like 1e-45
        (FLAGS, struct.pack("<IIf", 7, 8, math.inf), r"damaged \(OverflowError"),
    ],
)
def test_numbers_of_the_wrong_type_are_damage(at: int, change: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_matlab(PLAIN[:at] + change + PLAIN[at + len(change) :])
