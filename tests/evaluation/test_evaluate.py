"""The evaluate command: registry, settings, files, and every way to get it wrong."""

import json
import re
import shutil
from functools import partial

import pytest
import torch
from safetensors.torch import save_file

from pospre import evaluate
from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.models import open_model
from pospre.evaluation.recipe_evaluations import check_evaluations
from pospre.evaluation.registry import check_settings, describe
from pospre.evaluation.run import check_evaluation, run_evaluation
from pospre.run.checkpoints.reading import read_checkpoint
from pospre.training.build import build_model
from tests import refusals
from tests.evaluation.checkpoints import measured, save_checkpoint, tiny_recipe
from tests.refusals import refuses
from tests.run.checkpoints.checkpoint_files import write_checkpoint


@pytest.fixture
def fails(capsys):
    """Return ``fails(*arguments)``: the message of a command that ends with exit code 2."""
    return partial(refusals.fails, evaluate.main, capsys)


def test_settings_are_typed_and_completed():
    checked = check_settings("knn", {"k": "5", "temperature": "1e-1", "baseline": "false"})
    expected = {"k": 5, "temperature": 0.1, "baseline": False, "features": "mean", "bank": None}
    assert checked.values().items() >= expected.items()
    assert check_settings("knn", {"bank": "null", "num_samples": 8}).values()["num_samples"] == 8


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], ["examples:", "exit codes:", describe()]),
        (
            ["knn"],
            [
                "Wu et al.",
                "results:\n  ``top1`` and",
                "k: whole number > 0 = 20\n      Number of neighbours",
                "batch_size: whole number > 0 = 64",
                "seed: whole number = 0",
                "bank: text or null = null",
                "by the seed",
            ],
        ),
        (
            ["linear", "--model", "runs/mae"],
            ["LARS", "bank: text (required)", "vissl_clevr_distance (required)"],
        ),
        (["field"], ["It has no settings."]),
    ],
)
def test_help_teaches(words, wanted, capsys):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main([*words, "--help"])
    text = capsys.readouterr().out
    assert stopped.value.code == 0 and text.startswith("usage: python -m pospre.evaluate")
    assert all(each in text for each in wanted)


def test_run_folder_gets_the_results(tmp_path, image_folder, capsys):
    checkpoint = save_checkpoint(tiny_recipe(tmp_path, "droppos"))
    run = checkpoint.parent.parent
    (run / "metrics.jsonl").write_text('{"step": 1, "epoch": 0, "samples": 4, "loss/total": 2.7}\n')
    data = image_folder(num_images=6)
    for name, settings in (("position_pictures", []), ("knn", ["k=3"])):
        arguments = [name, "--model", str(run), "--data", str(data), *settings]
        assert evaluate.main(arguments) == 0
        output = capsys.readouterr()
        document = json.loads((run / "evaluation" / f"{name}.json").read_text())
        assert list(document) == [
            *("name", "model", "weights", "step", "encoder_sha256", "data", "created"),
            *("settings", "results"),
        ]
        assert (document["name"], document["data"]) == (name, str(data))
        assert f"written: {run / 'evaluation' / name}.json" in output.out
        assert f"report: {run / 'report.html'}" in output.out
        assert "6/6" in output.err
    assert len(list((run / "evaluation" / "position_pictures").glob("*.png"))) == 18
    assert not list(run.rglob("*partial*"))


def test_results_are_of_weights_and_an_earlier_step_has_its_own(tmp_path, image_folder, capsys):
    first = save_checkpoint(tiny_recipe(tmp_path, "mae"))
    content = read_checkpoint(str(first)).content
    content["state"]["timestamp"]["Timestamp"]["batch"] = 5
    content["state"]["model"]["encoder.norm.bias"] += 1
    newest = first.with_name("ep2-ba5")
    write_checkpoint(content, newest)
    best = first.parent / "best" / first.name  # as trainer.keep_best keeps it
    best.parent.mkdir()
    shutil.copytree(first, best)
    run, data = first.parents[1], str(image_folder(num_images=6))
    measure = ["knn", "--data", data, "k=2", "baseline=false", "--model"]
    assert evaluate.main([*measure, str(run)]) == 0
    assert evaluate.main([*measure, str(best.parent)]) == 0
    found = {path.name: json.loads(path.read_text()) for path in run.glob("evaluation/*.json")}
    assert {name: each["step"] for name, each in found.items()} == {
        "knn.json": 5,
        "knn_step2.json": 2,
    }
    hashes = {name: each["encoder_sha256"] for name, each in found.items()}
    assert len({*hashes.values()}) == 2
    # the same weights in another file, and under other names of the file
    encoder = open_model(str(first)).model.encoder
    save_file(encoder.state_dict(), tmp_path / "encoder.safetensors")
    assert evaluate.main([*measure, str(first), "--output", str(tmp_path / "again.json")]) == 0
    file = str(tmp_path / "encoder.safetensors")
    assert evaluate.main([*measure, file, "--output", str(tmp_path / "file.json")]) == 0
    for name in ("again.json", "file.json"):
        again = json.loads((tmp_path / name).read_text())
        assert again["encoder_sha256"] == hashes["knn_step2.json"]


def test_settings_may_stand_anywhere(droppos_checkpoint, image_folder, tmp_path, capsys):
    loose = tmp_path / "loose"
    shutil.copytree(droppos_checkpoint, loose)
    data = image_folder(num_images=4)
    arguments = ["knn", "k=2", "--model", str(loose), "features=cls", "--data", str(data)]
    assert evaluate.main([*arguments, "baseline=no"]) == 0
    assert "nothing written" in capsys.readouterr().out
    output = tmp_path / "new" / "knn.json"
    assert evaluate.main([*arguments, "--output", str(output)]) == 0
    assert json.loads(output.read_text())["settings"]["features"] == "cls"


def test_mistakes_write_nothing(droppos_checkpoint, mae_checkpoint, image_folder, fails, tmp_path):
    data = image_folder(num_images=4)
    output = tmp_path / "out" / "results.json"
    rest = ["--model", droppos_checkpoint, "--data", data, "--output", output]
    assert "Did you mean 'position_grid'" in fails("position_gird", *rest)
    assert "no setting 'num_sample'" in fails("knn", *rest, "num_sample=3")
    assert "'fast' is not a setting" in fails("knn", *rest, "fast")
    assert "given twice" in fails("knn", *rest, "k=1", "k=2")
    assert "setting 'k' is empty" in fails("knn", *rest, "k=")
    assert "path of a data set is empty" in fails("knn", *rest[:2], "--data", "", "k=2")
    assert "device 'tpu'" in fails("knn", *rest, "--device", "tpu")
    assert "does not exist" in fails("knn", *rest[:2], "--data", tmp_path / "nowhere", *rest[4:])
    assert "must end in .json" in fails("knn", *rest[:4], "--output", tmp_path / "out.txt")
    alone = fails("spectrum", *rest, "--start", mae_checkpoint)
    assert f"--start = {mae_checkpoint}, but spectrum measures one model alone" in alone
    message = fails("position_grid", "--model", mae_checkpoint, *rest[2:])
    assert "position_grid measures what algorithms.droppos or algorithms.mp3 trains" in message
    assert "this recipe has mae" in message
    assert not output.parent.exists()


@pytest.mark.parametrize(
    ("name", "folder", "settings", "said"),
    [
        ("knn", {"classes": ()}, {}, "knn: it needs labels"),
        ("knn", {}, {"k": 20}, "k=20, but only 11 images can vote"),
        ("knn", {}, {"k": 3, "num_samples": 3}, "k=3, but only 2 images can vote"),
        ("knn", {}, {"k": 3, "bank": "BANK", "num_bank": 2}, "k=3, but only 2 images can vote"),
        ("knn", {}, {"k": 3, "bank": "OTHER"}, "first difference: 'cow'"),
        ("knn", {}, {"k": 3, "bank": "FLAT"}, "knn: it needs labels"),
        ("knn", {}, {"k": 3, "num_bank": 5}, "num_bank=5, but there is no bank"),
        ("knn", {}, {"k": 3, "features": "cls"}, "the encoder has no class token"),
        ("knn", {}, {"k": 3, "layers": "0,3"}, "knn: layer 3, but the encoder has 2 blocks"),
        ("knn", {}, {"k": 3, "bank": "BROKEN"}, "cannot be decoded"),
        ("logistic", {}, {"bank": "BROKEN"}, "cannot be decoded"),
        ("logistic", {}, {}, "logistic needs the setting bank"),
        ("logistic", {}, {"bank": "OTHER"}, "first difference: 'cow'"),
        ("logistic", {}, {"bank": "BANK", "num_bank": 9}, "9 images of 2 classes"),
        ("logistic", {"classes": ("a",)}, {"bank": "SAME"}, "12 images of 1 classes"),
        ("position_grid", {}, {}, "algorithms.mp3 trains, but this recipe has mae"),
        ("accuracy", {}, {}, "algorithms.supervised trains, but this recipe has mae"),
        ("patch_position", {}, {}, "algorithms.mp3 trains, but this recipe has mae"),
    ],
)
def test_what_would_fail_is_said_before_the_first_forward_pass(
    tmp_path, image_folder, monkeypatch, name, folder, settings, said
):
    """No model runs: by the command as by a recipe that has yet to train."""
    recipe = tiny_recipe(tmp_path, "mae", class_token=False)
    data = image_folder(num_images=12, **folder)
    banks = {
        "OTHER": image_folder(num_images=12, classes=("cat", "cow"), name="other"),
        "FLAT": image_folder(num_images=12, classes=(), name="flat"),
        "BANK": data,
        "SAME": data,
        "BROKEN": image_folder(num_images=12, name="broken"),
    }
    for path in banks["BROKEN"].rglob("*.jpg"):
        path.write_bytes(b"\xff\xd8\xff but no picture")
    given = {key: str(banks.get(value, value)) for key, value in settings.items()}
    refuses(re.escape(said), lambda: check_evaluation(name, recipe, data, given, None))
    model = build_model(recipe)
    monkeypatch.setattr(type(model.encoder), "forward", None)
    with pytest.raises(UserError, match=re.escape(said)):
        run_evaluation(name, model, recipe, data, given, progress=False)


def test_a_class_head_is_for_the_classes_of_its_training_data(tmp_path, image_folder):
    trained, other = image_folder(), image_folder(classes=("cat", "cow"), name="other")
    recipe = tiny_recipe(tmp_path, {"supervised": {}})
    data = recipe.data.model_copy(update={"path": str(trained)})
    recipe = recipe.model_copy(update={"data": data, "evaluation": {"accuracy": {}}})
    check_evaluations(recipe)
    recipe.evaluation["accuracy"]["data"] = str(other)
    refuses(r"evaluation.accuracy: .* the class 'cow'", lambda: check_evaluations(recipe))


def test_images_of_the_training_are_said_once(tmp_path, image_folder, capsys):
    data, other = image_folder(name="seen"), image_folder(9, name="other")
    moved = shutil.copytree(data, tmp_path / "moved")
    recipe, identity = tiny_recipe(tmp_path, "mae"), open_reader(data).identity()
    checkpoint = save_checkpoint(recipe, identity=identity, classes=["cat", "dog"])
    for place, lines in ((data, 1), (data, 0), (moved, 1), (other, 0)):
        measured("knn", checkpoint, place, k=2, baseline=False)
        said = capsys.readouterr().err
        assert said.count(f"{place} holds images of the training") == lines, said
    whole = image_folder(name="planned")
    shutil.move(image_folder(4, name="part"), whole / "cat" / "part")
    section = {"data": recipe.data.model_copy(update={"path": str(whole)})}
    for asked in (whole, whole / "cat" / "part", other):
        wanted = {"spectrum": {"data": str(asked)}}
        check_evaluations(recipe.model_copy(update=section | {"evaluation": wanted}))
        line = f"{asked} holds images of the training"
        assert (line in capsys.readouterr().err) == (asked != other)


def test_fewer_images_than_wanted_are_said(mae_checkpoint, image_folder, capsys):
    arguments = ["--model", str(mae_checkpoint.parent), "--data", str(image_folder())]
    loose = ["--output", str(image_folder().parent / "knn.json")]
    assert evaluate.main(["knn", *arguments, *loose, "k=2", "num_samples=9999"]) == 0
    assert "9999 images wanted, " in (said := capsys.readouterr().err)
    assert "images holds 8" in said


def test_settings_written_as_options_are_told_how(mae_checkpoint, capsys):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(["knn", "--model", str(mae_checkpoint), "--data", "x", "--k", "5"])
    assert stopped.value.code == 2 and "without dashes: k=5" in capsys.readouterr().err


def test_diverged_checkpoint_is_named(droppos_checkpoint, fails, image_folder, tmp_path):
    content = read_checkpoint(str(droppos_checkpoint)).content
    content["state"]["model"]["encoder.norm.weight"][0] = torch.inf
    bad = tmp_path / "diverged"
    write_checkpoint(content, bad)
    message = fails("knn", "--model", bad, "--data", image_folder(), "k=2")
    assert "'encoder.norm.weight' holds values that are not finite" in message


def test_output_in_no_writable_folder_is_refused_before_the_work(
    droppos_checkpoint, image_folder, fails, tmp_path
):
    (tmp_path / "file").write_text("")
    output = tmp_path / "file" / "knn.json"
    arguments = ["--model", droppos_checkpoint, "--data", image_folder(), "--output", output]
    assert "not a writable folder" in fails("knn", *arguments, "k=2")
    arguments[-1] = "/proc/knn.json"  # whose rights would let root write
    assert "not a writable folder" in fails("knn", *arguments, "k=2")
    pictures = tmp_path / "pictures"
    pictures.write_text("")
    arguments[-1] = f"{pictures}.json"
    assert f"{pictures}, which is a file" in fails("position_pictures", *arguments)


@pytest.mark.parametrize("text", ['{"version": 1}', '{"name": "logistic"}', "[]"])
def test_json_that_is_no_result_of_this_evaluation_stays(
    droppos_checkpoint, image_folder, fails, tmp_path, text
):
    output = tmp_path / "package.json"
    output.write_text(text)
    arguments = ["--model", droppos_checkpoint, "--data", image_folder(), "--output", output]
    assert "exists, but is not a result of knn" in fails("knn", *arguments, "k=2")
    assert output.read_text() == text


@pytest.fixture
def rounded_products():
    """Let products round float32 to TF32, as Composer's trainer does on a GPU, for good."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = True
    yield lambda: (matmul.allow_tf32, cudnn.allow_tf32)
    matmul.allow_tf32, cudnn.allow_tf32 = before


def test_figures_are_of_whole_float32_whatever_a_trainer_has_set(
    tmp_path, image_folder, rounded_products
):
    recipe = tiny_recipe(tmp_path, "mae")
    model, seen = build_model(recipe), []
    model.augment.register_forward_pre_hook(lambda *_: seen.append(rounded_products()))
    run_evaluation("spectrum", model, recipe, image_folder(num_images=12), progress=False)
    assert {*seen} == {(False, False)} and rounded_products() == (True, True)
