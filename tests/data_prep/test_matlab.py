import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.matlab import MatlabError, read_matlab
from tests.data_prep.sources.imagenet_meta import META


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
    with pytest.raises(MatlabError, match=r"no little-endian MATLAB file"):
        read_matlab(b"\x89HDF\r\n" * 40)


@given(st.integers(128, len(META) - 1), st.binary(min_size=1, max_size=4))
@settings(max_examples=100)
def test_damage_is_said(at: int, change: bytes) -> None:
    for damaged in (META[:at], META[:at] + change + META[at + len(change) :]):
        try:
            read_matlab(damaged)
        except MatlabError as error:
            assert "damaged" in str(error)
