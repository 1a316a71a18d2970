"""Starting from another training's encoder: all of it, or an error that names the tensor."""

import pickle
import shutil
import tarfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import save_file

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.positions.table import resample_positions
from pospre.nn.weights.kernels import resized_kernel
from pospre.recipe.recipe import recipe_from_dict
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.build import build_model, load_model
from pospre.training.start_weights import load_weights
from tests.algorithms.cases import made
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.run.checkpoints.checkpoint_files import write_checkpoint
from tests.run.checkpoints.test_damage import Payload
from tests.training.tiny_runs import Run

TABLE = "relative_position_bias_table"


def small(**options: Any) -> PretrainModel:
    settings: dict[str, Any] = {"image_size": 64, "depth": 2, **options}
    return PretrainModel(build_encoder("vit_tiny16", **settings), seed=0)


def exported(
    path: Path, *, shift: float = 0.1, **options: Any
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write an encoder whose weights are the initial ones with a shift, but for a fixed table."""
    encoder = small(**options).encoder
    weights = {encoder.timm_name_of(k): v + shift for k, v in encoder.state_dict().items()}
    if encoder.positions.name == "sincos":
        weights["pos_embed"] = encoder.positions.exported(encoder.grid)["pos_embed"]
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)
    return path, weights


def found_in(model: PretrainModel) -> dict[str, torch.Tensor]:
    """Return the encoder's tensors by timm's names."""
    return {model.encoder.timm_name_of(k): v for k, v in model.encoder.state_dict().items()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tiny_recipe(tmp_path_factory.mktemp("runs"), "mae"))


def test_a_checkpoint_gives_every_tensor_to_encoder_and_teacher(checkpoint: Path) -> None:
    model = PretrainModel(small().encoder, [made("ijepa")])
    line = load_weights(model, str(checkpoint.parents[1]))  # the run folder
    expected = load_model(str(checkpoint))[0].encoder.state_dict()
    assert model.teacher is not None
    for encoder in (model.encoder, model.teacher.module):
        for key, value in encoder.state_dict().items():
            assert torch.equal(value, expected[key]), key
    count = f"{len(expected)} of {len(expected)}"
    assert line.startswith(f"encoder: {count} tensors from {checkpoint} (student); images with ")


def test_a_teacher_is_asked_for_by_name(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"was trained without a teacher; use student"):
        load_weights(small(), str(checkpoint), "teacher")
    content = read_checkpoint(str(checkpoint)).content
    weights = content["state"]["model"]
    for key in [key for key in weights if key.startswith("encoder.")]:
        weights[f"teacher.module.{key[8:]}"] = weights[key] + 1
    path = tmp_path / "ep1-ba2"
    write_checkpoint(content, path)
    student, teacher = small(), small()
    load_weights(student, str(path))
    assert "(teacher)" in load_weights(teacher, str(path), "teacher")
    key = "blocks.0.attn.qkv.weight"
    assert torch.equal(teacher.encoder.state_dict()[key], student.encoder.state_dict()[key] + 1)
    file, _ = exported(tmp_path / "one.pth")
    with pytest.raises(UserError, match=r"holds one encoder"):
        load_weights(small(), str(file), "teacher")


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_exported_files(tmp_path: Path, ending: str) -> None:
    path, weights = exported(tmp_path / f"encoder.{ending}")
    model = small()
    load_weights(model, str(path))
    assert found_in(model).keys() == weights.keys()
    for key, value in found_in(model).items():
        assert torch.equal(value, weights[key])


def test_positions_may_be_fresh_and_are_named(tmp_path: Path) -> None:
    path, _ = exported(tmp_path / "mp3.pth", positions="none")
    for kind, fresh in (
        ("learned", "fresh: pos_embed"),
        ("relative", "fresh: blocks.0.attn.rel_pos.relative_position_bias_table, blocks.1"),
    ):
        model = small(positions=kind)
        before = {k: v.clone() for k, v in model.encoder.state_dict().items() if "pos" in k}
        assert fresh in load_weights(model, f"{path},positions=none")
        for key, value in before.items():
            assert torch.equal(model.encoder.state_dict()[key], value)
    assert "; fresh" not in load_weights(small(positions="none"), f"{path},positions=none")


def test_a_table_of_zeros_stands_for_none(tmp_path: Path) -> None:
    path, weights = exported(tmp_path / "mp3.pth", positions="none")
    torch.save({**weights, "pos_embed": torch.zeros(1, 17, 192)}, path)  # as timm gets it
    model = small(positions="learned")
    assert "; fresh: pos_embed" in load_weights(model, str(path))
    assert found_in(model)["pos_embed"].any()


def test_a_shared_bias_is_copied_to_every_block(tmp_path: Path) -> None:
    path, weights = exported(tmp_path / "simmim.pth", positions="shared_relative")
    model = small(positions="relative")
    line = load_weights(model, str(path))
    assert "; fresh" not in line and "; not used" not in line
    tables = model.encoder.get_submodule("positions.tables")
    assert len(list(tables.parameters())) == 2
    for table in tables.parameters():
        assert torch.equal(table, weights[f"shared_rel_pos.{TABLE}"])


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ({}, {"layer_scale": 0.1}, r"encoder.layer_scale = 0.1, but .* has none"),
        ({}, {"num_registers": 2},
         r"gated_registers = 0, but 2 of encoder.num_registers = 2 need a gate"),
        ({"layer_scale": 0.1}, {}, r"encoder.layer_scale = null, but .* has factors"),
        ({}, {"depth": 3}, r"encoder.depth = 3, but .* has 2 blocks"),
        ({"final_norm": False}, {}, r"encoder.final_norm = true, but .* has no final norm"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    tmp_path: Path, source: dict[str, Any], target: dict[str, Any], message: str
) -> None:
    path, _ = exported(tmp_path / "encoder.pth", **source)
    with pytest.raises(UserError, match=message) as caught:
        load_weights(small(**target), str(path))
    section = yaml.safe_load(str(caught.value).partition("would do):\n")[2])["encoder"]
    assert section.pop("weights") == str(path)
    model = PretrainModel(build_encoder(**section), seed=0)
    assert "; fresh" not in load_weights(model, path)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    for name in ("none.pth", "none.safetensors"):
        with pytest.raises(UserError, match=r"does not exist"):
            load_weights(small(), str(tmp_path / name))
        (tmp_path / name).write_bytes(b"no weights")
        with pytest.raises(UserError, match=r"is damaged, or "):
            load_weights(small(), str(tmp_path / name))
    torch.save({"weight": torch.zeros(1)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"holds no Vision Transformer"):
        load_weights(small(), str(tmp_path / "other.pth"))
    path, weights = exported(tmp_path / "nan.pth")
    torch.save({**weights, "cls_token": weights["cls_token"] * torch.nan}, path)
    with pytest.raises(UserError, match=r"'cls_token' holds values that are not finite"):
        load_weights(small(), str(path))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.qint8])
def test_quantised_tensors_are_no_weights(tmp_path: Path, kind: torch.dtype) -> None:
    path, weights = exported(tmp_path / "quantised.pth")
    key = "blocks.1.mlp.fc1.weight"
    is_scaled = kind == torch.qint8
    own = weights[key]
    weights[key] = torch.quantize_per_tensor(own, 0.1, 0, kind) if is_scaled else own.to(kind)
    torch.save(weights, path)
    said = rf"tensor '{key}' holds {str(kind)[6:]}, but weights must be"
    with pytest.raises(UserError, match="names .*_rebuild_qtensor" if is_scaled else said):
        load_weights(small(), str(path))
    counted = {"head.0.num_batches_tracked": torch.tensor(3)}
    torch.save({**weights, key: own.half(), **counted}, path)
    assert "not used: head.0.num_batches_tracked" in load_weights(small(), str(path))


def write_foreign(path: Path, kind: str, ran: Path) -> None:
    """Write a file that ``torch.load`` refuses and advises to load all the same."""
    if kind == "zip":
        torch.save({"model": {"patch_embed.proj.weight": Payload(ran)}}, path)
    elif kind == "pickle":
        path.write_bytes(pickle.dumps(Payload(ran)))
    elif kind == "module":
        torch.save(torch.nn.Linear(2, 2), path)
    elif kind == "script":
        with warnings.catch_warnings(action="ignore"):  # newer torch will do without these files
            torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)
    else:
        with tarfile.open(path, "w") as archive:
            for name in ("sys_info", "pickle", "storages", "tensors"):
                (path.parent / name).write_bytes(pickle.dumps({}))
                archive.add(path.parent / name, name)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", ["zip", "pickle", "module", "script", "tar"])
def test_what_could_be_code_is_refused_in_our_words(tmp_path: Path, kind: str) -> None:
    write_foreign(tmp_path / "foreign.pth", kind, tmp_path / "ran")
    with pytest.raises(UserError, match=r"foreign.pth .* nothing of it was loaded") as caught:
        load_weights(small(), str(tmp_path / "foreign.pth"))
    said = str(caught.value)
    assert "weights_only" not in said and "torch.load" not in said and "trust" not in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("kernel", "how"),
    [("bicubic", "bicubic × (old / new)²"), ("pinv", "FlexiViT"), ("timm", "resample_patch_embed")],
)
def test_a_kernel_of_another_size_is_resized(tmp_path: Path, kernel: Any, how: str) -> None:
    path, weights = exported(tmp_path / "encoder.pth", image_size=56, patch_size=14)
    model = small(image_size=64, patch_size=16, positions="learned")
    said = load_weights(model, str(path), kernel=kernel).split("\n")
    line = f"encoder.patch_size = 16×16, but {path} has 14×14: its kernel is resized, "
    assert len(said) == 2 and said[1].startswith(line) and how in said[1]
    assert "; resampled" not in said[0]
    found = found_in(model)["patch_embed.proj.weight"]
    assert torch.equal(found, resized_kernel(weights["patch_embed.proj.weight"], (16, 16), kernel))


@pytest.mark.parametrize("positions", ["learned", "none"])
def test_more_channels_and_registers_than_the_file(tmp_path: Path, positions: str) -> None:
    """The features stay what they are: a new channel like the others, gates on registers."""
    path, _ = exported(tmp_path / "encoder.pth", positions=positions)
    address = f"{path},positions=none" if positions == "none" else str(path)
    options: dict[str, Any] = {"image_size": 64, "depth": 2, "positions": positions}
    encoder = build_encoder("vit_tiny16", **options, channels=4, num_registers=2, gated_registers=2)
    model = PretrainModel(encoder, seed=0, mean=[0.5] * 4, std=[0.2] * 4)
    said = load_weights(model, address)
    assert "; fresh: reg_token, register_gate;" in said
    assert f"encoder.channels = 4, but {path} has 3: new channels have the mean" in said
    assert f"encoder.num_registers = 2, but {path} has 0: 2 are new, with a gate" in said
    original = small(positions=positions)
    load_weights(original, address)
    grey = torch.randn(2, 1, 64, 64)
    kept = torch.tensor([0, *range(3, 19)])
    with torch.no_grad():
        found = encoder(grey.expand(-1, 4, -1, -1))[:, kept]
        expected = original.encoder(grey.expand(-1, 3, -1, -1))
    cosine = F.cosine_similarity(found, expected, dim=-1)
    assert cosine.min() > 0.999
    with torch.no_grad():  # without the gate they count
        encoder.get_parameter("register_gate").zero_()
        moved = F.cosine_similarity(encoder(grey.expand(-1, 4, -1, -1))[:, kept], expected, dim=-1)
    assert moved.min() < cosine.min()


@pytest.mark.parametrize("given", [{}, {"mean": [0.5], "std": [0.25]}])
def test_a_grey_image_has_the_features_of_three_equal_channels(
    tmp_path: Path, given: dict[str, Any]
) -> None:
    path, _ = exported(tmp_path / "encoder.pth")
    encoder = build_encoder("vit_tiny16", image_size=64, depth=2, channels=1)
    model, original = PretrainModel(encoder, seed=0, **given), small()
    said = load_weights(model, str(path))
    line = f"encoder.channels = 1, but {path} has 3: its kernels are added up (of ImageNet's"
    assert line in said and "30 of 30 tensors" in said
    load_weights(original, str(path))
    grey = torch.randint(0, 256, (2, 1, 1, 64, 64), dtype=torch.uint8)
    flip = torch.zeros(2, 1, dtype=torch.bool)
    with torch.no_grad():
        found = encoder(model.augment(grey, flip)[:, 0])
        images = original.augment(grey.expand(-1, -1, 3, -1, -1), flip)[:, 0]
        torch.testing.assert_close(found, original.encoder(images), rtol=0, atol=1e-3)
    columns = PretrainModel(encoder, seed=0, mean=[0.0] * 64, std=[1.0] * 64)
    with pytest.raises(UserError, match=r"channels = 1, but .* has 3 and one mean, but the data"):
        load_weights(columns, str(path))


def test_further_registers_follow_those_of_the_file(tmp_path: Path) -> None:
    path, weights = exported(tmp_path / "encoder.pth", positions="learned", num_registers=2)
    weights["pos_embed"][:, 1:3] = 0
    torch.save(weights, path)
    model = small(positions="learned", num_registers=5, gated_registers=3)
    said = load_weights(model, path)
    assert f"encoder.num_registers = 5, but {path} has 2: 3 are new" in said
    assert "; fresh: reg_token, register_gate;" in said
    found = found_in(model)
    assert torch.equal(found["reg_token"][:, :2], weights["reg_token"])
    assert found["reg_token"][:, 2:].ne(weights["reg_token"][:, :1]).any()
    rows = found["pos_embed"]
    assert torch.equal(rows[:, :1], weights["pos_embed"][:, :1]) and not rows[:, 1:6].any()
    assert torch.equal(rows[:, 6:], weights["pos_embed"][:, 3:])


def test_a_training_starts_from_dinov2_with_registers(tmp_path: Path) -> None:
    """Its names and its table, without rows for registers, at another grid."""
    source = found_in(small(num_registers=2, layer_scale=0.1, positions="learned"))
    source = {key: value + 0.1 for key, value in source.items()}
    published = {key: value for key, value in source.items() if key != "reg_token"}
    rows = source["pos_embed"]
    published |= {
        "register_tokens": source["reg_token"],
        "mask_token": torch.ones(1, 192),
        "pos_embed": torch.cat([rows[:, :1], rows[:, 3:]], dim=1),
    }
    torch.save({"teacher": {f"backbone.{k}": v for k, v in published.items()}}, tmp_path / "t.pth")
    options = {"num_registers": 2, "layer_scale": 1.0, "positions": "learned"}
    for side in (64, 96):
        model = small(**options, image_size=side)
        line = load_weights(model, str(tmp_path / "t.pth"))
        found = found_in(model)
        assert f"{len(found)} of {len(found)} tensors from {tmp_path}/t.pth (teacher.back" in line
        assert "left out: teacher.backbone.mask_token" in line
        assert not found["pos_embed"][0, 1:3].any()
        grid = model.encoder.grid
        expected = resample_positions(rows[0, 3:], (4, 4), grid, "antialiased")
        assert torch.equal(found["pos_embed"][0, 3:], expected)
        assert all(torch.equal(found[k], v) for k, v in source.items() if k != "pos_embed")


def test_training_starts_from_the_weights_and_goes_on_without_them(
    tiny: Path, run: Run, tmp_path: Path
) -> None:
    length = ("trainer.max_duration=2ba", "trainer.save_interval=1ba", "schedule.warmup=1ba")
    short = (*length, "encoder.depth=2")
    half = ("data.mean=[0.5, 0.5, 0.5]", "data.std=[0.5, 0.5, 0.5]")
    assert run(tiny, *short, *half, "run_name=first")[0] == 0
    source = tmp_path / "runs" / "first"
    key = f"encoder.weights={source}"
    code, said = run(tiny, *short, key, "run_name=second")
    assert code == 0 and said.count("encoder: ") == 1 and f"from {source}" in said
    assert "images with mean 0.5, 0.5, 0.5, std 0.5, 0.5, 0.5 (the weights')" in said
    source.rename(tmp_path / "gone")
    code, said = run(tiny, *short, key, "run_name=third")
    assert code == 2 and "does not exist" in said and not (tmp_path / "runs" / "third").exists()
    second = tmp_path / "runs" / "second" / "checkpoints"
    shutil.rmtree(second / "ep0-ba2")  # killed after the first step
    code, said = run(tiny, *short, key, "run_name=second")
    assert code == 0 and "resuming from" in said and "encoder: " not in said
    for each in ("ep0-ba1", "ep0-ba2"):  # also of the resumed one
        augment = load_model(str(second / each))[0].augment
        assert augment.mean.flatten().tolist() == augment.std.flatten().tolist() == [0.5] * 3


def test_recipe_keys_reach_the_encoder_only_where_they_belong() -> None:
    recipe = recipe_from_dict(
        {
            "run_name": "weights",
            "data": {"path": "x", "batch_size": 8},
            "encoder": {"name": "vit_tiny16", "depth": 1, "weights": "nowhere.pth"},
            "algorithms": {"mae": {}},
            "trainer": {"max_duration": "1ep"},
        }
    )
    assert len(build_model(recipe).vit.blocks) == 1  # the file is read when training starts
