"""``encoder: {weights: FILE}``: the encoder is that of the weights; what contradicts is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file

from pospre.errors import UserError
from pospre.evaluation.models import open_model
from pospre.exporting.timm_encoder import take_parts
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.vit import as_vit
from pospre.recipe.recipe import Recipe, recipe_from_dict
from pospre.training.resolve import describe
from pospre.training.start_encoder import usual_views, with_encoder
from pospre.training.start_weights import load_weights
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.training.tiny_runs import Run, write_tiny


def written(path: Path, name: str = "vit_tiny16", **options: Any) -> Path:
    """Write an encoder's weights, changed, under timm's names."""
    encoder = build_encoder(name, **{"image_size": 64, "depth": 2, **options})
    weights = {encoder.timm_name_of(k): v + 0.1 for k, v in encoder.state_dict().items()}
    if encoder.positions.name == "sincos":
        weights["pos_embed"] = encoder.positions.exported(encoder.grid)["pos_embed"]
    torch.save(weights, path)
    return path


def recipe_of(weights: Path | str, **encoder: Any) -> Recipe:
    return recipe_from_dict(
        {
            "run_name": "tiny",
            "data": {"path": "unused", "batch_size": 4},
            "encoder": {"weights": str(weights), **encoder},
            "algorithms": {"mae": {}},
            "trainer": {"max_duration": "1ep", "run_folder": "/nonexistent"},
        }
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patch_size": 14, "image_size": 56, "layer_scale": 0.1, "positions": "learned"},
        {"num_registers": 4, "positions": "learned"},
        {"positions": "relative", "class_token": False},
        {"positions": "shared_relative"},
        {"channels": 5, "final_norm": False},
        {"depth": 3, "patch_size": (8, 16), "positions": "none"},
    ],
)
def test_weights_alone_say_what_the_encoder_is(tmp_path: Path, options: dict[str, Any]) -> None:
    path = written(tmp_path / "weights.pth", **options)
    ending = ",positions=none" if options.get("positions") == "none" else ""
    recipe = with_encoder(recipe_of(f"{path}{ending}", drop_path=0.1))
    made = build_encoder(**recipe.encoder.arguments())
    assert made.drop_path == 0.1 and with_encoder(recipe) is recipe
    model = PretrainModel(made, seed=0, mean=[0.5] * made.channels, std=[0.5] * made.channels)
    line = load_weights(model, f"{path}{ending}")
    count = len(made.state_dict())
    assert f"encoder: {count} of {count} tensors" in line
    assert not {"; fresh", "; not used", "; resampled"} & {*line.split(":")}
    for key, value in {"depth": 2, "channels": 3, "class_token": True, **options}.items():
        if key not in ("layer_scale", "image_size", "patch_size"):
            assert getattr(recipe.encoder, key) == value, key


def test_a_file_without_one_of_its_tensors_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"depth": 1, "layer_scale": 0.1, "positions": "learned"}
    path = written(tmp_path / "w.pth", **options)
    whole = torch.load(path)
    assert len(whole) > 15
    for key in whole:
        torch.save({name: each for name, each in whole.items() if name != key}, path)
        with pytest.raises(UserError, match=r"w\.pth"):
            recipe = with_encoder(recipe_of(path))
            encoder = build_encoder(**recipe.encoder.arguments())
            load_weights(PretrainModel(encoder, seed=0), path)


def test_a_run_and_an_export_say_it_too(tmp_path: Path) -> None:
    own = {"num_registers": 2, "drop_path": 0.2, "positions": "alibi", "image_size": 96}
    checkpoint = save_checkpoint(tiny_recipe(tmp_path, "mae", **own))
    encoder = with_encoder(recipe_of(checkpoint.parents[1])).encoder
    assert (encoder.num_registers, encoder.positions, encoder.image_size) == (2, "alibi", 96)
    assert encoder.drop_path == 0  # of the training, not of the weights


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_registers": 0}, "encoder.num_registers = 0, but .* has 4"),
        ({"num_registers": 3, "depth": 5}, "encoder.depth = 5, but .* has 2 blocks; .*= 3, but"),
        ({"name": "vits16", "positions": "learned"}, "name = vits16 .embed_dim 384, hidden_dim 1"),
        ({"name": "timm:vit_tiny_patch16_224"}, "encoder.depth = 12.*registers = 0.*layer_scale"),
        ({"channels": 2}, "encoder.channels = 2, but .* has 3"),
        ({"class_token": False}, "encoder.class_token = false, but .* has true"),
    ],
)
def test_a_key_that_contradicts_is_refused_with_the_section_that_fits(
    tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    path = written(tmp_path / "w.pth", num_registers=4, layer_scale=0.1, positions="learned")
    with pytest.raises(UserError, match=said) as caught:
        recipe = with_encoder(recipe_of(path, drop_path=0.1, **given))
        load_weights(PretrainModel(build_encoder(**recipe.encoder.arguments()), seed=0), path)
    section = yaml.safe_load(str(caught.value).partition("would do):\n")[2])["encoder"]
    assert section["weights"] == str(path) and section["drop_path"] == 0.1
    encoder = build_encoder(**with_encoder(recipe_of(**section)).encoder.arguments())
    assert "; fresh" not in load_weights(PretrainModel(encoder, seed=0), path)


def test_sizes_may_differ_and_a_line_says_so(tmp_path: Path) -> None:
    path = written(tmp_path / "w.pth", positions="learned")
    for given, said in (
        ({"image_size": 96}, "resampled: pos_embed 4×4 → 6×6"),
        ({"patch_size": 8}, "resampled: pos_embed 4×4 → 8×8"),
        ({"channels": 5}, "encoder.channels = 5, but "),
        ({"num_registers": 3}, "encoder.num_registers = 3, but "),
        ({"patch_size": 8}, "encoder.patch_size = 8×8, but "),
        ({"final_norm": False}, "not used: norm.weight, norm.bias"),
    ):
        recipe = with_encoder(recipe_of(path, **given))
        encoder = build_encoder(**recipe.encoder.arguments())
        pixels = [0.5] * encoder.channels
        line = load_weights(PretrainModel(encoder, seed=0, mean=pixels, std=pixels), path)
        assert said in line


def test_the_epsilon_of_published_encoders_is_theirs(tmp_path: Path) -> None:
    name = "timm:vit_small_patch16_dinov3"
    path = written(tmp_path / "w.pth", name, positions="rotary", class_token=True)
    address = f"{path},positions=rotary"
    found = with_encoder(recipe_of(address)).encoder
    assert as_vit(build_encoder(**found.arguments())).size.eps == 1e-5
    with pytest.raises(UserError, match=r"name = vits16 \(.*eps 1e-06.*\), but .* has .*eps 1e-05"):
        with_encoder(recipe_of(address, num_registers=0))  # the weights decide all else
        model = PretrainModel(build_encoder("vits16", depth=2, positions="rotary"), seed=0)
        load_weights(model, address)


@pytest.mark.parametrize(
    ("image_size", "patch", "positions", "views"),
    [
        (518, 14, "learned", 224),
        (448, 16, "sincos", 224),
        (384, 32, {"learned_rotary": {}}, 224),
        (240, 15, "learned", 210),
        (224, 16, "learned", 224),
        (96, 8, "learned", 96),
        (384, 16, "shared_relative", 384),
        (512, 16, "rotary", 512),
        ((16, 400), 16, "learned", (16, 400)),
    ],
)
def test_a_table_of_more_than_224_pixels_is_only_a_table(
    image_size: Any, patch: int, positions: Any, views: Any
) -> None:
    options = {"image_size": image_size, "patch_size": patch, "positions": positions}
    expected = views if isinstance(views, tuple) else (views, views)
    assert usual_views(options) == expected


@pytest.mark.parametrize(
    ("theirs", "given", "grid"),
    [
        ({"positions": "learned", "image_size": 256}, {}, (14, 14)),
        ({"positions": "learned"}, {"image_size": 96}, (6, 6)),
        ({"positions": "learned"}, {"positions": "learned", "patch_size": 8}, (8, 8)),
    ],
)
def test_a_table_keeps_the_grid_of_the_weights(
    tmp_path: Path, theirs: dict[str, Any], given: dict[str, Any], grid: tuple[int, int]
) -> None:
    """In training, checkpoints and exports: it is resampled in each pass, never twice."""
    path = written(tmp_path / "w.pth", depth=1, **theirs)
    rows = torch.load(path)["pos_embed"]
    side = theirs.get("image_size", 64) // 16
    recipe = with_encoder(recipe_of(path, **given))
    assert recipe.encoder.positions == {"learned": {"table_grid": [side, side]}}
    model = PretrainModel(build_encoder(**recipe.encoder.arguments()), seed=0)
    line = load_weights(model, path)
    assert f"resampled: pos_embed {side}×{side} → {grid[0]}×{grid[1]} in each pass" in line
    assert model.encoder.grid == grid
    assert torch.equal(model.encoder.state_dict()["positions.pos_embed"], rows)
    parts = take_parts(model, recipe, format="safetensors", num_classes=None, grid=None)
    assert torch.equal(parts.tensors["pos_embed"], rows) and parts.grid == (side, side)
    save_file(parts.tensors, tmp_path / "again.safetensors", parts.metadata())
    again = open_model(str(tmp_path / "again.safetensors")).model
    assert again.encoder.grid == grid
    images = torch.randn(1, 3, *again.encoder.image_size)
    with torch.no_grad():
        assert torch.equal(again.encoder(images), model.encoder.eval()(images))


def test_a_resumed_run_does_not_read_the_file(tmp_path: Path, run: Run) -> None:
    path = written(tmp_path / "w.pth", depth=1, num_registers=2, positions="learned")
    recipe = write_tiny(tmp_path)
    content = yaml.safe_load(recipe.read_text())
    content["encoder"] = {"weights": str(path)}
    recipe.write_text(yaml.safe_dump(content))
    assert "num_registers: 2" in (text := describe(recipe)) and "# encoder.weights" in text
    assert run(recipe, "trainer.max_duration=3ba")[0] == 0
    kept = yaml.safe_load((tmp_path / "runs" / "tiny" / "recipe.yaml").read_text())["encoder"]
    assert (kept["name"], kept["depth"], kept["num_registers"]) == ("vit_tiny16", 1, 2)
    path.unlink()
    code, said = run(recipe, "trainer.max_duration=4ba")
    assert "resuming from" in said
    code, said = run(recipe, "trainer.max_duration=6ba", "encoder.num_registers=3")
    assert code == 2 and "has encoder.num_registers = 2, this one 3" in said
    code, said = run(recipe, "trainer.overwrite=true")
    assert code == 2 and f"encoder.weights = {path} does not exist" in said


def test_neither_a_name_nor_weights_is_a_mistake() -> None:
    with pytest.raises(UserError, match=r"a section with name, such as vitb16, or with weights"):
        recipe_from_dict({**json.loads(json.dumps(recipe_of("x").dump())), "encoder": {"depth": 1}})
