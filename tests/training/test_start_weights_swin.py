"""Fine-tuning Swin from a DropPos run: every tensor, in windows and images of another size."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pospre.errors import UserError
from pospre.exporting.export import export
from pospre.training.build import build_model, load_model
from pospre.training.start_weights import load_weights
from tests.evaluation.checkpoints import save_checkpoint
from tests.swin_runs import DROPPOS, SUPERVISED, small_swin
from tests.training.tiny_runs import Run, metrics

YAMLS = Path(__file__).parents[2] / "yamls"


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    return save_checkpoint(small_swin(folder, "droppos", DROPPOS))


@pytest.fixture(scope="module")
def source(pretrained: Path) -> dict[str, Tensor]:
    """Return the weights of its encoder."""
    return load_model(str(pretrained))[0].encoder.state_dict()


@pytest.mark.parametrize(("size", "window"), [(64, 4), (64, 16), (128, 8)])
def test_a_run_gives_every_tensor_whatever_the_window(
    pretrained: Path, source: dict[str, Tensor], size: int, window: int
) -> None:
    recipe = small_swin("unused", "supervised", SUPERVISED, image_size=size, window=window)
    model = build_model(recipe).eval()
    line = load_weights(model, str(pretrained.parents[1]))  # the run folder
    own = model.encoder.state_dict()
    count = f"{len(own)} of {len(source)}"
    assert line.startswith(f"encoder: {count} tensors from {pretrained} (student); images with ")
    assert all(torch.equal(own[key], source[key]) for key in source)
    assert model.encoder(torch.randn(1, 3, size, size)).shape == (1, (size // 32) ** 2, 768)


def test_tables_of_one_window_are_refused(pretrained: Path, tmp_path: Path) -> None:
    out = tmp_path / "swin.safetensors"
    export(str(pretrained), out, format="safetensors")
    with pytest.raises(UserError, match=r"bias as tables of one window.*use its folder"):
        load_weights(build_model(small_swin("unused", "supervised", SUPERVISED)), str(out))


def test_the_shipped_recipes_follow_each_other(
    run: Run, image_folder: Callable[..., Path], tmp_path: Path
) -> None:
    short = (
        f"data.path={image_folder(num_images=4)}",
        "data.batch_size=2",
        "data.num_workers=1",
        "encoder.image_size=64",
        "trainer.max_duration=1ba",
        "schedule.warmup=0ba",
        "optimizer.name=sgd",  # a third of the checkpoint
        "trainer.device=cpu",
        "trainer.precision=fp32",
        "trainer.log_interval=1",
        "trainer.progress_bar=false",
        f"trainer.run_folder={tmp_path / 'runs'}",
    )
    code, said = run(YAMLS / "pretrain" / "droppos_swint.yaml", *short)
    assert code == 0, said
    code, said = run(
        YAMLS / "finetune" / "droppos_swint.yaml",
        *short,
        f"encoder.weights={tmp_path / 'runs' / 'droppos_swint'}",
        "algorithms.supervised.num_classes=null",
        f"evaluation.accuracy.data={tmp_path / 'images'}",
    )
    assert code == 0 and "; fresh" not in said and "; not used" not in said, said
    folder = tmp_path / "runs" / "finetune_droppos_swint"
    assert len([line for line in metrics(folder) if "loss/supervised" in line]) == 1
    assert "top1" in said
