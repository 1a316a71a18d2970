"""A run's reference: described in its recipe, stored once, and the same after every resume."""

from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import timm
import torch
import yaml
from safetensors.torch import load_file

from pospre.planning.estimate import count
from pospre.recipe.recipe import load_recipe
from pospre.run.checkpoints.reading import open_checkpoint
from pospre.run.resume import recorded
from pospre.training.build import load_run
from pospre.training.reference import open_reference, with_encoders
from tests.algorithms.cases import random_views
from tests.disk import snapshot
from tests.refusals import refuses
from tests.training.test_start_encoder import written
from tests.training.tiny_runs import Run, curve

BEGUN = ("trainer.max_duration=2ba",)


@pytest.fixture
def adapting(tiny: Path, tmp_path: Path) -> Path:
    """Return a recipe that starts from a file, with it as the reference."""
    weights = written(tmp_path / "published.pth", positions="learned", patch_size=16)
    recipe = yaml.safe_load(tiny.read_text())
    recipe["encoder"] = {"weights": str(weights), "image_size": 64}
    recipe["reference"] = {"weights": "start"}
    recipe["schedule"] = {"warmup": "1ba"}
    recipe["algorithms"] = {"droppos": recipe["algorithms"]["droppos"], "gram": {}, "distill": {}}
    recipe["trainer"] |= {"max_duration": "6ba", "save_interval": "2ba"}
    tiny.write_text(yaml.safe_dump(recipe))
    return tiny


def finals(folder: Path) -> dict[str, Any]:
    newest = open_checkpoint(str(folder / "checkpoints"))
    tensors: dict[str, Any] = newest.content["state"]["model"]
    return tensors


def test_a_run_begins_with_no_distance_and_a_resumed_one_is_the_same(
    adapting: Path, tmp_path: Path, run: Run
) -> None:
    assert run(adapting)[0] == 0
    folder = tmp_path / "runs" / "tiny"
    whole, tensors = curve(folder), finals(folder)
    copy = load_file(folder / "reference.safetensors")
    start = torch.load(tmp_path / "published.pth")
    assert copy["blocks.0.norm1.weight"].equal(start["blocks.0.norm1.weight"])
    assert not any(key.startswith("reference") for key in tensors)
    record = recorded(open_checkpoint(str(folder / "checkpoints" / "ep1-ba4")).content)
    assert record.reference is not None and len(record.reference) == 64
    rmtree(folder / "checkpoints" / "ep1-ba6")
    (tmp_path / "published.pth").unlink()
    code, said = run(adapting)
    assert code == 0 and "published.pth is gone; the run continues with its own copy" in said
    assert curve(folder)[-2:] == whole[-2:]
    again = finals(folder)
    assert all(again[key].equal(value) for key, value in tensors.items())


def test_another_file_after_a_kill_is_refused_by_its_hash(
    adapting: Path, tmp_path: Path, run: Run
) -> None:
    assert run(adapting, *BEGUN, "reference.store=false")[0] == 0
    path = tmp_path / "published.pth"
    tensors = torch.load(path)
    tensors["norm.weight"] += 1
    torch.save(tensors, path)
    before = snapshot(tmp_path / "runs")
    code, said = run(adapting, "reference.store=false")
    assert code == 2 and "was trained with another reference: the hash" in said
    assert snapshot(tmp_path / "runs") == before


def test_a_file_that_has_changed_beside_the_copy_is_refused(
    adapting: Path, tmp_path: Path, run: Run
) -> None:
    assert run(adapting, *BEGUN)[0] == 0
    path = tmp_path / "published.pth"
    tensors = torch.load(path)
    torch.save({**tensors, "norm.weight": tensors["norm.weight"] + 1}, path)
    for said_of_it in ("", ",positions=learned"):
        more = f"encoder.weights={path}{said_of_it}"
        code, said = run(adapting, more)
        assert code == 2 and "published.pth has changed since the run began" in said
    torch.save(tensors, path)
    (tmp_path / "runs" / "tiny" / "reference.safetensors").write_bytes(b"x" * 30)
    code, said = run(adapting)
    assert code == 2 and "reference.safetensors is damaged" in said and "Delete it" in said


def test_sources_are_files_runs_and_timm_with_a_file(
    adapting: Path, tmp_path: Path, run: Run
) -> None:
    assert run(adapting, *BEGUN)[0] == 0
    published = tmp_path / "published.pth"
    for weights in (str(published), str(tmp_path / "runs" / "tiny")):
        recipe = load_recipe(adapting, [f"reference.weights={weights}", "run_name=other"])
        recipe = with_encoders(recipe)
        assert recipe.reference is not None and recipe.reference.encoder is not None
        assert recipe.reference.encoder.depth == 2
        opened = open_reference(recipe, resumes=False)
        assert opened is not None and opened.encoder.depth == 2
        assert count(recipe).parts["reference"] == sum(
            each.numel() for each in opened.encoder.parameters()
        )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["encoder={name: vit_tiny16, image_size: 64}"], "start is the encoder .* Set encoder.we"),
        (["reference.weights=timm:vit_tiny_patch16_224"], "random weights. Give timm:.*,FILE"),
        (["reference.weights=nothing.pth"], "reference.weights = nothing.pth does not exist"),
        (["reference.weights=nothing"], "= nothing does not exist. Give .*; if it is a timm model"),
        (["reference={}"], "'reference.weights'"),
    ],
)
def test_what_is_no_reference_is_refused(
    adapting: Path, tmp_path: Path, overrides: list[str], words: str
) -> None:
    refuses(words, lambda: with_encoders(load_recipe(adapting, overrides)), tmp_path)


def test_a_checkpoint_alone_has_no_reference_to_run(
    adapting: Path, tmp_path: Path, run: Run
) -> None:
    assert run(adapting, *BEGUN)[0] == 0
    model = load_run(tmp_path / "runs" / "tiny")
    batch = random_views(side=64)
    refuses("no tensors of its reference", lambda: model(batch, progress=0.5))


def test_a_named_model_with_a_file_is_a_reference_for_smaller_views(
    adapting: Path, tmp_path: Path, run: Run
) -> None:
    file = tmp_path / "other.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224", img_size=96).state_dict(), file)
    code, said = run(
        adapting,
        *BEGUN,
        "algorithms={gram: {}, dinov2: {num_prototypes: 32, head_hidden: 32}}",
        f"reference.weights=timm:vit_tiny_patch16_224,{file}",
        "encoder.image_size=96",
        "data.views={global: {count: 2, size: 64}}",
    )
    assert code == 0, said
    folder = tmp_path / "runs" / "tiny"
    copy, own = load_file(folder / "reference.safetensors"), torch.load(file)
    assert copy["blocks.11.norm1.weight"].equal(own["blocks.11.norm1.weight"])
    assert copy["positions.pos_embed"].shape[1] == 1 + 36  # the table of 96 pixels
    assert finals(folder)["encoder.positions.pos_embed"].shape[1] == 1 + 16
