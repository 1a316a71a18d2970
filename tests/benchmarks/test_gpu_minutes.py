"""``make gpu-minutes`` at the size of a CPU: the clock, the file of results, each kind of item."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pospre.data.views.options import ViewGroup
from pospre.training import train as training
from pospre.training.scale import compilation
from tests.benchmarks import gpu_cell, gpu_item, gpu_kit, gpu_minutes, gpu_right
from tests.benchmarks.gpu_items import Item, grid, minutes

STUB = """
import json, pathlib, sys, time
path = pathlib.Path(sys.argv[1])
asked = json.loads(path.read_text())["asked"]
if "say" in asked:
    sys.exit(asked["say"])
if asked.get("turn"):
    path.with_suffix(".ready").touch()
    if not sys.stdin.readline():
        sys.exit(1)
time.sleep(asked.get("sleep", 0))
path.with_suffix(".out").write_text(json.dumps(asked.get("gives", {"facts": []})))
"""
HOLDS = {"gives": {"facts": [{"fact": "one", "holds": True, "why": ""}]}}
H100 = gpu_kit.Card("NVIDIA H100 80GB HBM3", 79.1, "h100")
Run = Callable[..., tuple[int, list[dict[str, Any]], str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return the command over given items, whose processes start no torch: (code, lines, said)."""
    (tmp_path / "gpu_stub.py").write_text(STUB)
    monkeypatch.setattr(gpu_kit, "_PROCESS", "gpu_stub")
    monkeypatch.setattr(gpu_kit, "_REHEARSED", 1.0)
    monkeypatch.setattr(gpu_kit, "hash_of_sources", lambda: "now")  # reading takes a while
    monkeypatch.setattr(gpu_kit, "revision", lambda _: "abc")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    results = tmp_path / "results.jsonl"

    def command(*items: Item, more: tuple[str, ...] = ()) -> tuple[int, list[Any], str]:
        monkeypatch.setattr(gpu_minutes, "minutes", lambda **_: list(items))
        given = ["--device", "cpu", "--work", str(tmp_path / "work"), "--jobs", "3"]
        code = gpu_minutes.main([*given, "--results", str(results), *more])
        return code, gpu_minutes.read(results), capsys.readouterr().out

    return command


def item(name: str, **asked: Any) -> Item:
    return Item(
        name, "right", {**HOLDS, **asked}, prepares=1.0, timed=1.0 if "turn" in asked else 0
    )


def test_items_are_done_at_once_and_not_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    items = [item("first", turn=True), item("fails", say="no luck"), item("second")]
    code, lines, said = run(*items)
    assert code == 0 and {one["item"] for one in lines} == {"first", "fails", "second"}
    assert "fails: failed: no luck" in said and "first: one: pass" in said
    assert all(one["card"] == "cpu" and one["code"] and one["date"] for one in lines)
    again = run(*items)[1]
    assert [one["item"] for one in again[3:]] == ["fails"]  # what failed is tried again
    monkeypatch.setattr(gpu_kit, "hash_of_sources", lambda: "other")
    assert [one.name for one in gpu_minutes.missing(items, again, about("other"))] == [
        "fails",
        "first",
        "second",
    ]


def about(code: str, card: str = "cpu") -> dict[str, Any]:
    return {"code": code, "card": card}


def test_what_was_never_done_comes_first_and_what_failed_last() -> None:
    items = [item(name) for name in ("failed", "old", "new", "good")]

    def line(one: Item, code: str, **more: Any) -> dict[str, Any]:
        return {"item": one.name, "kind": "right", "asked": one.asked, **about(code), **more}

    lines = [
        line(items[0], "now", failed="out of memory"),
        line(items[1], "before"),
        line(items[3], "now"),
    ]
    todo = [one.name for one in gpu_minutes.missing(items, lines, about("now"))]
    assert todo == ["new", "old", "failed"]
    other_card = gpu_minutes.missing(items, lines, about("now", "NVIDIA H200"))
    assert other_card == items


def test_time_that_is_over_cuts_and_skips_in_a_line(run: Run) -> None:
    slow = item("slow", sleep=60)
    long = Item("long", "right", HOLDS, prepares=900.0)
    left = (gpu_kit._MARGIN + 3) / 60
    begun = gpu_kit.psutil.Process().create_time()
    given = ("--minutes", str((gpu_kit.time.time() - begun) / 60 + left))
    code, lines, said = run(slow, long, more=given)
    assert code == 0 and lines == []  # both are done by the next call
    assert "slow: cut, the time is over" in said and "long: skipped; it takes 900 s" in said


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"sleep": 60}, "preparing took over"), ({"sleep": 60, "turn": True}, "measuring took over")],
)
def test_an_item_past_its_limit_is_ended_and_the_others_go_on(
    run: Run, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], why: str
) -> None:
    monkeypatch.setattr(gpu_kit, "_REHEARSED", 0.06)
    _, lines, _ = run(Item("stuck", "right", {**HOLDS, **asked}, 1.0, 1.0), item("good"))
    failed = {one["item"]: one.get("failed", "") for one in lines}
    assert why in failed["stuck"] and failed["good"] == ""


def test_a_full_disk_costs_no_result(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gpu_kit.os, "fsync", full)
    code, _, said = run(item("first"), item("second"))
    assert code == 0 and said.count("cannot be written (No space left on device): {") == 2


def test_no_gpu_is_an_error_that_names_the_rehearsal(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit) as end:
        gpu_minutes.main([])
    assert end.value.code == 2 and "--device cpu" in capsys.readouterr().err.splitlines()[-1]


def test_a_wave_has_room_on_the_card() -> None:
    options = gpu_minutes._parse(["--device", "cpu", "--jobs", "8"])
    kit = gpu_kit.Kit(options, H100)
    wave, later = kit._wave(minutes(tiny=False, cores=16))
    assert sum(one.gib for one in wave) < 76 and len(wave) <= 8
    assert [one.name for one in wave][:4] == [
        "ceilings",
        "mae vitb16 compiled",
        "mae vitb16 eager",
        "mae vitb16 compiled, bf16 residual",
    ]
    while later:
        wave, later = kit._wave(later)
        assert wave


def test_the_list_and_the_grid_have_no_name_twice_and_predict() -> None:
    for items in (minutes(tiny=False, cores=16), grid(tiny=False, ranks=2, data="/data")):
        assert len({one.name for one in items}) == len(items)
    kit = gpu_kit.Kit(gpu_minutes._parse(["--device", "cpu"]), H100)
    speeds = [one for one in minutes(tiny=False, cores=16) if one.kind == "train"]
    lacking = [one.name for one in speeds if kit._predicted(one) is None]
    assert all("float8" in name or "FSDP2" in name for name in lacking)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trace what is compiled, and generate no code."""
    traced = partial(compilation.compile_model, backend="eager")
    for module in (training, gpu_right):
        monkeypatch.setattr(module, "compile_model", traced)
    monkeypatch.setenv(compilation.CACHE, str(tmp_path))
    torch._dynamo.reset()


TINY = {one.name: one for one in minutes(tiny=True, cores=1)}
SPEEDS = ["mae vitb16 compiled", "mae vitb16 compiled, scenes"]
TRIALS = ["ceilings", "copies beside computing", "microbatch_size auto"]


def rehearsed(name: str, **more: Any) -> dict[str, Any]:
    """Return what an item gives on a CPU; those that are timed wait for their turn once."""
    turns: list[bool] = []
    one = TINY[name]
    found = gpu_item.done(one.kind, {**one.asked, **more}, lambda: turns.append(True))
    assert "failed" not in found, found["failed"]
    assert len(turns) == bool(one.timed)
    return found


@pytest.mark.parametrize("name", SPEEDS)
def test_the_speed_of_a_training_is_measured(quick: None, name: str) -> None:
    found = rehearsed(name, predicted=1e9)
    slowest, fastest = found["spread"]
    assert 0 < slowest <= found["images_per_s"] <= fastest and found["first_step"] > 0
    assert len(found["losses"]) == 4 and found["peak_bytes"] > 1e8 and 0 <= found["data_wait"] < 1
    assert len(found["kernels"]) == 10  # far below what was predicted
    if "scenes" in name:
        assert found["loader_images_per_s"] > 0
    else:
        assert found["plain_images_per_s"] > 0 and found["gap_ms"] < 1e4


@pytest.mark.parametrize("name", TRIALS)
def test_a_trial_runs(name: str) -> None:
    found = rehearsed(name)
    assert all(one["holds"] is not False for one in found.get("facts", []))
    if name == "ceilings":
        assert found["copy_gb_per_s"] > 0 and found["bf16_tflops"] > 0


def test_a_step_is_compared_and_watched(quick: None) -> None:
    facts = {one["fact"]: one["holds"] for one in rehearsed("right mae")["facts"]}
    assert [*facts.values()] == [True, True, True, None]  # no GPU: no sync is seen


def test_a_killed_run_resumes_to_the_same_bits() -> None:
    (fact,) = rehearsed("resumed mae")["facts"]
    assert fact["holds"] is True and fact["why"].startswith("steps 4 to 6")


def test_gradients_that_differ_fail_and_name_the_worst() -> None:
    one = torch.tensor(1.0), {"a": torch.ones(4), "b": torch.ones(4)}
    other = torch.tensor(1.0), {"a": torch.ones(4), "b": torch.full((4,), 1.01)}
    assert gpu_right._compare("same", one, one)["holds"] is True
    found = gpu_right._compare("other", one, other)
    assert found["holds"] is False and "gradients 7.1e-03 (most: b)" in found["why"]
    nan = torch.tensor(float("nan")), one[1]
    assert gpu_right._compare("nan", one, nan)["holds"] is False


def test_a_host_sync_is_noted_with_its_place() -> None:
    syncs = gpu_right._Syncs()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = syncs.note  # type: ignore[assignment]
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        warnings.warn("another one", stacklevel=1)
    (place,) = syncs.places
    assert place.startswith("test_gpu_minutes.py:")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(), "out of memory"),
        (RuntimeError("CUDA error: no kernel\nmore"), "RuntimeError: CUDA error: no kernel"),
    ],
)
def test_what_fails_is_a_line(error: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setitem(gpu_item.KINDS, "train", fails)
    assert gpu_item.done("train", {}, lambda: None) == {"failed": said}


def test_without_a_compiler_a_compiled_item_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_cell, "lacking_compiler", lambda _: "there is no C compiler")
    one = TINY["mae vitb16 compiled"]
    found = gpu_item.done(one.kind, one.asked, lambda: None)
    assert found == {"failed": "there is no C compiler"}


def test_a_process_does_one_item(tmp_path: Path) -> None:
    """The only one here that starts torch; the rest of the command is above."""
    options = ["--device", "cpu", "--only", "ceilings", "--work", str(tmp_path)]
    results = tmp_path / "results.jsonl"
    assert gpu_minutes.main([*options, "--results", str(results)]) == 0
    (line,) = gpu_minutes.read(results)
    assert line["copy_gb_per_s"] > 0 and line["seconds"] < 200


def test_cells_that_are_compared_see_the_same_images() -> None:
    views = {"view": ViewGroup(size=32)}
    one, other = (gpu_cell.Synthetic(views, 2, 3, pinned=False).batch for _ in range(2))
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"item": "one"}\n{"item": "tw')
    gpu_kit.append(path, {"item": "three"})
    assert gpu_minutes.read(path) == [{"item": "one"}, {"item": "three"}]
