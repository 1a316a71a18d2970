"""Recipes that cannot work: exit code 2, one message that says what would, and no file changed.

The tests of each algorithm have its own options.
"""

from pathlib import Path

import pytest

from tests.refusals import found_in
from tests.training.test_loggers import tracker  # noqa: F401 (fixture)
from tests.training.tiny_runs import Run, write_tiny

SWIN = "encoder={name: swin_tiny, image_size: 256, positions: relative, class_token: false, "

ROWS = [
    # overrides after semicolons, and what the message says
    # multi-crop on data that have one view, and views that do not fit
    ("data.views={global: {count: 2, size: 64}}; algorithms={mae: {}}",
     "algorithms.mae needs the view group 'view'"),
    ("data.views={view: {size: 40}}", "data.views.view.size … 16"),
    ("data.views={view: {size: 48}}", "data.views.view.size … [64, 64]"),
    ("data.views={view: {count: 2}}", "data.views.view.count is 2"),
    ("data.views={view: {}, query: {inside: global}}",
     "data.views.query.inside = global … the other view groups are: view"),
    # two hosts, and algorithms beside hosts that they are not for
    ("algorithms={mae: {}, simmim: {}}", "both hide … Use one of them"),
    ("algorithms={mp3: {position_rate: 0.5}}; encoder.positions=none",
     "mp3.position_rate = 0.5 … Set encoder.positions: sincos"),
    ("encoder.positions=none",
     "droppos changes the places … has none to change … Use sincos, learned"),
    ("algorithms={crop_field: {}}", "crop_field … Add a host"),
    ("algorithms={ema_teacher: {}}", "none of those listed … Add a host"),
    ("algorithms={mae: {}, crop_field: {}}; encoder.positions=relative",
     "crop_field places views anywhere … encoder.positions = relative … Use sincos"),
    ("encoder.positions=[rotary]", "['rotary'] (list); expected a scheme's name, or {name:"),
    ("algorithms.droppos.affinity=teacher", "algorithms.droppos uses … ema_teacher"),
    ("encoder.name=swin_tiny", "swin_tiny needs encoder.depth: null, not 1"),
    (SWIN + "init: trunc_normal}; algorithms={simmim: {}}",
     "needs a token for every patch … Only droppos, mae, supervised support"),
    ("trainer.compile=true; data.views={view: {augment: {erase_rate: 0.25}}}",
     "trainer.compile on the CPU crashes … data.views.view.augment.erase_rate"),
    ("encoder.window=8", "encoder.window = 8 is for swin_tiny"),
    # numbers that are none
    ("optimizer.weight_decay=.inf", "'optimizer.weight_decay' is inf … a finite number"),
    ("data.cache_limit=.inf", "'data.cache_limit' is inf … 200GB"),
    # nothing to learn
    ("algorithms={mp3: {}}; encoder.positions=none; encoder.image_size=16",
     "encoder.image_size = [16, 16] … Use a larger image"),
    # options and views of no use
    ("data.views={view: {}, local: {}}", "data.views.local … is not read by any … Remove it"),
    # one key
    ("data.path=/nowhere", "/nowhere … does not exist"),
    ("data.batch_size=100", "24 … 100"),
    ("trainer.precision=amp_fp16", "trainer.precision … GPU"),
    ("evaluation={position_gird: {}}", "evaluation.position_gird … position_grid"),
    ("trainer.save_folder=/dev/null/x", "trainer.save_folder … /dev/null/x"),
    ("schedule.warmup=9ep", "schedule.warmup … 27 steps"),
    ("evaluation={knn: {k: 1000}}", "evaluation.knn … only 23 images can vote"),
    ("evaluation={knn: {dta: val}}", "no setting 'dta' … 'data'"),
    ("evaluation={knn: {data: 5}}", "evaluation.knn … data = 5"),
    ("evaluation={position_grid: {weights: teacher}}", "algorithms droppos has one … ema_teacher"),
    # loggers
    ("loggers={wandb: {projct: p}}", "unknown key 'loggers.wandb.projct' … 'project'"),
    ("loggers={wandb: {}}", "'loggers.wandb.project' is missing"),
    ("loggers={wandb: {project: 3}}", "'loggers.wandb.project' is 3 … text"),
    ("loggers.tensorboard.logdir=x", "unknown key 'loggers.tensorboard.logdir' … log_dir"),
    ("evaluation={knn: {every: 0ep}}", "evaluation.knn.every … 10ep (epochs)"),
    # the machine
    ("trainer.fsdp={shard_degree: 2}", "trainer.fsdp.shard_degree = 2 does not divide"),
    ("trainer.precision=amp_fp16; trainer.residual=bf16", "trainer.precision"),
    ("trainer.precision=fp32; trainer.residual=bf16",
     "trainer.residual = bf16 needs trainer.precision = amp_bf16"),
    ("trainer.precision=fp32; trainer.float8=true",
     "trainer.float8 = true needs trainer.precision = amp_bf16"),
    ("data.path=corrupt", "corrupt/0.jpg cannot be decoded … data_prep.convert"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny recipe, and of images that are none."""
    root = tmp_path_factory.mktemp("messages")
    write_tiny(root)
    (root / "corrupt").mkdir()
    for number in range(8):
        (root / f"corrupt/{number}.jpg").write_bytes(b"\xff\xd8\xff but no picture")
    return root


@pytest.mark.usefixtures("tracker")
@pytest.mark.parametrize(("overrides", "words"), ROWS)
def test_a_mistake_exits_2_and_writes_nothing(
    overrides: str, words: str, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = found_in(folder)
    code, said = run(folder / "tiny.yaml", *overrides.split("; "))
    assert code == 2 and said.startswith("error: ") and "Traceback" not in said, said
    assert all(word in said for word in words.split(" … ")), said
    assert found_in(folder) == before
