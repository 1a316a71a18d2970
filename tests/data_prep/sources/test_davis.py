from pathlib import Path

from tests.data_prep.sample_images import write_files
from tests.data_prep.sources.fakes import JPEGS, everything, opened, text


def files() -> dict[str, bytes]:
    found = {
        "ImageSets/2016/train.txt": text(["wrong"]),
        "ImageSets/2017/train.txt": text(["bear", "ant"]),
        "ImageSets/2017/val.txt": text(["cow"]),
        "ImageSets/2017/test-dev.txt": text(["dog"]),
    }
    for place, video in enumerate(("ant", "bear", "cow", "dog")):
        for frame in range(2):
            name = f"480p/{video}/{frame:05d}"
            found[f"JPEGImages/{name}.jpg"] = JPEGS[2 * place + frame]
            found[f"Annotations/{name}.png"] = b"a mask"
    return found


def test_frames(tmp_path: Path) -> None:
    root = write_files(tmp_path / "DAVIS", files())
    train = opened(root, "davis", split="train")
    names = ["ant/00000.jpg", "ant/00001.jpg", "bear/00000.jpg", "bear/00001.jpg"]
    assert everything(train) == [(name, -1, JPEGS[place]) for place, name in enumerate(names)]
    assert train.classes is None and train.split_rule == "ImageSets/2017/train.txt"
    assert len(opened(root, "davis", split="test").items) == 2
    assert len(opened(root, "davis").items) == 8


def test_lists_of_frames_and_full_resolution(tmp_path: Path) -> None:
    old = {
        name.replace("480p", "1080p"): data
        for name, data in files().items()
        if not name.startswith("ImageSets")
    }
    frames = ["/JPEGImages/1080p/cow/00000.jpg /Annotations/1080p/cow/00000.png"]
    root = write_files(tmp_path, old | {"ImageSets/1080p/val.txt": text(frames)})
    found = [item.name for item in opened(root, "davis", split="val").items]
    assert found == ["cow/00000.jpg", "cow/00001.jpg"]
