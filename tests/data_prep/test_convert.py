import errno
import io
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_prep.distribute import worker
from data_prep.publish.description import sha256
from tests.data_prep.reading import FORMATS, Says, description, destination, read_samples, run
from tests.data_prep.sample_images import KEPT, bad_files, encoded, odd_files, picture, write_files
from tests.disk import full_disk, snapshot


@pytest.mark.parametrize("data_format", FORMATS)
def test_samples_are_the_source(tmp_path: Path, data_format: str) -> None:
    files = odd_files()
    source = write_files(tmp_path / "photos", files | {"odd/notes.txt": b"x"})
    target = destination(tmp_path, data_format)
    assert run(source, target, workers=2) == 0
    samples, names = read_samples(target), sorted(files)
    assert len(samples) == len(names)
    for sample, name in zip(samples, names, strict=True):
        assert sample["label"] == ["odd", "plain"].index(name.split("/")[0])
        assert sample.get("path", name) == name
        assert (sample["image"] == files[name]) == (name in KEPT)
        assert Image.open(io.BytesIO(sample["image"])).format == "JPEG"
    content = description(target)
    assert content["format"] == f"pospre-{data_format}" and content["version"] == 2
    assert content["samples"] == len(names) and content["classes"] == ["odd", "plain"]
    assert (content["kept"], content["encoded"]) == (len(KEPT), len(names) - len(KEPT))
    assert content["marked"] == 0
    assert content["skipped"] == [] and content["ignored"] == 1
    if data_format == "ffcv":
        assert content["bytes"] == target.stat().st_size and content["sha256"] == sha256(target)
    else:
        shard = target / "shard.00000.mds"
        assert content["manifest"] == {shard.name: [shard.stat().st_size, sha256(shard)]}


def test_stock_ffcv_loads_the_pixels(tmp_path: Path) -> None:
    target = destination(tmp_path, "ffcv")
    images = [picture(number) for number in range(5)]
    files = {f"c/{number}.jpg": encoded(image) for number, image in enumerate(images)}
    files["c/9.jpg"] = encoded(picture(9).convert("L"))
    files["c/8.png"] = encoded(picture(8), "PNG")
    source = write_files(tmp_path / "photos", files)
    assert run(source, target) == 0
    from ffcv.fields.decoders import IntDecoder, SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption

    loader = Loader(
        str(target),
        batch_size=7,
        num_workers=1,
        order=OrderOption.SEQUENTIAL,
        pipelines={"image": [SimpleRGBImageDecoder()], "label": [IntDecoder()]},
    )
    ((loaded, labels),) = [(image.copy(), label.copy()) for image, label in loader]
    assert loaded.shape == (7, 32, 48, 3) and not labels.any()
    for pixels, name in zip(loaded, sorted(files), strict=True):
        wanted = np.asarray(Image.open(io.BytesIO(files[name])).convert("RGB")).astype(int)
        assert np.abs(pixels.astype(int) - wanted).mean() < 3, name


def test_corrupt_files_are_listed_and_left_out(tmp_path: Path, photos: Path, printed: Says) -> None:
    write_files(
        photos, {f"ant/{name.replace('/', '_')}": data for name, data in bad_files().items()}
    )
    target = tmp_path / "out"
    shown = printed(run, photos, target)
    assert "unreadable      4" in shown and "ant/plain_cut.jpg" in shown
    content = description(target)
    assert [item["path"] for item in content["skipped"]] == sorted(
        f"ant/{name.replace('/', '_')}" for name in bad_files()
    )
    assert all(item["reason"] for item in content["skipped"])
    assert content["samples"] == len(read_samples(target)) == 12


@pytest.mark.parametrize("where", ["photos", "photos/out", "."])
def test_source_and_destination_must_lie_apart(tmp_path: Path, photos: Path, where: str) -> None:
    assert run(photos, tmp_path / where, "--overwrite") == 2
    assert len(list(photos.rglob("*.jpg"))) == 12


@pytest.mark.parametrize("data_format", FORMATS)
def test_existing_destination(
    tmp_path: Path, photos: Path, data_format: str, refused: Says, printed: Says
) -> None:
    target = destination(tmp_path / "made", data_format)
    assert run(photos, target) == 0
    before = snapshot(target.parent)
    assert "already holds this conversion" in printed(run, photos, target)
    assert "quality=90 instead of 80; choose another DST" in refused(
        run, photos, target, "--quality", 80
    )
    write_files(photos, {"ant/new.jpg": encoded(picture(50))})
    assert "--overwrite" in refused(run, photos, target)
    assert snapshot(target.parent) == before
    assert run(photos, target, "--overwrite") == 0
    assert description(target)["samples"] == len(read_samples(target)) == 13


@pytest.mark.parametrize("data_format", FORMATS)
def test_damaged_result_is_not_called_complete(
    tmp_path: Path, photos: Path, data_format: str, refused: Says
) -> None:
    target = destination(tmp_path, data_format)
    assert run(photos, target) == 0
    data = target if data_format == "ffcv" else target / "shard.00000.mds"
    data.write_bytes(data.read_bytes()[:-1])
    assert str(data) in refused(run, photos, target)
    assert run(photos, target, "--overwrite") == 0
    assert run(photos, target) == 0


def test_overwrite_leaves_a_folder_that_is_no_data_set(tmp_path: Path, photos: Path) -> None:
    thesis = write_files(tmp_path / "home", {"thesis.tex": b"x", "index.json": b"{}"})
    assert run(photos, thesis, "--overwrite") == 2
    assert run(photos, thesis) == 2
    assert (thesis / "thesis.tex").read_bytes() == b"x"


def test_the_splits_cover_the_folder(tmp_path: Path, photos: Path) -> None:
    options = ["--val-fraction", 0.4, "--seed", 3]
    labels: dict[str, int] = {}
    paths: list[str] = []
    for split in ("train", "val"):
        assert run(photos, tmp_path / split, "--split", split, *options) == 0
        samples = read_samples(tmp_path / split)
        assert description(tmp_path / split)["classes"] == ["ant", "bee"]
        paths += [sample["path"] for sample in samples]
        labels |= {sample["path"]: sample["label"] for sample in samples}
    everything = sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.jpg"))
    assert sorted(paths) == everything
    assert all(label == ["ant", "bee"].index(path[:3]) for path, label in labels.items())


@pytest.mark.parametrize("name", ["v2:photos", "dbfs:/mnt/photos", "gs:photos"])
def test_a_local_name_with_a_colon_is_a_local_name(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(photos, name) == 0
    assert len(read_samples(tmp_path / name)) == 12


@pytest.mark.parametrize("data_format", FORMATS)
def test_flat_folder_and_strange_names(tmp_path: Path, data_format: str) -> None:
    names = ["b\udcff.jpg", "with\nnewline.jpg", "z.jpg", "ä ö.jpg"]  # the first is no UTF-8
    try:
        source = write_files(tmp_path / "photos", {name: encoded(picture()) for name in names})
    except OSError:
        pytest.skip("this file system refuses such names")
    target = destination(tmp_path, data_format)
    assert run(source, target) == 0
    samples = read_samples(target)
    if data_format == "mds":
        assert sorted(sample["path"] for sample in samples) == ["b\\udcff.jpg", *names[1:]]
    assert [sample["label"] for sample in samples] == [-1] * 4
    assert description(target)["classes"] is None


def test_killed_between_the_two_renames(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = destination(tmp_path, "ffcv")
    assert run(photos, target) == 0
    rename = Path.replace

    def stop_at_the_second(source: Path, target: Path) -> Path:
        if source.suffix == ".beton":
            raise KeyboardInterrupt
        return rename(source, target)

    monkeypatch.setattr(Path, "replace", stop_at_the_second)
    assert run(photos, target, "--quality", 80, "--overwrite") == 130
    monkeypatch.undo()
    assert not target.exists()
    assert run(photos, target, "--quality", 80) == 0
    assert len(read_samples(target)) == 12


def test_real_photographs(tmp_path: Path, test_data: Path) -> None:
    root = test_data / "imagenet_sample"
    originals = sorted(root.rglob("*.JPEG"))[:24]
    files = {path.relative_to(root).as_posix(): path.read_bytes() for path in originals}
    source = write_files(tmp_path / "photos", files)
    for data_format in ("mds", "ffcv"):
        target = destination(tmp_path, data_format)
        assert run(source, target, "--verify", workers=2) == 0
        kept = [sample["image"] in files.values() for sample in read_samples(target)]
        assert sum(kept) == description(target)["kept"] >= 20


@pytest.mark.parametrize(
    ("data_format", "num_bytes"), [("mds", 100), ("mds", 2_200_000), ("ffcv", 2_200_000)]
)
def test_full_disk(
    tmp_path: Path,
    photos: Path,
    data_format: str,
    num_bytes: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = destination(tmp_path, data_format)
    noise = np.random.default_rng(0).integers(0, 256, (900, 900, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), quality=97)
    write_files(photos, {f"bee/noise{number}.jpg": data for number in range(3)})
    with full_disk(num_bytes):
        assert run(photos, target) == 2
    assert f"error: cannot write {target}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
    assert run(photos, target) == 0
    assert len(read_samples(target)) == 15


def test_missing_ffcv_is_one_clear_line(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    monkeypatch.setitem(sys.modules, "ffcv.writer", None)
    monkeypatch.delitem(sys.modules, "data_prep.publish.beton", raising=False)
    message = refused(run, photos, tmp_path / "out.beton")
    assert "`make setup` in" in message and message.count("\n") == 1
    assert run(photos, tmp_path / "out") == 0


def test_a_page_holds_a_jpeg_that_is_larger_than_its_source(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1500, 1500, 3), dtype=np.uint8)
    squeezed = encoded(Image.fromarray(noise), "WEBP", quality=10, method=0)
    assert len(squeezed) < 1 << 20
    files = {"a.jpg": encoded(picture()), "b.webp": squeezed}
    target = destination(tmp_path, "ffcv")
    assert run(write_files(tmp_path / "photos", files), target, "--quality", 95) == 0
    samples = read_samples(target)
    assert len(samples) == 2 and len(samples[1]["image"]) > 1 << 21


def test_an_image_that_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    target = tmp_path / "out"
    monkeypatch.setattr(worker, "_LARGEST_SAMPLE", 5000)
    files = {"a.jpg": encoded(picture()), "b.png": encoded(picture(1, 900, 900), "PNG")}
    source = write_files(tmp_path / "photos", files)
    assert "b.png" in refused(run, source, target, "--strict") and not target.exists()
    assert run(source, target) == 0
    (skipped,) = description(target)["skipped"]
    assert skipped["path"] == "b.png" and "at most 5000 fit; --max-side" in skipped["reason"]
    assert len(read_samples(target)) == 1


def test_a_failing_source_disk_stops_and_writes_nothing(
    tmp_path: Path, photos: Path, monkeypatch: pytest.MonkeyPatch, refused: Says
) -> None:
    read = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "3.jpg":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert "ant/3.jpg cannot be read: Input/output error" in refused(
        run, photos, tmp_path / "out", workers=2
    )
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]
