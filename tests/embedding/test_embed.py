"""``pospre.embed``: the same numbers as ``features``, in order, also after kills and on ranks."""

import hashlib
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

import pospre
from pospre.data.stores.folder_reader import FolderReader
from pospre.embedding import features as features_module
from pospre.embedding import folder as folder_module
from pospre.embedding.embed import embed
from pospre.embedding.features import ALONE, Ranks
from pospre.embedding.folder import Folder
from pospre.embedding.layouts import Array, safetensors_files
from pospre.embedding.settings import Embed
from pospre.errors import UserError
from pospre.evaluation.common_settings import Sampling
from pospre.evaluation.features import centre_batches
from pospre.evaluation.registry import Context, typed_settings
from pospre.training.foreign import AS_NOTED, Shown
from tests.conftest import write_images
from tests.disk import snapshot
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.refusals import refuses

COUNT, DIM = 7, 192


class Made(NamedTuple):
    """A run, and images of three sizes with two classes."""

    run: str
    data: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a run of an encoder with registers, and seven images."""
    place = tmp_path_factory.mktemp("embed")
    small: dict[str, Any] = {"image_size": 64, "num_registers": 3}
    save_checkpoint(tiny_recipe(place / "runs", "mae", **small))
    data = write_images(place / "images", COUNT - 2, ("cat", "dog"))
    write_images(data / "tall", 1, size=(50, 90))
    write_images(data / "wide", 1, size=(130, 70))
    return Made(str(place / "runs" / "tiny"), data)


def embedded(
    made: Made, out: Path, ranks: Ranks = ALONE, shown: Shown = AS_NOTED, **settings: Any
) -> dict[str, np.ndarray]:
    """Return the arrays of a folder, written now."""
    chosen = typed_settings(Embed, "embed", {key: str(value) for key, value in settings.items()})
    embed(made.run, str(made.data), out, chosen, shown=shown, ranks=ranks, progress=False)
    return {path.stem: np.load(path) for path in out.glob("*.npy")}


def lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of ``images.jsonl``."""
    return [json.loads(line) for line in (folder / "images.jsonl").read_text().splitlines()]


def pixels(made: Made) -> tuple[pospre.PretrainModel, torch.Tensor]:
    """Return the run's model and its normalised views of all images, as evaluations show them."""
    model = pospre.load_run(made.run)
    context = Context(model, lambda: model, str(made.data), torch.device("cpu"), progress=False)
    (batch,) = centre_batches(context, Sampling())
    return model, model.images(batch)[:, 0]


@torch.no_grad()
def test_features_are_those_of_the_model_in_the_order_of_the_data(
    made: Made, tmp_path: Path
) -> None:
    found = embedded(made, tmp_path / "out", features="patches,cls,mean", layers="1,2")
    model, images = pixels(made)
    assert {name: each.shape for name, each in found.items()} == {
        f"{kind}_l{layer}": (COUNT, *((16,) if kind == "patches" else ()), DIM)
        for kind in ("cls", "mean", "patches")
        for layer in (1, 2)
    }
    tokens = model.encoder(images)
    for layer, patches in zip((1, 2), model.features(images, [1, 2]), strict=True):
        assert np.array_equal(found[f"patches_l{layer}"], patches)  # bit-equal
        assert np.array_equal(found[f"mean_l{layer}"], patches.mean(1))
    assert np.array_equal(found["cls_l2"], tokens[:, 0])
    other = embedded(made, tmp_path / "raw", layers="2", norm=False, features="cls")
    assert np.array_equal(other["cls_l2"], model.encoder(images, layers=[2])[0][:, 0])
    half = embedded(made, tmp_path / "half", dtype="float16")
    assert np.array_equal(half["cls"], found["cls_l2"].astype(np.float16))


def test_each_row_says_what_it_is_of(made: Made, tmp_path: Path) -> None:
    embedded(made, tmp_path / "out")
    reader = FolderReader(made.data)
    for row, line in enumerate(lines(tmp_path / "out")):
        label, path = reader.about(row)
        content = (made.data / path).read_bytes()
        with Image.open(made.data / path) as image:
            sides = image.size
        assert (line["row"], line["index"], line["path"], line["label"]) == (row, row, path, label)
        assert line["sha256"] == hashlib.sha256(content).hexdigest()
        assert (line["width"], line["height"]) == sides
    told = json.loads((tmp_path / "out" / "embedding.json").read_text())
    assert told["features"] == {"cls": [COUNT, DIM], "mean": [COUNT, DIM]}
    assert (told["image_size"], told["grid"], told["patch"]) == ([64, 64], [4, 4], [16, 16])
    assert told["places"][:2] == [[0.125, 0.125], [0.125, 0.375]] and len(told["places"]) == 16
    assert told["classes"] == ["cat", "dog", "tall", "wide"] and told["images"] == COUNT
    assert told["resize"]["rule"].startswith("short side to 256/224")
    assert told["norm"] is True and told["positions"] == "sincos" and told["step"] == 2


def test_the_tokens_of_swin_cover_four_patches(made: Made, tmp_path: Path) -> None:
    swin = {"name": "swin_tiny", "depth": None, "class_token": False, "positions": "relative"}
    save_checkpoint(tiny_recipe(tmp_path / "runs", "mae", **swin, window=2))
    run = made._replace(run=str(tmp_path / "runs" / "tiny"))
    found = embedded(run, tmp_path / "out", features="mean,patches")
    told = json.loads((tmp_path / "out" / "embedding.json").read_text())
    assert found["patches"].shape == (COUNT, 4, 768) and told["grid"] == [2, 2]
    assert told["places"] == [[0.25, 0.25], [0.25, 0.75], [0.75, 0.25], [0.75, 0.75]]
    with pytest.raises(UserError, match=r"layers and norm=false are for a ViT"):
        embedded(run, tmp_path / "other", layers="1")


@pytest.mark.parametrize("file_format", ["safetensors", "parquet"])
def test_formats_hold_the_same_numbers(made: Made, tmp_path: Path, file_format: str) -> None:
    usual = embedded(made, tmp_path / "npy")
    embedded(made, tmp_path / "other", format=file_format, batch_size=COUNT)
    assert len(snapshot(tmp_path / "other")) == 3
    if file_format == "safetensors":
        found = load_file(tmp_path / "other" / "features.safetensors")
    else:
        table = pyarrow.parquet.read_table(tmp_path / "other" / "features.parquet")
        found = {name: np.stack(table[name].to_numpy()) for name in usual}
        assert table["path"].to_pylist() == [line["path"] for line in lines(tmp_path / "npy")]
    assert all(np.array_equal(found[name], each) for name, each in usual.items())


def test_the_shards_of_safetensors_have_rows_of_all_arrays(
    tmp_path: Path, monkeypatch: Any
) -> None:
    arrays = [Array("cls", (5, 3), "float32"), Array("mean", (5, 2), "float16")]
    few = partial(safetensors_files, limit=2 * (12 + 4))
    monkeypatch.setattr(folder_module, "safetensors_files", few)
    work = Folder(tmp_path / "out", {}, arrays, "safetensors")
    work.open(0, 1)
    numbers = np.arange(15, dtype=np.float32).reshape(5, 3)
    for rows in (range(3), range(3, 5)):  # batches do not end where files do
        own = numbers[rows.start : rows.stop]
        values: dict[str, np.ndarray] = {"cls": own, "mean": own[:, :2].astype(np.float16)}
        work.write(rows.start, values, [b'{"row": %d}\n' % row for row in rows])
    assert work.close()
    shards = [load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))]
    assert [len(shard["cls"]) for shard in shards] == [2, 2, 1]
    assert np.array_equal(np.concatenate([shard["cls"] for shard in shards]), numbers)
    assert np.array_equal(np.concatenate([shard["mean"] for shard in shards]), numbers[:, :2])


def test_batch_sizes_agree_and_ranks_and_workers_give_the_same_bytes(
    made: Made, tmp_path: Path
) -> None:
    two, three = (
        embedded(made, tmp_path / str(size), features="patches,cls", batch_size=size)
        for size in (2, 3)
    )
    assert all(np.allclose(two[name], each, atol=1e-5) for name, each in three.items())
    options: dict[str, Any] = {"features": "patches,cls", "batch_size": 2, "num_workers": 3}
    for rank in (2, 0, 1):
        embedded(made, tmp_path / "ranks", ranks=Ranks(rank, 3), **options)
        assert (tmp_path / "ranks").exists() == (rank == 1)  # the last one to end
    assert snapshot(tmp_path / "ranks") == snapshot(tmp_path / "2")
    assert embedded(made, tmp_path / "ranks", ranks=Ranks(0, 3), **options)  # late: it is done


@pytest.mark.parametrize("ends", [0, 1, 3, "published"])
def test_a_killed_command_goes_on_and_gives_the_same_bytes(
    made: Made, tmp_path: Path, monkeypatch: Any, ends: int | str
) -> None:
    options: dict[str, Any] = {"features": "patches", "batch_size": 2}
    embedded(made, tmp_path / "whole", **options)
    out, work = tmp_path / "out", tmp_path / "out.partial"
    written: list[int] = []
    write = Folder.write

    def killed(self: Folder, first: int, *rest: Any) -> None:
        if len(written) == ends:
            raise KeyboardInterrupt
        written.append(first)
        self._flushed = -1e9  # as if a second had passed
        write(self, first, *rest)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Folder, "write", killed)
        if ends == "published":
            patched.setattr(Folder, "_publish", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        embedded(made, out, **options)
    assert not out.exists()
    if ends != "published":
        journal = work / "rows-0-of-1.jsonl"
        assert len(journal.read_bytes().splitlines()) == 2 * int(ends)
        with journal.open("ab") as file:
            file.write(b'{"row": 6, "pa')  # a line that the kill cut
    kept = {*written}
    written.clear()
    ends = -1  # nothing ends it
    monkeypatch.setattr(Folder, "write", killed)
    embedded(made, out, **options)
    assert not kept & {*written} and not work.exists()
    assert snapshot(out) == snapshot(tmp_path / "whole")


def test_equal_names_are_kept_apart(made: Made, tmp_path: Path, monkeypatch: Any) -> None:
    usual = embedded(made, tmp_path / "usual")
    monkeypatch.setattr(FolderReader, "about", lambda _, index: (0, "a.jpg"))
    found = embedded(made, tmp_path / "out")
    assert np.array_equal(found["cls"], usual["cls"])
    assert [(line["row"], line["path"]) for line in lines(tmp_path / "out")] == [
        (row, "a.jpg") for row in range(COUNT)
    ]


def test_a_broken_image_is_a_row_of_nan_and_named(
    made: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shutil.copytree(made.data, tmp_path / "images")
    (data / "dog" / "0001.jpg").write_bytes((data / "dog" / "0001.jpg").read_bytes()[:300])
    broken, out = made._replace(data=data), tmp_path / "out"
    refuses(r"1 of 7 images could not be read:\n  row 3: .*0001.jpg", lambda: embedded(broken, out))
    assert "cls 7 × 192" in capsys.readouterr().err  # the size, first
    found = embedded(broken, out, skip=True)  # it is complete, and nothing is computed again
    usual = embedded(made, tmp_path / "usual")
    for name, numbers in found.items():
        assert np.isnan(numbers[3]).all()
        assert np.array_equal(np.delete(numbers, 3, 0), np.delete(usual[name], 3, 0))
    assert lines(out)[3]["error"] and lines(out)[3]["path"] == "dog/0001.jpg"


@pytest.mark.parametrize(
    ("resize", "boxes"),
    [
        ("squash", [[0, 0, 50, 90], [0, 0, 130, 70]]),
        ("pad", [[-19.444, 0, 69.444, 90], [0, -30.882, 130, 100.882]]),
        ("native", [[1, 5, 49, 85], [1, 3, 129, 67]]),
    ],
)
@torch.no_grad()
def test_resize_rules(made: Made, tmp_path: Path, resize: str, boxes: list[list[float]]) -> None:
    found = embedded(made, tmp_path / "out", features="mean", resize=resize)
    told = lines(tmp_path / "out")[-2:]
    assert [line["box"] for line in told] == boxes
    model = pospre.load_run(made.run)
    for line, mean in zip(told, found["mean"][-2:], strict=True):
        picture = Image.open(made.data / line["path"]).convert("RGB")
        size, corner = (64, 64), (0, 0)
        if resize == "native":
            left, top, right, bottom = map(int, line["box"])
            picture = picture.crop((left, top, right, bottom))
            size = picture.size
        elif resize == "pad":
            size = {(50, 90): (36, 64), (130, 70): (64, 34)}[picture.size]
            corner = ((64 - size[0]) // 2, (64 - size[1]) // 2)
        view = Image.new("RGB", (64, 64) if resize == "pad" else size, (124, 116, 104))
        view.paste(picture.resize(size, Image.Resampling.BICUBIC), corner)
        images = torch.from_numpy(np.array(view)).permute(2, 0, 1)[None, None]
        shown = model.augment(images, torch.zeros(1, 1, dtype=torch.bool))[:, 0]
        expected = model.features(shown, [2])[0].mean(1)[0]
        assert torch.nn.functional.cosine_similarity(expected, torch.tensor(mean), 0) > 0.9999


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"features": "patches", "format": "parquet"}, "features=patches with format=parquet"),
        ({"features": "patches", "resize": "native"}, "features=patches with resize=native"),
        ({"features": "max"}, "embed: features=max: .*'cls', 'mean' or 'patches'"),
        ({"layers": "3"}, "layer 3, but the encoder has 2 blocks"),
        ({"dtype": "int8"}, "embed: dtype=int8"),
        ({"shown": Shown((60, 60))}, "--image-size"),
        ({"kind": 1}, "embed has no setting 'kind'"),
    ],
)
def test_mistakes_write_nothing(
    made: Made, tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    refuses(said, lambda: embedded(made, tmp_path / "out", **settings))
    assert not [*tmp_path.iterdir()]


def test_weights_of_other_heads_or_rates_do_not_go_on(made: Made, tmp_path: Path) -> None:
    """They have the same tensors, and thus the same hash."""
    encoder = pospre.build_encoder("vit_tiny16", image_size=64, depth=1, positions="none")
    file, out = tmp_path / "weights.pth", tmp_path / "out"
    torch.save({encoder.timm_name_of(k): v for k, v in encoder.state_dict().items()}, file)
    embedded(made._replace(run=f"{file},positions=none"), out)
    for said, words in (
        (",positions=none,heads=6", "num_heads 3, but now it is 6"),
        (",positions=rotary", 'positions "none", but now it is "rotary"'),
    ):
        other = made._replace(run=f"{file}{said}")
        refuses(f"holds rows with {words}", partial(embedded, other, out))


def test_a_full_disk_and_other_folders_are_refused(
    made: Made, tmp_path: Path, monkeypatch: Any
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"has 0\.050 MB; write"):
        patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 50_000))
        embedded(made, out, features="patches")
    assert not [*tmp_path.iterdir()]
    embedded(made, out)
    before = snapshot(out)
    with pytest.raises(UserError, match=r"holds rows with norm true, but now it is false"):
        embedded(made, out, norm=False)
    other = made._replace(data=write_images(tmp_path / "others", 3))
    refuses(r"holds rows with images 7, but now it is 3", lambda: embedded(other, out))
    with pytest.raises(UserError, match=r"OUT .*others exists, but is no folder of this command"):
        embedded(made, tmp_path / "others")
    with pytest.raises(UserError, match=r"remote; write to a disk"):
        embed(made.run, str(made.data), "s3://bucket/out", Embed(), shown=AS_NOTED)
    assert snapshot(out) == before and not (tmp_path / "out.partial").exists()
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"use dtype=float32"):
        pooled = features_module._pooled
        patched.setattr(features_module, "_pooled", lambda *given: 1e6 * pooled(*given))
        embedded(made, tmp_path / "half", dtype="float16")
    with monkeypatch.context() as patched, pytest.raises(UserError, match=r"another process"):
        first = Folder(tmp_path / "two", {}, [Array("cls", (1, 1), "float32")], "npy")
        second = Folder(tmp_path / "two", {}, [Array("cls", (1, 1), "float32")], "npy")
        first.open(0, 1)
        second.open(0, 1)
