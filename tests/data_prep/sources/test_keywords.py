"""Keyword spotting: the classes, what is drawn for unknown and silence, and what is refused."""

import io
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import soundfile

from data_prep.sources.keywords import USUAL, parse_keywords
from data_prep.sources.registry import open_source
from data_prep.sources.source import Source
from tests.data_prep.reading import Says, read_samples, run
from tests.data_prep.sample_clips import chirp, wav, write_clips
from tests.refusals import refuses

NOISE = "_background_noise_/fan.wav"
WORDS = ("bed", "no", "six", "yes")
CLASSES = ["yes", "no", "unknown", "silence"]


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """Five clips of each of four words, one of them held out, and 20 s of noise."""
    root = write_clips(tmp_path / "words", 5, WORDS)
    (root / "testing_list.txt").write_text("".join(f"{word}/4.wav\n" for word in WORDS))
    (root / NOISE).parent.mkdir()
    (root / NOISE).write_bytes(wav(noise()))
    (root / "_background_noise_/README.md").write_text("noise")
    return root


def noise() -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, 20 * 16000).astype(np.float32)


def counts(source: Source) -> dict[str, int]:
    assert source.classes is not None
    return Counter(source.classes[item.label] for item in source.items)


def starts(source: Source) -> list[float]:
    """Where in the noise the pieces of silence begin, in seconds."""
    return [float(i.name.split("@")[1][:-1]) for i in source.items if i.name.startswith(NOISE)]


def test_as_many_unknown_and_silent_as_of_a_keyword(words: Path) -> None:
    train = open_source(words, split="train", keywords="yes,no")
    assert train.classes == CLASSES
    assert counts(train) == dict.fromkeys(CLASSES, 4)
    assert train.num_ignored == 2  # the list, and what is no noise
    for item in train.items:
        folder = item.name.split("/")[0]
        wanted = {"yes": 0, "no": 1, "bed": 2, "six": 2, "_background_noise_": 3}
        assert item.label == wanted[folder]
    assert counts(open_source(words, split="val", keywords="yes,no")) == dict.fromkeys(CLASSES, 1)
    assert counts(open_source(words, keywords="no"))["silence"] == 5


def test_what_is_held_out_has_other_noise(words: Path) -> None:
    write_clips(words, 40, WORDS)  # so that many pieces are drawn
    train = open_source(words, split="train", keywords="yes,no")
    held_out = open_source(words, split="val", val_fraction=0.2, keywords="yes,no")
    assert len(starts(train)) == 39 and max(starts(train)) <= 17
    assert len(starts(held_out)) == 1 and min(starts(held_out)) >= 16


def test_draws_depend_on_the_seed_and_the_names_alone(words: Path) -> None:
    write_clips(words, 30, WORDS)

    def drawn(seed: int) -> set[str]:
        source = open_source(words, seed=seed, keywords="yes,no")
        return {item.name for item in source.items if item.label > 1}

    before = drawn(0)
    assert before == drawn(0) and len(before & drawn(1)) < len(before) / 2 + 10
    for name in ("bed/0.wav", "six/1.wav"):
        (words / name).unlink()
    assert len(before - drawn(0)) <= 2


def test_a_piece_is_a_second_of_its_file(words: Path) -> None:
    source = open_source(words, keywords="yes,no")
    item = next(item for item in source.items if item.name.startswith(NOISE))
    samples, rate = soundfile.read(io.BytesIO(source.read(item)), dtype="float32")
    stored, _ = soundfile.read(words / NOISE, dtype="float32")
    start = round(float(item.name.split("@")[1][:-1]) * rate)
    assert rate == 16000 and np.array_equal(samples, stored[start : start + rate])


def test_converted(words: Path, tmp_path: Path) -> None:
    options = ("--split", "train", "--keywords", "yes,no", "--shard-mb", "0.1")
    assert run(words, tmp_path / "a", *options, "--workers", "1", "--verify") == 0
    assert run(words, tmp_path / "b", *options, "--workers", "2") == 0
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert len([name for name in files if name.startswith("shard")]) > 1
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    about = json.loads((tmp_path / "a/pospre.json").read_text())
    assert about["classes"] == CLASSES and not about["skipped"]
    assert about["made_from"]["settings"]["keywords"] == "yes,no"
    assert (
        sum(sample["path"].startswith(f"{NOISE}@") for sample in read_samples(tmp_path / "a")) == 4
    )


def test_other_keywords_are_another_conversion(words: Path, tmp_path: Path, refused: Says) -> None:
    assert run(words, tmp_path / "a", "--workers", "1", "--keywords", "yes,no") == 0
    assert "keywords=yes,no" in refused(
        run, words, tmp_path / "a", "--workers", "1", "--keywords", "yes,six"
    )


@pytest.mark.parametrize("text", ["", "yes,", "yes,yes", "yes,silence", "unknown"])
def test_lists_that_are_none(text: str) -> None:
    assert parse_keywords("12") == USUAL == parse_keywords(USUAL)
    refuses(r"different words separated by commas", lambda: parse_keywords(text))


def test_refused(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def message(root: Path, *options: str) -> str:
        assert run(root, tmp_path / "out", *options) == 2
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().err

    assert "up, on is not a class" in message(words, "--keywords", "yes,up,on")
    assert "has no second of noise" in message(
        words, "--keywords", "yes", "--split", "val", "--val-fraction", "0.01"
    )
    (words / "testing_list.txt").write_text("no/1.wav\n")
    assert "none of the 1 clips" in message(words, "--keywords", "yes", "--split", "val")
    (words / NOISE).write_bytes(b"RIFF")
    assert "Repair it or move it away" in message(words, "--keywords", "yes")
    (words / NOISE).write_bytes(wav(chirp(seconds=0.9)))
    assert "put longer WAV files there" in message(words, "--keywords", "yes")
