"""WAV folders become features: the numbers, the classes, the held-out split, bad files."""

import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_prep.encode.clips import clip_features, prepare_clip
from data_prep.publish.description import sha256
from pospre.data.stores.mds import MdsReader
from tests.data_prep.reading import Says, description, run
from tests.data_prep.sample_clips import chirp, wav, write_clips
from tests.data_prep.sample_images import encoded, picture, write_files


def plain_mfcc(samples: np.ndarray, num_frames: int) -> np.ndarray:
    """The MFCCs of 16 kHz samples, frame by frame, from the formulas alone (float64)."""

    def mel(hertz):
        return 2595 * np.log10(1 + np.asarray(hertz) / 700)

    bins = np.linspace(0, 8000, 257)
    edges = 700 * (10 ** (np.linspace(mel(80), mel(7600), 66) / 2595) - 1)
    bands = [
        np.clip(np.minimum((bins - low) / (mid - low), (high - bins) / (high - mid)), 0, None)
        for low, mid, high in zip(edges, edges[1:], edges[2:], strict=False)
    ]
    clip = np.zeros(16000 + 480)
    clip[: min(len(samples), 16000)] = samples[:16000]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(480) / 480)
    place, order = np.arange(64), np.arange(40)[:, None]
    cosines = np.cos(np.pi / 64 * (place + 0.5) * order) * np.sqrt(2 / 64)
    cosines[0] /= np.sqrt(2)
    frames = []
    for start in range(0, 160 * num_frames, 160):
        power = np.abs(np.fft.rfft(clip[start : start + 480] * hann, 512)) ** 2
        frames.append(cosines @ np.log(np.array(bands) @ power + 1e-6))
    return np.array(frames)


@pytest.mark.parametrize("num_frames", [98, 100])
@pytest.mark.parametrize("seconds", [0.31, 1.0, 1.4])
def test_features_are_the_formulas(num_frames: int, seconds: float) -> None:
    samples = chirp(3, seconds=seconds)
    found = clip_features(samples, 16000, num_frames)
    assert found.shape == (num_frames, 40) and found.dtype == np.float32
    np.testing.assert_allclose(found, plain_mfcc(samples, num_frames), atol=2e-3, rtol=1e-4)


def test_silence_is_constant() -> None:
    found = clip_features(np.zeros(100, np.float32), 16000, 100)
    np.testing.assert_allclose(found[:, 0], 8 * np.log(1e-6), rtol=1e-5)
    np.testing.assert_allclose(found[:, 1:], 0, atol=1e-4)


def test_other_rates_and_stereo() -> None:
    def features(samples: np.ndarray, rate: int) -> np.ndarray:
        clip = prepare_clip(wav(samples, rate, "FLOAT"), 100)
        return clip.features

    tone = {rate: np.sin(0.8 * np.sin(np.arange(rate) * 2 * np.pi * 220 / rate)) for rate in
            (16000, 44100)}  # fmt: skip
    same, other = features(tone[16000], 16000), features(tone[44100], 44100)
    # loudness and the coarse shape of the spectrum; the fine ones hear the resampler's noise floor
    np.testing.assert_allclose(other[5:90, 0], same[5:90, 0], rtol=0.1)
    left, right = chirp(1), chirp(2)
    both = features(np.stack([left, right], axis=1), 16000)
    np.testing.assert_allclose(both, features((left + right) / 2, 16000), atol=1e-3)


BAD = {
    "text.wav": b"this is no sound at all, but long enough to have a header of some kind",
    "header.wav": wav(chirp())[:20],
    "nothing.wav": wav(np.zeros(0, np.float32)),
    "nan.wav": wav(np.full(800, np.nan, np.float32), subtype="FLOAT"),
    "rate.wav": wav(chirp(), rate=44101),
}


def test_conversion_repeats_to_the_byte(tmp_path: Path) -> None:
    source = write_clips(tmp_path / "words")
    targets = [tmp_path / "one", tmp_path / "two"]
    assert run(source, targets[0]) == 0
    assert run(source, targets[1], "--workers", 2, "--verify") == 0
    for name in ("shard.00000.mds", "index.json", "pospre.json"):
        assert sha256(targets[0] / name) == sha256(targets[1] / name)
    reader = MdsReader(targets[0])
    assert len(reader) == 12 and reader.classes == ["no", "yes"]
    sample = reader.read(7)
    clip = prepare_clip((source / "yes" / "1.wav").read_bytes(), 100)
    assert sample.label == 1
    assert np.array_equal(sample.encoded.numpy()[..., 0], clip.features)


def test_statistics_are_those_of_all_frames(tmp_path: Path) -> None:
    assert run(write_clips(tmp_path / "words"), tmp_path / "mds", "--frames", 98) == 0
    reader = MdsReader(tmp_path / "mds")
    assert reader.features is not None and reader.features.shape == (98, 40)
    frames = np.concatenate([reader.read(i).encoded.numpy()[..., 0] for i in range(len(reader))])
    np.testing.assert_allclose(reader.features.mean, frames.mean(0, np.float64), atol=1e-4)
    np.testing.assert_allclose(reader.features.std, frames.std(0, dtype=np.float64), atol=1e-3)


def test_bad_files_are_left_out_by_name(tmp_path: Path, printed: Says) -> None:
    source = write_clips(tmp_path / "words")
    bad = {**BAD, "empty.wav": b""}
    for name, data in bad.items():
        (source / "yes" / name).write_bytes(data)
    assert "unreadable: yes/text.wav" in printed(run, source, tmp_path / "mds")
    content = description(tmp_path / "mds")
    assert content["samples"] == 12
    assert [item["path"] for item in content["skipped"]] == sorted(f"yes/{name}" for name in bad)
    assert all(item["reason"] for item in content["skipped"])


def test_a_stray_clip_among_images_is_ignored(tmp_path: Path) -> None:
    files = {"a.jpg": encoded(picture()), "a.wav": wav(chirp())}
    photos = write_files(tmp_path / "photos", files)
    assert run(photos, tmp_path / "mds") == 0
    assert description(tmp_path / "mds")["ignored"] == 1


def test_spoken_digits(test_data: Path, tmp_path: Path) -> None:
    with tarfile.open(test_data / "spoken_digits.tar.gz") as archive:
        clips = [each for each in archive.getmembers() if "_theo_" in each.name]
        for each in clips:
            clip = archive.extractfile(each)
            assert clip is not None
            write_files(tmp_path / "digits", {Path(each.name).name: clip.read()})
    assert run(tmp_path / "digits", tmp_path / "val", "--split", "val") == 0
    content = description(tmp_path / "val")
    assert (content["samples"], len(content["classes"])) == (50, 10)
