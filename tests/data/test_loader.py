"""The loader: the same batches from every format, whatever threads, ranks and skips."""

import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from composer.core.data_spec import DataSpec
from PIL import Image
from torchvision.transforms import CenterCrop, InterpolationMode, Resize
from torchvision.transforms.functional import pil_to_tensor

from pospre import draws
from pospre.data.decode.decoder import decode_image
from pospre.data.loader import ViewLoader, build_loader
from pospre.data.opening import open_reader
from pospre.data.stores.reader import Features
from pospre.data.views.augment_options import Augment
from pospre.data.views.crop_plan import plan_views
from pospre.data.views.decode_crops import Views, resize_crops
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.recipe.recipe import recipe_from_dict
from pospre.training.data import build_data
from tests.data.loading import VIEW, count_calls, joined, loader, same
from tests.processes import started
from tests.refusals import refuses

DOCUMENTED = build_loader.__doc__ or ""


def loader_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "pospre-loader" in thread.name]


def test_batches_keep_the_contract(photos):
    batches = list(loader(photos))
    assert len(batches) == len(loader(photos)) == 5
    for batch in batches:
        expected = {
            "index": ((4,), torch.int64),
            "epoch": ((4,), torch.int64),
            "label": ((4,), torch.int64),
            "view/image": ((4, 1, 3, 32, 32), torch.uint8),
            "view/box": ((4, 1, 4), torch.float32),
            "view/flip": ((4, 1), torch.bool),
        }
        assert {key: (tuple(v.shape), v.dtype) for key, v in batch.items()} == expected
        assert batch["view/image"].stride()[-3:] == (1, 96, 3)  # channels last in memory


def test_a_path_and_a_batch_size_suffice(photos):
    """As in another training code."""
    ours = build_loader(photos, batch_size=4)
    epochs = [list(ours) for _ in range(2)]
    assert [len(batches) for batches in epochs] == [len(ours)] * 2 == [5, 5]
    assert ours.num_samples == 22 and ours.classes == ["ant", "bee", "cat"]
    assert not same(joined(epochs[0]), joined(epochs[1]))
    described = {key for key in epochs[0][0] if f"``{key.replace('view/', 'g/')}``" in DOCUMENTED}
    assert described == set(epochs[0][0])


def test_repeats_come_in_a_row_with_draws_of_their_own(photos):
    ours = loader(photos, repeats=3)
    ours.epoch = 2
    assert len(ours) == len(loader(photos)) == 5
    whole = joined(list(ours))
    assert whole["index"].tolist() == np.repeat(draws.order(3, 2, 22), 3)[:20].tolist()
    assert whole["epoch"].tolist() == ([6, 7, 8] * 7)[:20]
    boxes = whole["view/box"][:18].unflatten(0, (6, 3))
    assert all((boxes[:, one] != boxes[:, other]).any(-1).all() for one, other in ((0, 1), (1, 2)))
    ours.epoch = 3
    assert not set(joined(list(ours))["epoch"].tolist()) & {6, 7, 8}


def test_views_are_the_planned_boxes_of_the_decoded_image(photos):
    ours = loader(photos)
    batch = next(iter(ours))
    (plan,) = plan_views([VIEW], seed=3, epoch=0, index=batch["index"].numpy())
    for row, index in enumerate(batch["index"].tolist()):
        image = decode_image(ours.reader.read(index).encoded)
        height, width = image.shape[:2]
        crops = plan.crops(row, width, height)
        (view,) = views = np.empty((1, 32, 32, 3), np.uint8)
        resize_crops(image, [Views(crops, views, "bicubic")])
        assert np.array_equal(batch["view/image"][row, 0].permute(1, 2, 0).numpy(), view)
        assert np.array_equal(batch["view/box"][row].numpy(), crops.relative)
    assert np.array_equal(batch["view/flip"].numpy(), plan.flips)


def test_the_tail_is_kept_for_evaluation(photos):
    ours = loader(photos, shuffle=False, drop_last=False, views=[ViewGroup(size=32, crop="center")])
    batches = list(ours)
    assert [len(batch["index"]) for batch in batches] == [4, 4, 4, 4, 4, 2] and len(ours) == 6
    assert joined(batches)["index"].tolist() == list(range(22))
    assert not joined(batches)["view/flip"].any()
    assert same(joined(list(loader(photos, shuffle=False, drop_last=False, batch_size=50))),
                joined(list(loader(photos, shuffle=False, drop_last=False))))  # fmt: skip


def test_composer_splits_a_batch_as_it_is(photos):
    spec = DataSpec(loader(photos, batch_size=6))
    batch = next(iter(spec.dataloader))
    assert spec.get_num_samples_in_batch(batch) == 6
    parts = spec.split_batch(batch, 4)
    assert [len(part["index"]) for part in parts] == [4, 2]
    assert same(joined(list(parts)), batch)


def test_a_break_and_ctrl_c_in_the_consumer_leave_no_thread(photos):
    for _ in loader(photos):
        assert loader_threads()
        break
    assert not loader_threads()
    with pytest.raises(KeyboardInterrupt):
        for _ in loader(photos):
            raise KeyboardInterrupt
    assert not loader_threads()


def test_ctrl_c_ends_a_waiting_program_at_once(photos):
    program = (
        "import sys, itertools\n"
        "from pospre.data.loader import build_loader\n"
        "from pospre.data.views.options import ViewGroup\n"
        "from pospre.errors import run_command\n"
        "def main():\n"
        "    loader = build_loader(sys.argv[1], views=[ViewGroup()], batch_size=4, seed=0)\n"
        "    for number in itertools.count():\n"
        "        for batch in loader:\n"
        "            print(number, flush=True)\n"
        "sys.exit(run_command(main))\n"
    )
    command = [sys.executable, "-c", program, str(photos)]
    with started(command) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    words = "before the end: nothing is half written; run the same command again"
    assert (process.returncode, said) == (130, f"stopped by Ctrl-C {words}\n")


def test_compiled_code_is_loaded_while_the_first_shards_come(photos, monkeypatch):
    ours = loader(photos, num_workers=1)
    done: list[str] = []

    def count(owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def counted(*given: Any) -> Any:
            done.append(name)
            return call(*given)

        monkeypatch.setattr(owner, name, counted)

    count(ours.reader, "expect")
    count(ours._filler, "load_compiled")
    count(ours._filler, "fill")
    next(iter(ours))
    assert done[:3] == ["expect", "load_compiled", "fill"]


def test_memory_is_bounded(photos, monkeypatch):
    ours = loader(photos, batch_size=1, num_workers=1)
    started = count_calls(monkeypatch, ours, "_start")
    batches = iter(ours)
    next(batches)
    assert len(started) <= 8 < len(ours)


def test_a_vanished_image_is_named(image_folder):
    folder = image_folder(num_images=8)
    ours = loader(folder)
    (folder / "dog" / "0003.jpg").unlink()
    refuses(r"dog/0003\.jpg cannot be read: No such file", lambda: list(ours))


def test_a_folder_of_odd_files_gives_views(tmp_path):
    for number, mode in enumerate(("RGB", "L", "CMYK", "RGB")):
        suffix = "tiff" if mode == "CMYK" else "png"
        Image.new(mode, (1 + 40 * number, 300)).save(tmp_path / f"ünï code {number}.{suffix}")
    batch = next(iter(loader(tmp_path)))
    assert batch["label"].tolist() == [-1] * 4 and (batch["view/box"] <= 1).all()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 23}, "has 22 samples, fewer than one batch of 23"),
        ({"batch_size": 12, "world_size": 2}, "one batch of 24"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"num_workers": -1}, "num_workers is -1"),
        ({"repeats": 0}, "repeats is 0"),
        ({"bad_samples": "skp"}, "bad_samples is 'skp': .*'fail' or 'skip'"),
        ({"order": "window"}, "order is 'window': .*'random' or 'windows'"),
        ({"order": "windows", "window": 0}, "window is 0: .*greater than 0"),
    ],
)
def test_impossible_batches_are_refused(photos, options, said):
    refuses(said, lambda: loader(photos, **options))


def test_features_are_not_coloured(photos):
    reader = open_reader(photos)
    reader.features = Features((32, 32), (), ())
    views = [ViewGroup(size=32, augment=Augment(grayscale_rate=0.5))]
    with pytest.raises(UserError, match=r"has features, but data\.views\.view\.augment"):
        ViewLoader(reader, views=views, batch_size=4, seed=0)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("auto", True)])
def test_a_run_on_the_cpu_pins_no_memory_beside_a_gpu(photos, monkeypatch, device, pinned):
    content: dict[str, Any] = {
        "run_name": "run",
        "data": {"path": str(photos), "batch_size": 4},
        "encoder": {"name": "vit_tiny16"},
        "algorithms": {"mae": {}},
        "trainer": {"max_duration": "1ep", "device": device},
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    recipe = recipe_from_dict(content)
    assert build_data(recipe).pinned == pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_batches_lie_in_pinned_memory(photos):
    for wanted in (True, False):
        batch = next(iter(loader(photos, pin_memory=wanted)))
        assert batch["view/image"].is_pinned() == wanted


@pytest.mark.parametrize("size", [32, 224])
def test_the_centre_view_is_the_published_one(photos, size):
    """Resize(256/224 of the size), CenterCrop, as torchvision does with Pillow: within 2 levels.

    At 224 the photographs are enlarged.
    """
    views = [ViewGroup(size=size, crop="center")]
    ours = joined(list(loader(photos, shuffle=False, drop_last=False, tolerance=0.0, views=views)))
    resize = Resize(int(size * 256 / 224), interpolation=InterpolationMode.BICUBIC)
    for number, path in enumerate(sorted(photos.rglob("*.jpg"))):
        theirs = CenterCrop(size)(resize(Image.open(path).convert("RGB")))
        error = ours["view/image"][number, 0] - pil_to_tensor(theirs).float()
        assert error.abs().max() <= 2 and error.square().mean().sqrt() < 0.3


@pytest.mark.parametrize("num_workers", [0, 2])
def test_torch_keeps_its_threads(photos, num_workers):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(loader(photos, num_workers=num_workers))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
