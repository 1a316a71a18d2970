"""pospre as a library: under a plain Composer Trainer, in a plain loop, with timm's models."""

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from composer import Trainer
from torch.optim import AdamW
from torch.utils.data import DataLoader

import pospre
from pospre.algorithms.mae import MAE
from pospre.errors import UserError
from pospre.model.algorithm import algorithm_names
from tests.algorithms.cases import DECODER, HOST_OF, Case
from tests.refusals import refuses
from tests.training.callbacks.plain import Rows, fit

ROOT = Path(__file__).parents[1]
UNTYPED: Any = pospre  # as who has no type checker uses it
READMES = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "pospre/README.md")]
PIECES = re.findall(r"^```python\n(.*?)^```", "".join(READMES), re.M | re.S)
SMALL: dict[str, Any] = DECODER
QUIET: dict[str, Any] = {"progress_bar": False, "device": "cpu"}


@pytest.mark.parametrize(
    "piece", PIECES, ids=["composer", "pytorch", "loader", "resume", "measure"]
)
def test_the_pieces_of_the_readmes_run_as_printed(
    piece: str, image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_folder(num_images=16, name="data/photos")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "piece"}
    exec(compile(piece, "README", "exec"), names)
    if "figures" in names:
        assert 0 <= names["figures"]["top1"] <= 1
    elif "trainer" in names:
        assert names["trainer"].state.timestamp.batch == 2 * names["step"] + 2
    else:
        assert float(names["out"].loss if "out" in names else names["loss"]) > 0


def test_the_loop_of_the_readme_resumes_as_if_never_stopped(
    image_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image_folder(num_images=24, name="data/photos")
    piece = next(piece for piece in PIECES if "last.pt" in piece)
    step, ends = torch.optim.SGD.step, {}
    for name, stops in (("whole", []), ("killed", [1, 1, 2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").symlink_to(tmp_path / "data")
        monkeypatch.chdir(tmp_path / name)
        for steps in (*stops, 99):
            left = iter(range(steps))

            def limited(self: Any, *args: Any, left: Any = left, **kwargs: Any) -> Any:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return step(self, *args, **kwargs)

            torch.manual_seed(0)
            monkeypatch.setattr(torch.optim.SGD, "step", limited)
            with suppress(KeyboardInterrupt):
                exec(compile(piece, "README", "exec"), {"__name__": "piece"})
        ends[name] = torch.load("last.pt", weights_only=True)
    assert ends["whole"]["loader"] == ends["killed"]["loader"] == {"epoch": 1, "samples": 24}
    torch.testing.assert_close(ends["killed"]["model"], ends["whole"]["model"], rtol=0, atol=0)


@pytest.mark.parametrize("name", algorithm_names())
def test_every_algorithm_trains_under_a_bare_trainer(name: str) -> None:
    case = Case((*HOST_OF.get(name, ()), name))
    model = case.build()
    before = {key: value.clone() for key, value in model.named_parameters()}
    fit(case, steps=3, built=model, batch=case.batch(12))
    still = {
        key
        for key, value in model.named_parameters()
        if value.requires_grad and torch.equal(value, before[key])
    }
    assert still <= {"encoder.pos_embed"}, still  # crop_field gives positions in its place
    teachers = {key for key in before if key.startswith("teacher.")}
    assert not teachers or any(not torch.equal(before[k], model.state_dict()[k]) for k in teachers)


def test_what_no_optimizer_trains_is_an_error_that_names_it() -> None:
    model = Case(("mae",)).build()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(Rows(Case(("mae",)).batch()), batch_size=4),
        optimizers=AdamW(model.encoder.parameters()),
        algorithms=model.algorithms,
        max_duration="1ba",
        **QUIET,
    )
    with pytest.raises(UserError) as caught:
        trainer.fit()
    for words in ("19 tensors", "objectives.named.mae.", "[pospre.MAE()]", "requires_grad_(False)"):
        assert words in str(caught.value)
    for name, parameter in model.named_parameters():  # the other remedy that it names
        if name.startswith("objectives."):
            parameter.requires_grad_(False)
    trainer.fit()


def test_the_number_of_the_epoch_comes_from_the_trainer() -> None:
    case, seen = Case(("mae",)), []

    class Watched(MAE):
        def write(self, batch: dict[str, torch.Tensor], model: pospre.PretrainModel) -> None:
            seen.append(batch["epoch"].tolist())
            super().write(batch, model)

    model = pospre.PretrainModel(case.encoder_of(), [Watched(**SMALL)])
    batch = {key: value for key, value in case.batch().items() if key != "epoch"}
    fit(case, steps=3, built=model, batch=batch)
    assert seen == [[0] * 4, [1] * 4, [2] * 4]


def test_images_of_any_loader_become_a_batch() -> None:
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    model = Case(("supervised",)).build()
    label, index = torch.tensor([0, 1, 2, 0]), torch.arange(4)
    batch = pospre.from_images(images, index=index, epoch=2, label=label)
    terms = model.loss(model(model.prepare(batch, 0.5)), batch)
    assert torch.isfinite(terms["total"])
    assert torch.equal(
        model.images(batch)[:, 0], pospre.DeviceAugment()(images[:, None], batch["view/flip"])[:, 0]
    )
    with pytest.raises(UserError, match=r"images of torch.float32 .*PILToTensor"):
        pospre.from_images(images / 255, index=index)
    del batch["index"]
    with pytest.raises(UserError, match=r"'index', from which masks are drawn.*from_images"):
        pospre.batch.numbered(batch, epoch=0)


def test_the_crop_field_asks_where_images_were_cut() -> None:
    model = Case(("mae", "crop_field")).build()
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    given: dict[str, Any] = {"images": images, "index": torch.arange(4), "epoch": 0}
    refuses(
        r"lacks 'view/box'.*from_images\(images, boxes=…, mirrored=",
        lambda: model.prepare(pospre.from_images(**given), 0.0),
    )
    with pytest.raises(UserError, match=r"boxes of shape \(4, 2\) for images of shape"):
        pospre.from_images(**given, boxes=torch.zeros(4, 2))
    upright: dict[str, Any] = {"mirrored": torch.zeros(4, dtype=torch.bool)}
    for wrong in ([8.0, 0.0, 24.0, 16.0], [0.5, 0.5, 0.25, 0.25]):  # pixels; width and height
        with pytest.raises(UserError, match=r"from_images got boxes from .* as shares of the"):
            pospre.from_images(**given, **upright, boxes=torch.tensor(wrong).repeat(4, 1))
    boxes = torch.tensor([0.25, 0.0, 0.75, 0.5]).repeat(4, 1)
    with pytest.raises(UserError, match=r"got boxes, but not which views are mirrored"):
        pospre.from_images(**given, boxes=boxes)
    batch = pospre.from_images(**given, **upright, boxes=boxes)
    batch = model.prepare(batch, 0.0)
    assert torch.equal(batch["view/box"], boxes[:, None])
    assert batch["view/field_box"].shape == (4, 1, 4)
    assert torch.isfinite(model.loss(model(batch), batch)["total"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
        ("vit_small_patch14_reg4_dinov2", {"embed_dim": 96, "num_heads": 3}),
        ("vit_tiny_patch16_224", {"init_values": 1e-5, "in_chans": 1}),
        ("vit_giant_patch14_dinov2", {"embed_dim": 48, "num_heads": 3, "init_values": 0.5}),
        ("vit_base_patch16_clip_quickgelu_224", {"embed_dim": 48, "num_heads": 3}),
        ("vit_tiny_patch16_224", {"qkv_bias": False, "act_layer": "gelu_tanh"}),
        ("vit_tiny_patch16_224", {"qk_norm": True}),
    ],
)
def test_a_model_of_timm_becomes_the_encoder(name: str, options: dict[str, Any]) -> None:
    vit: Any = timm.create_model(
        name, img_size=56, patch_size=14, depth=2, num_classes=5, **options
    )
    encoder = pospre.wrap_encoder(vit)
    images = torch.randn(2, encoder.channels, 56, 56)
    expected = vit.eval().forward_features(images)
    torch.testing.assert_close(encoder.eval()(images), expected, rtol=1e-3, atol=1e-4)
    back: Any = timm.create_model(encoder.timm_name, **encoder.timm_kwargs, num_classes=0)
    back.load_state_dict(encoder.timm_state())
    torch.testing.assert_close(back.eval().forward_features(images), expected, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.add_(0.01)
    vit.load_state_dict(encoder.timm_state(vit), strict=False)  # as pospre/README.md prints it
    torch.testing.assert_close(vit.forward_features(images), encoder(images), rtol=1e-3, atol=1e-4)


def test_timm_names_a_size() -> None:
    encoder = pospre.build_encoder("timm:deit3_small_patch16_224", image_size=32, depth=1)
    assert (encoder.embed_dim, encoder.patch_size, encoder.depth) == (384, (16, 16), 1)


def test_the_names_of_the_package_are_documented_and_import_nothing_before_use() -> None:
    told = set(re.findall(r"``([A-Za-z]\w+)``", pospre.__doc__ or "")) - {"vits16", "ComposerModel"}
    assert told == set(pospre.__all__) <= set(dir(pospre))
    assert all(callable(getattr(pospre, name)) for name in pospre.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = UNTYPED.nothing
    seen = "import sys, pospre; sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", seen], cwd=ROOT).returncode == 0


def pixels(*shape: int) -> torch.Tensor:
    return torch.zeros(4, *(shape or (3, 32, 32)), dtype=torch.uint8)


def test_a_plain_loop_that_leaves_something_out_is_an_error() -> None:
    model = Case(()).build()
    with pytest.raises(UserError, match=r"no algorithm, and thus no loss. .*\[pospre.MAE\(\)\]"):
        model.loss(model({}), {})
    model = Case(("ema_teacher", "mae")).build()
    early = AdamW(model.encoder.parameters(), lr=1e-3)
    batch = pospre.from_images(pixels(), index=torch.arange(4))
    refuses(r"lacks 'epoch', .*epoch=…", lambda: model.prepare(batch, 0.0))
    batch = pospre.batch.numbered(batch, epoch=0)
    refuses(r"lacks 'view/visible', which algorithms.mae writes", lambda: model(batch))
    refuses(r"progress is 3; give the completed share", lambda: model.prepare(batch, 3))
    model.loss(model(model.prepare(batch, 0.0)), batch)["total"].backward()
    early.step()
    refuses(r"19 tensors .*objectives.named.mae.*before making", lambda: model.after_step(0.0))


def test_labels_that_no_class_has_are_refused() -> None:
    model = Case(("supervised",)).build()
    batch = pospre.from_images(pixels(), index=torch.arange(4), epoch=0)
    refuses(r"num_classes = \d+, and a batch the label -1", lambda: model.prepare(batch, 0.0))
    batch["label"] = torch.zeros(4, 1, dtype=torch.int64)  # would be compared with all images
    refuses(
        r"'label' is .* of shape \(4, 1\): make it a tensor \(B,\)",
        lambda: model.prepare(batch, 0.0),
    )
    batch["label"] = torch.zeros(4, dtype=torch.int32)
    batch = model.prepare(batch, 0.0)
    assert torch.isfinite(model.loss(model(batch), batch)["total"])
    del batch["label"]
    refuses(r"lacks 'label'; pospre.build_loader and", lambda: model.prepare(batch, 0.0))
