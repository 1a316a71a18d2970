"""Converting images of more than 8 bits or of other channels: stored, counted and said."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.encode.images import prepare_image
from data_prep.statistics import main as statistics
from pospre.data.decode.bit_depth import Decoding, DeepRange
from pospre.data.opening import open_reader
from tests.data.deep_files import RAMP, band_folder, bands, npy, png16, saved
from tests.data_prep.reading import Says, description, run

TWELVE = (RAMP * 4095).astype(np.uint16)


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """Six files: 12 bits twice, 16 bits, a dark one of 16-bit colour, one with a mark, 8 bits."""
    root = tmp_path / "scans"
    root.mkdir()
    marked = RAMP.astype(np.float32)
    marked[0, 0] = -9999
    files = {
        "a.png": saved(TWELVE, "PNG"),
        "b.tif": saved(TWELVE),
        "c.png": saved(TWELVE << 4, "PNG"),
        "d.png": png16(np.stack([TWELVE] * 3, -1), 2),
        "e.tif": saved(marked),
        "f.png": saved((RAMP * 255).astype(np.uint8), "PNG"),
    }
    for name, data in files.items():
        (root / name).write_bytes(data)
    return root


def test_the_summary_and_the_description_count_deep_images(
    scans: Path, tmp_path: Path, printed: Says
) -> None:
    said = printed(run, scans, tmp_path / "out")
    assert "5 of more than 8 bits; these values became 0..255:" in said
    assert "0..4096       2, guessed" in said and "0..65536      2\n" in said
    assert "-16384..16384 1, guessed" in said and "one grey      2 of them are nearly" in said
    assert "--deep-range LOW,HIGH sets one for all" in said
    assert description(tmp_path / "out")["deep"] == {
        "nearly_one_grey": [[3, 4]],
        "ranges": {
            "-16384..16384": {"guessed": True, "samples": [[4, 4]]},
            "0..4096": {"guessed": True, "samples": [[0, 1]]},
            "0..65536": {"guessed": False, "samples": [[2, 3]]},
        },
    }


def test_a_range_of_the_users_holds_for_all(
    scans: Path, tmp_path: Path, refused: Says, printed: Says
) -> None:
    assert "guessed" not in printed(run, scans, tmp_path / "out", "--deep-range=-1024,3072.0")
    content = description(tmp_path / "out")
    assert content["made_from"]["settings"]["deep_range"] == "-1024,3072"
    assert set(content["deep"]["ranges"]) == {"-1024..3072", "0..65536"}
    stored = open_reader(tmp_path / "out").read(0).encoded.numpy().tobytes()
    levels = np.asarray(Image.open(io.BytesIO(stored)).convert("L")).astype(int)
    wanted = np.clip((TWELVE.astype(int) + 1024) >> 4, 0, 255)
    assert np.abs(levels - wanted).mean() < 3
    # another spelling is the same conversion, another range is not
    assert "nothing to do" in printed(run, scans, tmp_path / "out", "--deep-range=-1024.0,3072")
    assert "made with deep_range=-1024,3072 instead of auto" in refused(
        run, scans, tmp_path / "out"
    )


def test_photographs_say_nothing_of_depth(tmp_path: Path, printed: Says) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(saved((RAMP * 255).astype(np.uint8), "PNG"))
    assert "8 bits" not in printed(run, tmp_path / "in", tmp_path / "out")
    assert not {"deep", "channels", "pixels"} & set(description(tmp_path / "out"))


def test_bands_are_stored_without_loss_and_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = band_folder(tmp_path / "arrays")
    options = ("--channels", "6", "--deep-range", "0,4096", "--verify", "--val-fraction=0.5")
    assert run(source, tmp_path / "out", *options) == 0
    reader = open_reader(tmp_path / "out")
    assert reader.decoding == Decoding(6) and reader.noted is not None
    found = [np.load(io.BytesIO(reader.read(n).encoded.numpy().tobytes())) for n in range(12)]
    numbers = [*range(0, 12, 2), *range(1, 12, 2)]
    for number, stored in zip(numbers, found, strict=True):
        assert stored.dtype == np.uint8 and np.array_equal(stored, bands(number) >> 4)
    rows = np.concatenate([stored.reshape(-1, 6) for stored in found]) / 255
    np.testing.assert_allclose(reader.noted.mean, rows.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(reader.noted.std, rows.std(axis=0), atol=1e-6)
    capsys.readouterr()
    assert statistics([str(source), "--channels", "6", "--deep-range", "0,4096"]) == 0
    mean = ",".join(f"{value}" for value in reader.noted.mean)
    assert f"data.mean=[{mean}] data.std=[" in capsys.readouterr().out


def test_stored_arrays_are_kept_as_they_are() -> None:
    data = npy(bands(1, 5, np.uint8))
    kept = prepare_image(data, None, 90, decoding=Decoding(5))
    assert kept.kept and kept.jpeg == data
    first = npy(np.moveaxis(bands(1, 5, np.uint8), 2, 0).copy())
    turned = prepare_image(first, None, 90, decoding=Decoding(5))
    assert not turned.kept and turned.jpeg == data
    small = prepare_image(data, 20, 90, decoding=Decoding(5))
    assert (small.width, small.height) == (20, round(20 * 36 / 44))
    assert np.load(io.BytesIO(small.jpeg)).shape == (small.height, 20, 5)


def test_one_channel_is_a_grey_jpeg() -> None:
    for data in (
        saved(TWELVE),
        npy(TWELVE),
        saved(np.stack([TWELVE >> 4] * 3, -1).astype(np.uint8)),
    ):
        found = prepare_image(data, None, 95, decoding=Decoding(1, DeepRange(0, 4096)))
        stored = Image.open(io.BytesIO(found.jpeg))
        assert stored.format == "JPEG" and stored.mode == "L"
        assert np.abs(np.asarray(stored).astype(int) - (TWELVE >> 4)).max() <= 4
