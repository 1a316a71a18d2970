from pathlib import Path

from data_prep.files.tree import Tree
from data_prep.sources.registry import detect, open_source
from tests.data_prep.sample_clips import write_clips
from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, labels, opened


def test_speech_commands(tmp_path: Path) -> None:
    root = write_clips(tmp_path / "words", 3, ("go", "up"))
    write_clips(root, 1, ("_background_noise_",))
    (root / "testing_list.txt").write_text("go/0.wav\nup/2.wav\n")
    (root / "validation_list.txt").write_text("go/1.wav\n")
    everything = opened(root, "audio_folder")
    assert everything.is_audio and everything.classes == ["go", "up"]
    assert len(everything.items) == 6 and everything.num_ignored == 3
    assert labels(open_source(root, split="val")) == {"go/0.wav": 0, "up/2.wav": 1}
    assert labels(open_source(root, split="test")) == labels(open_source(root, split="val"))
    train = open_source(root, split="train")
    assert list(labels(train)) == ["go/2.wav", "up/0.wav", "up/1.wav"]
    assert train.read(train.items[0]).startswith(b"RIFF")


def test_spoken_digits(tmp_path: Path) -> None:
    names = {f"recordings/{word}_ann_{n}.wav": word for word in "012" for n in range(3, 9)}
    root = write_files(tmp_path, dict.fromkeys(names, b"RIFF"))
    for split, count in (("train", 12), ("val", 6)):
        source = open_source(root, split=split)
        assert source.classes == ["0", "1", "2"] and len(source.items) == count
        assert all(source.classes[item.label] == names[item.name] for item in source.items)


def test_an_image_among_the_clips(tmp_path: Path) -> None:
    root = write_clips(tmp_path / "words", 2)
    assert detect(Tree(root)) == "audio_folder"
    write_files(root, {"zebra.jpg": JPEGS[0]})
    assert detect(Tree(root)) == "image_folder"
    assert open_source(root, kind="audio_folder").num_ignored == 1
