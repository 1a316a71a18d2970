"""A run from weights whose positions are not the encoder's: biases fitted to theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pospre.errors import UserError
from pospre.evaluation.models import open_beside, open_model
from pospre.evaluation.run import run_evaluation
from pospre.exporting.export import export
from pospre.nn.build import build_encoder
from pospre.recipe.recipe import load_recipe, recipe_from_dict
from pospre.training.build import Components, build_components
from pospre.training.start import start_from
from pospre.training.start_encoder import with_encoder
from tests.refusals import refuses
from tests.training.tiny_runs import Run


def written(path: Path, **options: Any) -> str:
    """Write weights with strong positions."""
    torch.manual_seed(0)
    encoder = build_encoder("vit_tiny16", image_size=64, depth=2, **options)
    weights = {encoder.timm_name_of(k): v.clone() for k, v in encoder.state_dict().items()}
    if "pos_embed" in weights:
        weights["pos_embed"] = 0.5 * torch.randn_like(weights["pos_embed"])
    torch.save(weights, path)
    return str(path)


def parts_of(tiny: Path, *data: str, **encoder: Any) -> Components:
    recipe = load_recipe(tiny, data)
    content = {**recipe.dump(), "encoder": encoder}
    return build_components(with_encoder(recipe_from_dict(content)))


@pytest.mark.parametrize(
    ("positions", "resolved", "fresh"),
    [
        ("alibi", {"alibi": {"slopes": "learned"}}, ["positions.slope"]),
        ("torus", {"torus": {"slopes": "learned"}}, ["positions.slope"]),
        ("relative", "relative",
         [f"blocks.{n}.attn.rel_pos.relative_position_bias_table" for n in range(2)]),
    ],
)  # fmt: skip
def test_biases_are_fitted_to_the_positions_of_the_weights(
    tiny: Path, tmp_path: Path, positions: str, resolved: Any, fresh: list[str]
) -> None:
    path = written(tmp_path / "w.pth", positions="learned")
    parts = parts_of(tiny, weights=path, positions=positions)
    encoder = parts.model.vit
    assert parts.recipe.encoder.positions == resolved and parts.recipe.encoder.keep == "fit"
    said, names = start_from(parts)
    assert names == fresh
    assert f"encoder.positions = {positions}, but {path} has learned: biases are fitted" in said
    assert "16 images" in said and "30 of 30 tensors" in said
    weights = torch.load(path)
    token, layer = map(encoder.get_parameter, ("cls_token", "blocks.1.mlp.fc2.weight"))
    assert torch.equal(token, weights["cls_token"] + weights["pos_embed"][:, :1])
    assert torch.equal(layer, weights["blocks.1.mlp.fc2.weight"])
    biases = torch.cat([each.flatten() for each in encoder.positions.parameters()])
    assert biases.ne(0).any() and (positions == "relative" or bool((biases >= 0).all()))
    own = {id(each) for each in encoder.positions.parameters()}
    groups = [g for g in parts.optimizer.param_groups if own & {id(p) for p in g["params"]}]
    assert groups and all(group["weight_decay"] == 0 for group in groups)
    again = parts_of(tiny, weights=path, positions=positions)
    start_from(again)  # drawn from the seed
    for one, other in zip(encoder.parameters(), again.model.vit.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("given", "trained"),
    [
        ({"positions": "torus"}, {"positions.slope"}),
        ({"positions": "torus", "keep": "fade"}, set()),  # nothing of it is learned
        ({"positions": "learned_sincos", "keep": "fade"}, {"positions.new.pos_embed"}),
        ({"num_registers": 2}, {"reg_token", "register_gate"}),
        ({}, set()),
    ],
)
def test_what_weights_do_not_give_trains_with_the_heads(
    tiny: Path, tmp_path: Path, given: dict[str, Any], trained: set[str]
) -> None:
    """Also where the method has none."""
    path = written(tmp_path / "w.pth", positions="learned")
    heads = "stages=[{until: .5, train: heads}, {train: all}]"
    asked = ("reference={weights: start}", "algorithms={distill: {}}", heads)

    def stages() -> Any:
        return parts_of(tiny, *asked, weights=path, **given).stages

    if trained:
        assert stages().trained[0] == {f"encoder.{name}" for name in trained}
    else:
        refuses("stages.0.train = heads trains nothing: distill has no head", stages)


def test_a_fitted_run_resumes_without_the_weights_and_is_exported(
    tiny: Path, tmp_path: Path, run: Run
) -> None:
    path = written(tmp_path / "w.pth", positions="learned", num_registers=1)
    content = yaml.safe_load(tiny.read_text())
    content["encoder"] = {"weights": path, "positions": "torus", "num_registers": 3}
    tiny.write_text(yaml.safe_dump(content))
    code, said = run(tiny, "trainer.max_duration=3ba")
    assert code == 0, said
    assert "encoder.positions = torus, but" in said
    assert f"encoder.num_registers = 3, but {path} has 1: 2 are new" in said
    Path(path).unlink()
    code, said = run(tiny, "trainer.max_duration=4ba")
    assert code == 0 and "resuming from" in said and "encoder.positions = torus" not in said
    export(str(tmp_path / "runs" / "tiny"), tmp_path / "own.safetensors", format="safetensors")
    models = (tmp_path / "runs" / "tiny", tmp_path / "own.safetensors")
    first, second = (open_model(str(each)).model.vit.eval() for each in models)
    assert first.gated == 2 and first.positions.name == "torus"
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(first(images), second(images))
        moved = first(images.roll((16, 48), (2, 3)))
    torch.testing.assert_close(moved[:, :4], first(images)[:, :4], rtol=0, atol=1e-4)


@pytest.mark.parametrize("positions", ["torus", "relative"])
def test_an_export_has_the_figures_of_its_run(
    tiny: Path, tmp_path: Path, run: Run, positions: str
) -> None:
    path, own = written(tmp_path / "w.pth", positions="learned"), tmp_path / "own.safetensors"
    content = yaml.safe_load(tiny.read_text())
    content["encoder"] = {"weights": path, "positions": positions}
    tiny.write_text(yaml.safe_dump(content))
    code, said = run(tiny, "trainer.max_duration=3ba")
    assert code == 0, said
    export(str(tmp_path / "runs" / "tiny"), own, format="safetensors")
    settings = {"by": "covariance", "iterations": 3, "evaluations": {"knn": {}}}
    one, other = (
        run_evaluation(
            "position_removal",
            data_path=tmp_path / "images",
            settings=settings,
            start=open_beside(path, subject.recipe),
            progress=False,
            **subject._asdict(),
        )
        for subject in map(open_model, (str(tmp_path / "runs" / "tiny"), str(own)))
    )
    assert one["results"] == other["results"]
    assert one["encoder_sha256"] == other["encoder_sha256"]
    before, *_, adapted = one["results"]["encoders"]
    assert before["roll_error"] > 0.01 and 0.1 < adapted["cosine"] < 0.999
    assert (adapted["roll_error"] < 1e-4) == (positions == "torus")


@pytest.mark.parametrize(
    ("theirs", "given", "words"),
    [
        ("learned", {"positions": "rotary", "keep": "fit"},
         r"keep = fit with positions = rotary: .* use alibi, torus or relative, or leave .*drop"),
        ("learned", {"positions": "rotary"}, r"has no place\. .*,positions=drop"),
        ("learned", {"positions": {"torus": {"slopes": "fixed"}}},
         r"needs learned slopes: use encoder.positions = \{torus: \{slopes: learned\}\}"),
        ("none", {"positions": "relative", "keep": "fit"}, "weights have none: there is nothing"),
        ("learned", {"keep": "fit"}, "positions = learned: nothing of learned can be fitted"),
        ("learned", {"keep": "fade"}, "weights have learned: there is nothing to fade"),
        ("learned", {"positions": "lookhere", "keep": "fade"}, "no token in some directions"),
        ("learned", {"positions": "rotary"}, "or let them fade out: encoder.keep=fade, or leave"),
        ("learned", {"positions": "relative", "num_registers": 2}, "works without registers only"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_refused(
    tiny: Path, tmp_path: Path, theirs: str, given: dict[str, Any], words: str
) -> None:
    path = written(tmp_path / "w.pth", positions=theirs)
    ending = ",positions=none" if theirs == "none" else ""
    with pytest.raises(UserError, match=words):
        start_from(parts_of(tiny, weights=f"{path}{ending}", **given))


def test_a_fit_needs_weights_and_images(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is nothing to keep without"):
        parts_of(tiny, name="vit_tiny16", keep="fit")
    path = written(tmp_path / "w.pth", positions="learned")
    few = ("data.batch_size=4", "data.label_fraction=0.25")
    with pytest.raises(UserError, match=r"keep = fit needs 8 images or more, but .* has 6 of them"):
        start_from(parts_of(tiny, *few, weights=path, positions="torus"))
