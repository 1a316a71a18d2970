"""A run from published weights: the frozen start beside its figures, its drift, and the verdict."""

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file

from pospre import evaluate, export
from pospre.data.opening import open_reader
from pospre.data.stores.subset import half_indices, half_of
from pospre.evaluation import early_stop
from pospre.evaluation.run import measure
from pospre.recipe.recipe import load_recipe
from tests.evaluation.dense.pictures import voc_folder
from tests.refusals import refuses
from tests.training.test_start_weights import exported
from tests.training.tiny_runs import MAE, Run, metrics

ADAPT = Path(__file__).parents[2] / "yamls" / "adapt"
HALVES: tuple[Literal["choose", "judge"], ...] = ("choose", "judge")
NARROW = {
    "dinov2": ("num_prototypes=32", "head_hidden=32", "head_bottleneck=16"),
    "mae": ("decoder_dim=32", "decoder_depth=1", "decoder_heads=2"),
}
"""Heads of the recipes' methods that cost little: their own are wider than the tiny encoder."""
LABELLED = "evaluation={knn: {every: 1ep, k: 3}, drift: {num_samples: 16}}"


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """Return a file of weights, which ``tiny`` can start from."""
    return exported(tmp_path / "published.safetensors", positions="learned")[0]


def document(folder: Path, name: str) -> Any:
    return json.loads((folder / "evaluation" / f"{name}.json").read_text())


def lines(folder: Path, name: str) -> list[Any]:
    history = (folder / "evaluation" / "history.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, history) if line["name"] == name]


def test_a_run_is_judged_against_its_start(
    tiny: Path, run: Run, tmp_path: Path, start: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, images = tmp_path / "runs" / "tiny", tmp_path / "images"
    asked = (f"encoder={{weights: {start}}}", LABELLED, "verdict.figure=knn/top1")
    teacher = (MAE, "algorithms.ema_teacher={}", "verdict.weights=teacher")
    stages = "stages=[{until: 3ba, train: heads}, {train: all}]"
    code, said = run(tiny, *asked, *teacher, stages, "trainer.max_duration=2ep")
    assert code == 0, said
    judged = document(folder, "knn")
    count = judged["results"]["query_samples"]
    assert said.index(f"knn/top1 will be judged on {count} images") < said.index("samples of")

    assert "warning: ema_teacher: the teacher hardly follows in the 3 steps that train" in said

    # looks are on one half, the verdict on the other
    assert [look["settings"]["half"] for look in lines(folder, "knn")] == ["choose"] * 2
    assert judged["settings"]["half"] == "judge" and judged["weights"] == "teacher"
    looked = lines(folder, "knn")[0]["results"]
    assert looked["query_samples"] + count == 24 and looked["initial_top1"] is None
    assert looked["start_top1"] is not None

    # the start's figure is that of its file, measured by the command on the same images
    output = tmp_path / "frozen.json"
    command = ["knn", "--model", str(start), "--data", str(images), "--output", str(output)]
    assert evaluate.main([*command, "k=3", "half=judge", "--image-size", "64"]) == 0
    frozen = json.loads(output.read_text())
    assert frozen["results"]["top1"] == judged["results"]["start_top1"]
    assert frozen["encoder_sha256"] == judged["start_sha256"] and judged["start"] == str(start)

    # before the first step the encoder is the start, and after a stage of heads, too
    first, of_heads, last = lines(folder, "drift")
    assert [first["step"], of_heads["step"], last["step"]] == [0, 3, 6]
    for key in ("patch_cosine", "class_cosine", "patch_kept"):
        assert first["results"][key] == of_heads["results"][key] == 1
    assert first["results"]["student_moved"] == of_heads["results"]["teacher_moved"] == 0
    assert [look["step"] for look in lines(folder, "duplicates")] == [0]
    assert 0 < last["results"]["teacher_moved"] < last["results"]["student_moved"]
    rows = first["results"]["rows"]
    both = [(layer, tokens) for layer in (1, 2) for tokens in ("class", "patch")]
    assert [(row["layer"], row["tokens"]) for row in rows] == both
    for row in rows:
        assert {row[key] for key in ("cosine", "centred", "kept")} == {1.0}
        assert row["cka"] == pytest.approx(1) and row["procrustes"] > 0.999999
        assert row["rank"] == row["start_rank"] and row.get("gram", 0) == 0
        for key in ("r2", "norm", "blur"):
            assert row.get(key) == row.get(f"start_{key}")
    assert last["results"]["patch_gram"] > 0
    assert metrics(folder)[0]["evaluation/drift/patch_cosine"] == 1

    sentence = "difference shown. The teacher's knn/top1"
    assert sentence in said and f"Keep the frozen start: {start}." in said
    page = html.unescape((folder / "report.html").read_text())
    assert sentence in page and "Drift from the start" in page
    for weights, is_there in (("teacher", True), ("student", False)):
        out = tmp_path / f"{weights}.pth"
        words = [str(folder), str(out), "--format", "timm", "--weights", weights]
        assert export.main(words) == 0
        card = out.with_name(f"{weights}.pth.md").read_text()
        assert (sentence in card) == is_there and "## Verdict" in card

    # figures of other images do not take the place of those that it follows from
    assert evaluate.main(["knn", "--model", str(folder), "--data", str(images), "k=3"]) == 0
    assert document(folder, "knn") == judged
    assert document(folder, "knn_apart")["results"]["query_samples"] == 24
    # as if the run had been killed after its last look, while it was judged
    (folder / "evaluation" / "knn.json").write_text(json.dumps(lines(folder, "knn")[-1]))
    code, said = run(tiny, *asked, *teacher, stages, "trainer.max_duration=2ep")
    assert code == 0 and "already finished" in said and sentence in said
    assert document(folder, "knn")["results"] == judged["results"]
    others = shutil.copytree(images, tmp_path / "others")  # or judged on other images
    more = "trainer.max_duration=2ep", f"verdict.data={others}"
    assert run(tiny, *asked, *teacher, stages, *more)[0] == 0
    assert document(folder, "knn")["data"] == str(others)


def test_a_run_that_trains_only_heads_exports_the_bytes_of_its_start(
    tiny: Path, run: Run, tmp_path: Path, start: Path
) -> None:
    asked = f"encoder={{weights: {start}}}", MAE, "stages=[{until: 2ba, train: heads}, {}]"
    code, said = run(tiny, *asked, "trainer.max_duration=3ba", "trainer.save_interval=1ba")
    assert code == 0, said
    (saved,) = (tmp_path / "runs" / "tiny" / "checkpoints").glob("ep*-ba2")
    out = tmp_path / "heads.safetensors"
    assert export.main([str(saved), str(out), "--format", "safetensors"]) == 0
    published, found = load_file(start), load_file(out)
    assert found.keys() == published.keys()
    assert all(found[name].equal(tensor) for name, tensor in published.items())


def test_without_a_declared_figure_only_drift_is_told(
    tiny: Path, run: Run, tmp_path: Path, start: Path
) -> None:
    asked = f"encoder={{weights: {start}}}", MAE, "evaluation={drift: {num_samples: 16}}"
    code, said = run(tiny, *asked, "verdict={}", "trainer.max_duration=3ba")
    assert code == 0, said
    assert "Nothing here can say whether it helped; features kept: patch" in said
    # a resumed run does not need the start, and says what is missing
    without = "drift: without the frozen start beside it: encoder.weights = "
    exported(start, positions="learned", shift=0.2)
    code, said = run(tiny, *asked, "verdict={}", "trainer.max_duration=4ba")
    assert code == 2 and f"{without}{start} has changed since the run began: the hash" in said
    start.unlink()
    code, said = run(tiny, *asked, "verdict={}", "trainer.max_duration=5ba")
    assert code == 2 and without in said and "does not exist" in said


def test_a_run_ends_when_looks_are_worse_and_goes_on_if_asked(
    tiny: Path, run: Run, tmp_path: Path, start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "runs" / "tiny"
    monkeypatch.setattr(early_stop, "is_worse", lambda verdict, look: look["step"] != 4)
    looks = "evaluation={knn: {k: 3}, drift: {num_samples: 16}}"
    asked = (f"encoder={{weights: {start}}}", MAE, "verdict.figure=knn/top1", looks)
    code, said = run(tiny, *asked, "verdict.stop=worse")
    reason = "knn/top1 was worse than the frozen start's after steps 5, 6, 7, so the run ends here"
    assert code == 0 and f"step 7: {reason}" in said, said
    assert [look["step"] for look in lines(folder, "knn")] == [4, 5, 6, 7]  # of 12 steps
    assert document(folder, "knn")["settings"]["half"] == "judge" and "difference shown" in said
    before = (folder / "metrics.jsonl").read_text()
    code, said = run(tiny, *asked, "verdict.stop=worse")  # it stays over
    assert code == 0 and (folder / "metrics.jsonl").read_text() == before
    code, said = run(tiny, *asked)
    assert code == 0 and max(line["step"] for line in metrics(folder)) == 12


@pytest.mark.parametrize("name", [path.stem for path in sorted(ADAPT.glob("*.yaml"))])
def test_a_recipe_and_weights_are_the_whole_command(
    name: str, run: Run, tmp_path: Path, image_folder: Callable[..., Path]
) -> None:
    start, _ = exported(tmp_path / "deep.safetensors", positions="learned", depth=5)
    recipe = load_recipe(f"adapt/{name}")
    steps = 11 if len(recipe.stages) > 2 else 4  # the last stage of three is 5 %
    small = [
        *(f"data.path={image_folder(16)}", "data.batch_size=4", "encoder.image_size=64"),
        *(f"trainer.max_duration={steps}ba", "schedule.warmup=0ba"),
        "evaluation.drift.num_samples=16",
        *("trainer.progress_bar=false", f"trainer.run_folder={tmp_path}/runs"),
        *(["data.views.local.size=32"] if "local" in recipe.data.views else []),
        *(
            f"algorithms.{method}.{given}"
            for method in recipe.algorithms
            for given in NARROW.get(method, ())
        ),
    ]
    code, said = run(Path(f"adapt/{name}"), f"encoder.weights={start}", *small)
    assert code == 0, said
    first = lines(tmp_path / "runs" / f"adapt_{name}", "drift")[0]["results"]
    if name != "reposition":
        assert first["patch_cosine"] == 1 and first["patch_gram"] == 0
    assert "Nothing here can say whether it helped; features kept" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("verdict={}",), "verdict compares with the weights that training starts from"),
        (
            ("verdict={}", "PATCHES"),
            r"the frozen start cannot be measured beside the run: the start sees the same images: "
            r"encoder.image_size = 72 is not divisible by the patch size 16.*evaluation=",
        ),
        (("verdict.guard=[knn/top1]", "START"), "verdict.guard needs a verdict.figure"),
        (("verdict.stop=worse", "START"), "verdict.stop needs a verdict.figure"),
        (("verdict.figure=knn/top2", "START"), "verdict: knn/top2 cannot be compared"),
        (
            ("verdict.figure=knn/top1", "evaluation.knn.k=1", "verdict.data=FEW", "START"),
            r"only \d images would judge knn/top1",
        ),
        (
            ("verdict.figure=detection/AP", "verdict.guard=[detection/mask_AP]", "BOXES", "START"),
            r"verdict.guard = detection/mask_AP: objects of .*boxes \(train\) and .* have no masks",
        ),
    ],
)
def test_verdicts_that_cannot_be_given(
    tiny: Path,
    run: Run,
    tmp_path: Path,
    start: Path,
    image_folder: Callable[..., Path],
    overrides: tuple[str, ...],
    said: str,
) -> None:
    few, boxes = image_folder(8, name="few"), voc_folder(tmp_path / "boxes", {"train": 2, "val": 8})
    known = {
        "START": f"encoder={{weights: {start}}}",
        "PATCHES": f"encoder={{weights: {start}, patch_size: 8, image_size: 72}}",
        "verdict.data=FEW": f"verdict.data={few}",
        "BOXES": f"verdict.data={boxes}",
    }
    given = [known.get(each, each) for each in overrides]
    code, told = run(tiny, MAE, *given)
    assert code == 2 and not (tmp_path / "runs").exists()
    assert re.search(said, told)


def test_halves_are_disjoint_and_always_the_same(
    image_folder: Callable[..., Path], start: Path
) -> None:
    reader = open_reader(image_folder(40))
    choose, rest = (half_indices(40, half, "") for half in HALVES)
    assert sorted([*choose, *rest]) == [*range(40)] and min(len(choose), len(rest)) > 10
    assert choose[:6].tolist() == [0, 3, 5, 8, 11, 12]  # never to change
    first, again = (
        measure("knn", str(start), reader.path, {"k": 3, "half": "judge"}) for _ in HALVES
    )
    assert first == again and first["query_samples"] == len(rest)
    names = [half_of(reader, "judge").about(index)[1] for index in range(len(rest))]
    assert names == [reader.about(index)[1] for index in rest.tolist()]
    refuses("too few for half=judge", lambda: half_indices(1, "judge", "one"))
