"""The page: what stands in it, what is left out with a hint, and what is refused."""

import json
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from pospre.evaluation.registry import check_settings, default_settings, evaluation_names
from pospre.model.algorithm import algorithm_class, algorithm_names
from pospre.model_arguments import parse_settings
from pospre.report import main
from pospre.reporting.measured import PUBLISHED, evaluate_command, reproduce_commands
from pospre.reporting.page import write_page, write_report
from pospre.reporting.run import read_run
from tests.refusals import fails
from tests.reporting.fabricated_run import (
    fabricate_run,
    knn,
    logistic,
    position_grid,
    position_pictures,
    write_evaluation,
    write_pretext_tasks,
)

PAGE_LIMIT = 3_000_000


def written(folder: Path) -> str:
    return write_report(folder).read_text(encoding="utf-8")


def log(folder: Path, *lines: str) -> None:
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_whole_run(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path)
    before = {path.name for path in folder.iterdir()}
    write_report(folder)
    path = write_report(folder)
    assert path == folder / "report.html"
    assert {path.name for path in folder.iterdir()} == before | {"report.html"}
    html = path.read_text(encoding="utf-8")
    assert "missing" not in html.split("</style>")[1]
    for text in ("droppos_demo", "Final loss", "kNN top-1", "71.3 %", "Loss · mae", "Learning"):
        assert text in html
    assert "<b>step 7</b> a &lt;spike&gt; of the loss" in html
    for text in ("Gradient norm · encoder", "Share of time · data", "Memory, GiB"):
        assert text in html
    assert html.count("Share of time") == 2  # a title, also for those who do not see
    for cell in position_grid()["cells"]:
        assert f"<b>{100 * cell['accuracy']:.1f}</b>" in html
    assert html.count("data:image/jpeg;base64,") == 16
    assert len(html) < PAGE_LIMIT
    assert "71.3 %<small> ± 2.3</small>" in html
    assert "<dt>error</dt><dd>0.512 ± 0.0123</dd>" in html and "error_se" not in html
    assert "Published" not in html  # another model, of other data


def test_published_figures_stand_only_beside_what_compares(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["encoder"] = {"name": "vitb16", "image_size": [224, 224], "depth": None}
    recipe["algorithms"].pop("mae")
    grid = {**position_grid(), "samples": 50_000, "weighted_mean": 0.882}

    def shown(grid: dict[str, Any], samples: int, **encoder: Any) -> bool:
        kept = {**recipe, "encoder": {**recipe["encoder"], **encoder}}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(kept))
        log(folder, json.dumps({"step": 9, "samples": samples}))
        write_evaluation(folder, "position_grid", grid)
        words = "Published for droppos: 87.83 % (weighted mean; ViT-B/16, 200 epochs of ImageNet-1k"
        return words in written(folder)

    images = 200 * 1_281_167
    assert shown(grid, images - 4096)
    assert "88.2 %" in written(folder)  # the weighted mean, beside the plain one
    assert not shown(grid, images // 2) and not shown(grid | {"samples": 1000}, images)
    assert not shown(grid, images, name="vits16") and not shown(grid, images, depth=6)
    assert shown(grid, images, positions="sincos")
    assert not shown(grid, images, positions={"rotary": {"base": 100}})
    recipe["algorithms"]["mae"] = {}
    assert not shown(grid, images)


@pytest.mark.parametrize(
    ("mean", "top1", "words"),
    [
        (0.326, 0.713, "53 times as often as untrained; {}; its kNN is 31.1 ± 2.9 points above"),
        (0.0062, 0.36,
         "no more often than untrained; {}; its kNN is within two errors of untrained (-4.2 ± "),
        (0.0155, 0.2, "2.5 times as often as untrained; {}; its kNN is 20.2 ± 2.9 points below"),
    ],
)  # fmt: skip
def test_the_page_opens_with_what_came_of_it(
    tmp_path: Path, mean: float, top1: float, words: str
) -> None:
    folder = fabricate_run(tmp_path, num_steps=40)
    grid = {**position_grid(), "mean": mean, "mean_difference": mean - 0.0062}
    write_evaluation(folder, "position_grid", grid, data="val")
    write_evaluation(folder, "logistic", logistic(), data="val", step=40)
    change = {"top1": top1, "top1_difference": top1 - 0.402}
    write_evaluation(folder, "knn", {**knn(), **change}, data="val", step=30)
    html = written(folder)
    verdict = re.findall('<p class="verdict">(.*?)</p>', html)[0]
    probe = "its logistic probe is 31.1 ± 2.9 points above untrained"
    assert words.format(probe) in verdict and verdict.endswith(" (weights of step 30).")
    assert html.index(verdict) < html.index('<dl class="headline">')
    points = f"{100 * (mean - 0.0062):+.1f} ± 0.4 points"
    assert f'<dd class="note">mean of 16 cells; 0.6 % untrained; {points}</dd>' in html
    assert '<dd class="note">40.2 % untrained; +31.1 ± 2.9 points</dd>' in html
    assert html.count("71.3 %<small> ± 2.3</small>") == 1 + (top1 == 0.713)


def test_a_fine_tuned_run_begins_with_its_accuracy_and_where_it_started(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5, evaluated=False)
    start = "runs/mae_vitb16/checkpoints/ep800-ba250000"
    recipe = {"algorithms": {"supervised": {}}, "encoder": {"name": "vitb16", "weights": start}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    write_evaluation(folder, "accuracy", {"top1": 0.836, "top5": None, "standard_error": 0.002})
    html = written(folder)
    assert "It names the class of 83.6 % of the pictures, started from mae_vitb16." in html
    headline = html.split('<dl class="headline">')[1].split("</dl>")[0]
    assert "<dt>Accuracy</dt><dd>83.6 %</dd>" in headline and "started from mae_vitb16" in headline


def test_blank_accuracy_is_explained(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5, evaluated=False)
    assert "pictures of a single colour" not in written(folder)
    log(folder, json.dumps({"step": 1, "metric/droppos_blank_accuracy": 0.02}))
    assert "For pictures of a single colour" in written(folder)


def test_figures_of_an_earlier_step_and_on_training_pictures_are_called_so(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=40)
    write_evaluation(folder, "knn", knn(), step=40)
    assert "step 40" not in written(folder)
    write_evaluation(folder, "knn", knn(), step=25)  # before the training went on
    html = written(folder)
    assert '<dd class="note">40.2 % untrained; +31.1 ± 2.9 points; of step 25</dd>' in html
    assert "Measured on data/scenes, the pictures it was trained on; of step 25, not of" in html
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("data/scenes", "data/other"))
    html = written(folder)
    assert "Measured on data/scenes." in html and "it was trained on" not in html


ASKED = {name: task for name in algorithm_names() if (task := algorithm_class(name).pretext_task)}


@pytest.mark.parametrize("method", ASKED)
def test_every_method_opens_with_its_own_pretext_task(tmp_path: Path, method: str) -> None:
    folder = fabricate_run(tmp_path, num_steps=5, evaluated=False)
    (folder / "recipe.yaml").write_text(f"algorithms: {{{method}: {{}}}}\ndata: {{path: data/p}}\n")
    write_pretext_tasks(folder, method)
    task = ASKED[method]
    if task.metric is not None:
        log(folder, json.dumps({"step": 1, f"metric/{method}_{task.metric}": 0.25}))
    html = written(folder)
    assert html.index(task.text) < html.index("<h2>Features</h2>")
    assert task.metric is None or f"During training, {task.meaning}: " in html
    if task.evaluation is not None:
        assert task.evaluation in evaluation_names()
        assert f"<span>{task.evaluation}</span>" in html


def test_a_method_of_elsewhere_has_its_pretext_task_from_the_run(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path)
    (folder / "pretext_tasks.json").write_text('{"rows": {"text": "Which row?"}}')
    html = written(folder)
    assert "Which row?" in html and ASKED["droppos"].text not in html


def test_published_figures_are_those_of_the_papers_table() -> None:
    text = (Path(__file__).parents[2] / "yamls" / "PAPERS.md").read_text("utf-8")
    for figure in PUBLISHED:
        assert re.search(rf"\b{re.escape(figure.percent)}", text), figure
        assert {*figure.methods} <= {*algorithm_names()}


def test_the_page_of_a_run_that_goes_on_follows_it(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    page = write_report(folder, refresh=60).read_text("utf-8")
    assert '<meta http-equiv="refresh" content="60">' in page and "this page is updated" in page
    assert "refresh" not in written(folder).split("</style>")[0]


REQUIRED = {"bank": "train", "protocol": "mae"}


@pytest.mark.parametrize("name", evaluation_names())
def test_a_printed_command_means_what_was_measured(tmp_path: Path, name: str) -> None:
    needed = {key: REQUIRED[key] for key in REQUIRED if key in default_settings(name)}
    others = {"logistic": "stop", "depth": "dinov3"}  # may be left out
    needed |= {"protocol": others[name]} if name in others else {}
    folder = fabricate_run(tmp_path, num_steps=5, evaluated=False)
    settings = check_settings(name, needed).values()
    document = {"name": name, "model": "runs/x", "data": "p", "settings": settings, "results": {}}
    (folder / "evaluation").mkdir()
    (folder / "evaluation" / f"{name}.json").write_text(json.dumps(document))
    words = shlex.split(evaluate_command(read_run(folder), name))
    assert words[:8] == [
        *["python", "-m", "pospre.evaluate"],
        name,
        *["--model", "runs/x", "--data", "p"],
    ]
    assert check_settings(name, parse_settings(words[8:])).values() == settings


def test_printed_commands_name_what_was_planned(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5, evaluated=False)
    planned = {"knn": {"data": "val", "bank": "train", "every": "2ep", "weights": "teacher"}}
    recipe = {"algorithms": {"droppos": {}}, "evaluation": planned}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = evaluate_command(read_run(folder), "knn")
    assert command.endswith("--data val --weights teacher bank=train")


def test_a_run_without_watchers_says_nothing_of_them(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path)
    (folder / "watch.jsonl").unlink()
    html = written(folder)
    assert "No warnings" in html
    log(folder, '{"step": 1, "loss/total": 1.0}')
    assert "<h2>Monitoring</h2>" not in written(folder)


def test_user_text_is_escaped_and_nothing_is_loaded_from_outside(tmp_path: Path) -> None:
    name = "<script>alert('x')</script>"
    folder = fabricate_run(tmp_path, name=name)
    write_evaluation(folder, "other", {"<b>key</b>": "<img src=x onerror=alert(1)>"})
    html = written(folder)
    assert "<script" not in html and "<img src=x" not in html and "<b>key" not in html
    assert "&lt;script&gt;alert(" in html and "&lt;img src=x" in html
    links = re.findall(r"""<[^>]*(?:src|href)\s*=\s*["']([^"']*)""", html)
    assert links and all(link.startswith(("data:", "#")) for link in links)
    assert "url(" not in html and "@import" not in html


def test_run_without_evaluations_says_what_would_add_them(tmp_path: Path) -> None:
    html = written(fabricate_run(tmp_path, evaluated=False))
    text = re.sub("<[^>]*>", "", html)
    for name in ("position_grid", "position_pictures", "knn"):
        assert f"python -m pospre.evaluate {name} --model" in text
    assert "--data data/scenes" in text and '<table class="heat">' not in html
    assert '<p class="verdict">' not in html
    write_evaluation(tmp_path / "droppos_demo", "logistic", logistic())
    assert "<span>knn</span>" not in written(tmp_path / "droppos_demo")  # one of them is enough


def test_run_without_position_algorithm(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, evaluated=False)
    recipe = folder / "recipe.yaml"
    recipe.write_text("run_name: mae_demo\nalgorithms: {mae: {mask_ratio: 0.75}}\n")
    write_pretext_tasks(folder, "mae")
    html = written(folder)
    assert "about positions" not in html and "position algorithm" not in html
    assert "<h2>Features</h2>" in html
    text = re.sub("<[^>]*>", "", html)
    assert "pospre.evaluate knn --model" in text
    assert "--data LABELLED\n" in text  # whether its own data have labels is not known


@pytest.mark.parametrize(
    ("duration", "figures"),
    [
        ("10ep", ['<dt>Epoch</dt><dd>10</dd><dd class="note">of 10</dd>', ">400 steps<"]),
        ("500ba", ["<dt>Epoch</dt><dd>10</dd></div>", '>400</dd><dd class="note">of 500</dd>']),
        ("30000sp", [">10</dd></div>", ">of 30\u202f000<"]),
    ],
)
def test_progress_is_told_in_the_unit_of_the_plan(
    tmp_path: Path, duration: str, figures: list[str]
) -> None:
    folder = fabricate_run(tmp_path, evaluated=False)
    recipe = folder / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("10ep", duration))
    html = written(folder)
    for figure in figures:
        assert figure in html


def test_position_accuracy_of_mp3(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, evaluated=False)
    recipe = folder / "recipe.yaml"
    recipe.write_text("run_name: mp3_demo\nalgorithms: {mp3: {}}\n")
    write_pretext_tasks(folder, "mp3")
    text = re.sub("<[^>]*>", "", written(folder))
    assert "pospre.evaluate patch_position --model" in text and "position_grid" not in text
    rows = [
        {"mask_ratio": 0.25, "top1": 0.41, "initial_top1": 0.02},
        {"mask_ratio": 0.75, "top1": None, "initial_top1": None},
    ]
    found = {"ratios": rows, "mean": 0.41, "initial_mean": 0.02, "chance": 1 / 64, "samples": 20}
    write_evaluation(folder, "patch_position", found)
    html = written(folder)
    assert "25 % outside the context" in html and "75 % outside" not in html
    assert all(f">{value} %</td>" in html for value in ("41.0", "2.0", "1.6"))


def test_run_that_just_started(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, evaluated=False)
    (folder / "metrics.jsonl").write_text("")
    (folder / "recipe.yaml").unlink()
    html = written(folder)
    assert "No step has been logged yet" in html and "recipe.yaml" in html


def test_half_written_last_line_is_tolerated(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=20)
    whole = written(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss/to')
    assert written(folder) == whole


def test_figures_measured_while_training_are_curves(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path)
    with (folder / "metrics.jsonl").open("a") as file:
        for step, value in ((200, 0.25), (400, 0.5)):
            figures = {"evaluation/knn/top1": value, "evaluation/knn/seconds": 3.0}
            file.write(json.dumps({"step": step, "epoch": 1, "samples": 64 * step, **figures}))
            file.write("\n")
    html = written(folder)
    assert re.search(r"<span>knn · top1</span><b>50\.0 %</b>", html)
    assert "knn · seconds" not in html and "Final loss" in html


def test_pauses_are_no_training_time(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, evaluated=False)
    rows = [
        {"step": 1, "samples": 100, "throughput": 10.0, "time": 0.0},
        {"step": 2, "samples": 700, "throughput": 10.0, "time": 90_000.0},
    ]
    log(folder, *map(json.dumps, rows))
    assert "<dd>70 s</dd>" in written(folder)


def test_page_of_a_long_run_with_heavy_pictures_stays_light(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5_000, evaluated=False)
    results = position_pictures(folder, num_pictures=24, side=256)
    rng = np.random.default_rng(0)
    for path in (folder / "evaluation" / "position_pictures").iterdir():
        noise = rng.integers(0, 256, (256, 256, 3), dtype=np.uint8)
        Image.fromarray(noise).save(path)
    results["pictures"] *= 2
    write_evaluation(folder, "position_pictures", results)
    html = written(folder)
    assert len(html) < PAGE_LIMIT
    assert "The first 24 of 48 pictures" in html


def big_picture(path: Path) -> None:
    """Write the head of a PNG that claims 60,000 x 60,000 pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    data = b"IDAT" + zlib.compress(b"")
    parts = [
        struct.pack(">I", len(p) - 4) + p + struct.pack(">I", zlib.crc32(p)) for p in (head, data)
    ]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(parts))


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def outside(folder: Path, name: str) -> None:
    """Replace a file by a link to a copy outside of the run folder."""
    copy = shutil.copy(folder / name, folder.parent)
    replaced(folder / name, lambda path: path.symlink_to(copy))


ORIGINAL = "evaluation/position_pictures/0000_original.png"
MANY = [{**position_grid()["cells"][0], "mask_ratio": n / 3000} for n in range(3000)]


@pytest.mark.parametrize(
    ("breaks", "names"),
    [
        (lambda f: log(f, '{"step": 1}', "{bad", '{"step": 3}'), ["metrics.jsonl", "line 2"]),
        (lambda f: log(f, '{"loss": 1}', '{"step": 3}'), ["metrics.jsonl", "line 1", "step"]),
        (lambda f: log(f, '{"step": 1e308}', '{"step": 3}'), ["metrics.jsonl", "line 1", "step"]),
        (lambda f: replaced(f / "metrics.jsonl", os.mkfifo), ["metrics.jsonl", "regular"]),
        (lambda f: (f / "recipe.yaml").write_text("a: [1"), ["recipe.yaml", "YAML"]),
        (lambda f: (f / "recipe.yaml").write_text("- 1"), ["recipe.yaml"]),
        (lambda f: outside(f, "recipe.yaml"), ["recipe.yaml", "outside"]),
        (lambda f: (f / "watch.jsonl").symlink_to("/dev/zero"), ["watch.jsonl", "outside"]),
        (lambda f: (f / "pretext_tasks.json").write_text('{"mae": 1}'), ["pretext_tasks.json"]),
        (lambda f: (f / "evaluation/knn.json").write_text("{"), ["knn.json", "again"]),
        (lambda f: replaced(f / "evaluation/knn.json", os.mkfifo), ["knn.json", "regular"]),
        (lambda f: (f / "evaluation/knn.json").write_text("{}"), ["knn.json", "results"]),
        (lambda f: write_evaluation(f, "knn", {"top1": "much"}), ["knn.json", "results.top1"]),
        (lambda f: write_evaluation(f, "position_grid", {"cells": []}), ["position_grid.json"]),
        (
            lambda f: write_evaluation(f, "position_grid", {**position_grid(), "cells": MANY}),
            ["position_grid.json", "at most 400"],
        ),
        (lambda f: (f / ORIGINAL).write_bytes(b"no"), ["0000_original.png"]),
        (lambda f: outside(f, ORIGINAL), ["0000_original.png", "outside"]),
        (lambda f: big_picture(f / ORIGINAL), ["0000_original.png", "pixels"]),
    ],
)
def test_what_is_damaged_is_left_out_with_a_line(
    tmp_path: Path, breaks: Callable[[Path], object], names: list[str]
) -> None:
    folder = fabricate_run(tmp_path / "runs", num_steps=5)
    (folder / "watch.jsonl").unlink(missing_ok=True)
    breaks(folder)
    run = read_run(folder)
    page = write_page(run).read_text("utf-8")
    assert len(run.left_out) == 1 and all(name in run.left_out[0] for name in names)
    assert "Left out: 1 damaged" in page and page.endswith("</html>")


def test_numbers_and_names_of_any_kind_make_a_page(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    huge = {"loss/total": 1e308, "lr": -1e308, "samples": 1e308, "throughput": 1e-300, "time": 1e99}
    lines = [
        {"step": n, **huge, "evaluation/x": 1, "loss/a": (-1) ** n * 9e99} for n in range(1, 200)
    ]
    lines += [{"step": 200, **{f"metric/{n}": 1.0 for n in range(500)}}]
    log(folder, *map(json.dumps, lines))
    recipe = "algorithms: 5\nevaluation: {knn: [1]}\ntrainer: {max_duration: %sba}\n" % ("9" * 9000)
    (folder / "recipe.yaml").write_text(recipe)
    run = read_run(folder)
    page = write_page(run).read_text("utf-8")
    assert run.left_out == ["304 of 504 curves"] and len(page) < PAGE_LIMIT


def test_pictures_outside_their_folder_are_left_out(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    results = position_pictures(folder, num_pictures=1)
    shutil.copy(folder / ORIGINAL, tmp_path / "secret.png")
    results["pictures"][0]["original"] = "../../../secret.png"
    write_evaluation(folder, "position_pictures", results)
    run = read_run(folder)
    write_page(run)
    assert len(run.left_out) == 1 and "outside of the folder" in run.left_out[0]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = fabricate_run(tmp_path, num_steps=5)
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    (folder / "report.html").unlink()
    (folder / "metrics.jsonl").unlink()
    for path, words in ((tmp_path / "no", "no does not exist"), (folder, "it is not a run")):
        assert words in fails(main, capsys, path)
    assert not (folder / "report.html").exists()


def test_a_page_is_written_without_importing_what_trains(tmp_path: Path) -> None:
    program = (
        "import sys, pospre.reporting.page; pospre.reporting.page.write_report(sys.argv[1]); "
        "print({'composer', 'torch'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", program, str(fabricate_run(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_repeating_a_run_never_meets_its_checkpoints(tmp_path: Path) -> None:
    command = reproduce_commands(read_run(fabricate_run(tmp_path)))[0]
    assert command.startswith("python -m pospre.train")
    for word in ("run_name=droppos_demo_again", "save_folder=null", "overwrite=false"):
        assert word in command


def test_an_evaluation_under_another_file_name_is_repeated_by_its_own(tmp_path: Path) -> None:
    folder = fabricate_run(tmp_path, evaluated=False)
    (folder / "evaluation").mkdir()
    document = {"name": "knn", "data": "photos", "settings": {"features": "cls"}, "results": {}}
    (folder / "evaluation" / "knn_cls.json").write_text(json.dumps(document))
    command = evaluate_command(read_run(folder), "knn_cls")
    assert command.startswith("python -m pospre.evaluate knn --model")
    assert "--output" in command and "evaluation/knn_cls.json features=cls" in command
