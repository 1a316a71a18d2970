import pickle
from typing import Any

import numpy as np
import pytest

from data_prep.files.numpy_pickle import PickleError, load_arrays

RECONSTRUCT = np.empty(0).__reduce__()[0]


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("kind", ["?", "u1", "i8", ">i4", "<u2", "f4", ">f8"])
def test_arrays_of_numbers(kind: str, protocol: int) -> None:
    for numbers in (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2).T):
        array = numbers.astype(kind)
        found = load_arrays(pickle.dumps({"data": array}, protocol=protocol))["data"]
        assert np.array_equal(found, array) and found.dtype == array.dtype.newbyteorder("=")


class Made:
    """Pickled as a call with a state."""

    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call


def kind(code: str, order: str = "|", copy: bool = False) -> Made:
    return Made(np.dtype, (code, False, copy), (3, order, None, None, None, -1, -1, 0))


def array(shape: Any, numbers: Any, data: Any) -> Made:
    return Made(RECONSTRUCT, (np.ndarray, (0,), b"b"), (1, shape, numbers, False, data))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        # bytes that would be taken for pointers, with numpy's own types
        (array((4,), kind("O8"), b"A" * 32), r"array of 'O8', which are no numbers"),
        (array((4,), kind("O8", copy=True), b"A" * 32), r"array of 'O8', which are no numbers"),
        (array((1,), kind("V8"), b"A" * 8), r"array of 'V8'"),
        (array((1,), kind("f8,O"), b"A" * 16), r"array of 'f8,O'"),
        (array((4,), kind("u1"), [1, 2, 3, 4]), r"an array of no numbers"),
        (array((4,), "O", b"A" * 32), r"an array of no numbers"),
        (array((4,), kind("u8"), b"A" * 8), r"an array of \(4,\) in 8 bytes"),
        (array((-1, -8), kind("u1"), b"A" * 8), r"an array of no numbers"),
        (array((1,), kind("u1", order="O"), b"A"), r"it is damaged \(KeyError"),
        (array((1,), kind("u77"), b"A" * 77), r"it is damaged \(TypeError"),
        (Made(print, ("harm",)), r"asks for __builtin__\.print"),
    ],
)
def test_what_is_no_array_of_numbers(content: Made, message: str) -> None:
    with pytest.raises(PickleError, match=message):
        load_arrays(pickle.dumps(content, protocol=2))


def test_arrays_are_not_made_before_their_state() -> None:
    found = load_arrays(pickle.dumps(Made(np.ndarray, ((1 << 50,), "O"))))
    assert found.shape == (0,)
