"""Fine-tuning Swin from a DropPos run: every tensor, in windows and images of another size."""

from pathlib import Path

import pytest
import torch

from pospre.errors import UserError
from pospre.export import export
from pospre.training.build import build_model
from pospre.training.checkpoint import load_model
from pospre.training.weights import start_from
from tests.evaluation.checkpoints import save_checkpoint, tiny_recipe
from tests.swin_runs import DROPPOS, SUPERVISED, small_swin


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return save_checkpoint(small_swin(folder, "droppos", DROPPOS))


@pytest.mark.parametrize(("size", "window"), [(64, 4), (64, 16), (128, 8)])
def test_a_run_gives_every_tensor_whatever_the_window(
    pretrained: Path, size: int, window: int
) -> None:
    recipe = small_swin("unused", "supervised", SUPERVISED, image_size=size, window=window)
    model = build_model(recipe).eval()
    line = start_from(model, str(pretrained.parents[1]))  # the run folder
    source = load_model(str(pretrained))[0].encoder.state_dict()
    own = model.encoder.state_dict()
    assert line == f"encoder: {len(own)} of {len(source)} tensors from {pretrained} (student)"
    assert all(torch.equal(own[key], source[key]) for key in source)
    assert model.encoder(torch.randn(1, 3, size, size)).shape == (1, (size // 32) ** 2, 768)


def test_tables_of_one_window_are_refused(pretrained: Path, tmp_path: Path) -> None:
    out = tmp_path / "swin.safetensors"
    export(str(pretrained), out, format="safetensors")
    with pytest.raises(UserError, match=r"bias as tables of one window.*use its folder"):
        start_from(build_model(small_swin("unused", "supervised", SUPERVISED)), str(out))


def test_a_vits_weights_are_refused(tmp_path: Path) -> None:
    path = save_checkpoint(tiny_recipe(tmp_path, "mae"))
    with pytest.raises(UserError, match=r"'patch_embed.proj.weight' has shape"):
        start_from(build_model(small_swin("unused", "supervised", SUPERVISED)), str(path))
