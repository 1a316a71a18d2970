"""What stands above every recipe: where its numbers are from, and commands that work."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from pospre import draws
from pospre.algorithms.ijepa.blocks import draw_official
from pospre.algorithms.ijepa.ijepa import IJEPA
from pospre.evaluation.registry import check_settings
from pospre.nn.build import build_encoder
from pospre.nn.vit import Encoder
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.training.resolve import resolve

ROOT = Path(__file__).parents[1]
YAMLS = ROOT / "yamls"
RECIPES = sorted(YAMLS.glob("**/*.yaml"))
COMMAND = re.compile(r"(?:python|composer -n \d+) -m pospre\.(\w+) (.*)")


def header(path: Path) -> str:
    return path.read_text().split("\n\n")[0]


def commands(path: Path) -> list[tuple[str, list[str]]]:
    """Return the header's commands: the module and the arguments; ``…`` is "and so on"."""
    lines = header(path).replace("\n#", "\n").replace("\\\n", " ")
    return [
        (module, [word for word in shlex.split(arguments) if word != "…"])
        for module, arguments in COMMAND.findall(lines)
    ]


def trained(arguments: list[str]) -> Recipe:
    """Return the recipe that ``pospre.train`` reads from a command's arguments, fully checked."""
    name, *overrides = arguments
    return resolve(load_recipe(ROOT / name, overrides))


def shortened(name: str) -> Recipe:
    """Return the recipe of the command in a header that trains a shortened run."""
    (recipe,) = [
        trained(arguments)
        for _, arguments in commands(YAMLS / f"{name}.yaml")
        if any(word.startswith("run_name=short_") for word in arguments)
    ]
    return recipe


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_header_teaches(path: Path) -> None:
    for word in ("Command", "Needs", "Sources", "Result"):
        assert f"# {word}" in header(path)
    assert f"pospre.train {path.relative_to(ROOT)}" in header(path)
    assert all(len(line) <= 100 for line in path.read_text().splitlines())


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_header_commands_parse(path: Path) -> None:
    found = commands(path)
    assert len(found) == header(path).count("-m pospre.") >= 1
    for module, arguments in found:
        if module == "train":
            trained(arguments)
        else:
            assert module == "evaluate" and arguments[1::2] == ["--model", "--data"]
            check_settings(arguments[0], {})


@pytest.mark.parametrize(
    "path",
    [path for path in RECIPES if path.parent.name in ("pretrain", "finetune")],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_what_the_published_code_does_otherwise_is_said(path: Path) -> None:
    recipe, text = load_recipe(path), re.sub(r"\s*#?\s+", " ", header(path))
    classifier = recipe.algorithms.get("supervised") or {}
    if classifier.get("mixup") or classifier.get("cutmix"):
        assert re.search(r"Mixup draws per sample; \S+ code draws per batch", text)
        assert "bf16" in text or recipe.trainer.precision == "fp32"
    for view in recipe.data.views.values():
        if view.augment.blur_rate and view.augment.blur_kernel == 13:
            assert "kernel of 13 pixels" in text
    if "droppos" in recipe.algorithms and recipe.data.batch_size == 4096:
        is_own = path.stem.startswith("droppos_vit")
        assert ("batch of 2048" in text) == is_own


FIXED = re.compile(
    r"fixed counts, (\d+) tokens of context and (\d+) of each target\. .* shortest of a "
    r"device's (\d+) images, (\d+) and (\d+) tokens on average"
)


@pytest.mark.parametrize(
    "path",
    sorted((YAMLS / "pretrain").glob("ijepa_vit*"))
    + sorted((YAMLS / "pretrain").glob("stop_vit*")),
    ids=lambda path: path.stem,
)
def test_counts_of_masks_are_said_beside_the_published_ones(path: Path) -> None:
    recipe = resolve(load_recipe(path))
    found = FIXED.search(re.sub(r"\s*#?\s+", " ", header(path)))
    assert found is not None
    context, target, images, mean_context, mean_target = map(int, found.groups())
    with torch.device("meta"):
        encoder = build_encoder(**{**recipe.encoder.arguments(), "depth": 1})
    assert isinstance(encoder, Encoder)
    blocks = IJEPA(**recipe.algorithms["ijepa"]).blocks(encoder)
    assert (blocks.context_tokens, blocks.target_tokens) == (context, target)
    counts = []
    for batch in range(30):  # as the published code draws them, device by device
        keys = draws.sample_keys(0, batch, torch.arange(images), 0, "header")
        masks = draw_official(keys, blocks)
        counts.append((masks.context.shape[1], masks.targets.shape[2]))
    mean = torch.tensor(counts).float().mean(0)
    assert mean.tolist() == pytest.approx([mean_context, mean_target], rel=0.05)


def test_shortened_comparison_on_cifar_is_even() -> None:
    pretraining = shortened("pretrain/mp3_cifar100_vits4")
    tuning = shortened("finetune/mp3_cifar100_vits4").dump()
    scratch = shortened("pretrain/supervised_cifar100_vits4").dump()
    assert pretraining.encoder.patch_size == tuning["encoder"]["patch_size"]
    assert tuning["encoder"].pop("weights") == str(pretraining.run_path())
    assert scratch["encoder"].pop("weights") is None
    assert tuning.pop("run_name") != scratch.pop("run_name")
    assert tuning == scratch
