"""Speech through the whole frame: clips → batches → MP3 → fine-tuning → measured."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from data_prep import convert
from pospre.data.loader import build_loader
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.evaluation.run import run_evaluation
from pospre.recipe.recipe import Recipe, load_recipe
from pospre.train import main
from pospre.training.build import build_components, build_model, load_model
from tests.data_prep.sample_clips import write_clips
from tests.training.tiny_runs import curve

YAMLS = Path(__file__).parents[2] / "yamls" / "speech"
SHORT = ("data.batch_size=4", "trainer.max_duration=2ba", "schedule.warmup=1ba", "encoder.depth=2")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return ``get(frames)``: a data set of eight clips of two words."""
    root = tmp_path_factory.mktemp("speech")
    source = write_clips(root / "wavs", 4)

    def get(frames: int) -> Path:
        target = root / f"mds{frames}"
        arguments = [source, target, "--format", "mds", "--frames", frames, "--workers", 1]
        assert convert.main([str(argument) for argument in arguments]) == 0
        return target

    return get


def recipe(name: str, data: Path, *overrides: str) -> Recipe:
    return load_recipe(YAMLS / f"{name}.yaml", [f"data.path={data}", *SHORT, *overrides])


def test_parameters_of_the_paper() -> None:
    for name, count in (("paper_mp3", 69_760 + 33 * 100), ("paper_supervised", 70_156)):
        full = load_recipe(YAMLS / f"{name}.yaml")
        if "supervised" in full.algorithms:  # the paper's 12 classes
            arguments = {"supervised": {**full.algorithms["supervised"], "num_classes": 12}}
            full = full.model_copy(update={"algorithms": arguments})
        trained = [p for p in build_model(full).parameters() if p.requires_grad]
        assert sum(parameter.numel() for parameter in trained) == count


def test_batches_are_whole_and_normalised(words: Callable[[int], Path]) -> None:
    run = build_components(recipe("demo_mp3", words(100), "data.batch_size=8"))
    (batch,) = run.loader
    assert batch["view/image"].shape == (8, 1, 1, 100, 40)
    assert batch["view/image"].dtype == torch.float32
    assert not batch["view/flip"].any()
    assert (batch["view/box"] == torch.tensor([0.0, 0.0, 1.0, 1.0])).all()
    frames = run.model.images(batch).double().flatten(0, 3)
    torch.testing.assert_close(frames.mean(0), torch.zeros(40).double(), atol=1e-3, rtol=0)
    torch.testing.assert_close(
        frames.std(0, correction=0), torch.ones(40).double(), atol=1e-3, rtol=0
    )
    assert run.recipe.data.mean is not None and len(run.recipe.data.mean) == 40


def test_other_data_is_normalised_as_in_training(words: Callable[[int], Path]) -> None:
    given = recipe("demo_mp3", words(100), "data.mean=[1.0]", "data.std=[2.0]")
    run = build_components(given)
    batch = next(iter(run.loader))
    for model in (run.model, build_model(run.recipe)):  # in training, and when it is measured
        torch.testing.assert_close(model.images(batch), (batch["view/image"] - 1) / 2)


def test_pretrain_fine_tune_and_measure(words: Callable[[int], Path], tmp_path: Path) -> None:
    folder = [f"trainer.run_folder={tmp_path}", "trainer.progress_bar=false", "trainer.device=cpu"]
    common = [f"data.path={words(100)}", *SHORT, *folder]
    assert main([str(YAMLS / "demo_mp3.yaml"), "run_name=mp3", *common]) == 0
    start = f"encoder.weights={tmp_path}/mp3"
    assert main([str(YAMLS / "demo_supervised.yaml"), "run_name=words", start, *common]) == 0
    for name, evaluation, settings in (
        ("mp3", "patch_position", {"mask_ratios": "0"}),
        ("words", "accuracy", {}),
    ):
        model, made_from = load_model(str(tmp_path / name))
        document = run_evaluation(
            evaluation, model, made_from, words(100), settings, device="cpu", progress=False
        )
        assert document["results"]["samples"] == 8


def test_dropout_is_resumed_in_mid_epoch(words: Callable[[int], Path], tmp_path: Path) -> None:
    """Four steps an epoch, a checkpoint after the third: losses are the same to the last bit."""
    options = [
        *(f"data.path={words(100)}", "data.batch_size=2", "encoder.depth=2", "schedule.warmup=1ba"),
        *("trainer.max_duration=9ba", "trainer.save_interval=3ba", "trainer.log_interval=1"),
        *(f"trainer.run_folder={tmp_path}", "trainer.progress_bar=false", "trainer.device=cpu"),
        "trainer.keep_checkpoints=-1",
    ]

    def train(run_name: str, *more: str) -> list[float]:
        assert main([str(YAMLS / "demo_mp3.yaml"), f"run_name={run_name}", *options, *more]) == 0
        return [loss for _, loss, _ in curve(tmp_path / run_name)]

    whole = train("whole")
    assert train("killed") == whole
    for checkpoint in ("ep1-ba6", "ep2-ba9"):
        shutil.rmtree(tmp_path / "killed" / "checkpoints" / checkpoint)
    assert train("killed") == whole
    assert train("bare", "encoder.dropout=0.0") != whole
    halves = train("halves", "trainer.microbatch_size=1")
    assert halves == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("encoder.image_size=[98,40]", r"has features of 100 x 40, but .* are 98 x 40"),
        ("encoder.channels=3", r"encoder\.channels = 3, but .* holds features, which have 1"),
        ("data.mean=[1.0,2.0]", r"data\.mean has 2 numbers; give one, or 40"),
        ("data.std=[0.0]", r"data\.std.* above 0"),
        ("data.views={view: {flip_rate: 1.0}}", r"flip_rate = 1\.0 has no effect with features"),
    ],
)
def test_what_does_not_fit_is_refused(
    override: str, message: str, words: Callable[[int], Path]
) -> None:
    with pytest.raises(UserError, match=message):
        build_components(recipe("demo_mp3", words(100), override))


def test_98_frames(words: Callable[[int], Path]) -> None:
    loader = build_loader(words(98), views=[ViewGroup(size=(98, 40))], batch_size=8, seed=0)
    assert next(iter(loader))["view/image"].shape == (8, 1, 1, 98, 40)
    run = build_components(recipe("demo_mp3", words(98), "encoder.image_size=[98,40]"))
    assert run.model.encoder.num_patches == 98
