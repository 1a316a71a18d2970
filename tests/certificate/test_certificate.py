"""Certificates of small recipes: green where a run goes on exactly, red where it does not.

The drill of kills is here, too: its processes come from the certificates' fork server.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pospre import certify as command
from pospre.certificate.certificate import Certificate, Request, certify, headline, table
from pospre.certificate.step_records import Job
from pospre.errors import run_command
from tests.certificate import impure
from tests.data.flaky_s3 import use_bucket
from tests.drills.certify_demos import YAMLS, small, write_pictures
from tests.drills.s3_kills import drill

SHARDED = ("trainer.fsdp={}",)  # each other number of ranks, other shards


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"))


def overrides(name: str, pictures: Path, folder: Path) -> tuple[Path, tuple[str, ...]]:
    path = YAMLS / "demo" / f"{name}.yaml"
    return path, (*small(path, pictures), f"trainer.run_folder={folder}/runs")


@pytest.mark.parametrize(
    ("name", "more", "kills", "options", "title"),
    [
        ("dinov2", (), 1, ("--ranks", "1,2"), "2 ranks beside 2: the targets and KoLeo of dinov2"),
        ("mae", ("encoder.dropout=0.1", "trainer.precision=fp32", *SHARDED), 3,
         ("--ranks", "2,1,2", "--also", "trainer.microbatch_size=4"), "ranks 2→1→2"),
    ],
)  # fmt: skip
def test_a_green_certificate(
    name: str,
    more: tuple[str, ...],
    kills: int,
    options: tuple[str, ...],
    title: str,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, small_keys = overrides(name, pictures, tmp_path)
    given = [str(path), *small_keys, *more, "--steps", "6", "--kills", str(kills), *options]
    assert command.main(given) == 0
    said = capsys.readouterr()
    folder = tmp_path / "runs" / name / "certificate"
    assert f"certificate of {path}: green" in said.out and f"{folder}/certificate.md" in said.out
    *_, killed_last, last = [
        line for line in said.err.splitlines() if line.startswith(f"{kills} kills, process")
    ]
    ended = f"process {kills + 1} of {kills + 1}: came to the end, "
    assert f"{ended}at step 6" in last or (
        "at step 6" in killed_last and f"{ended}nothing was left to do" in last
    )
    assert {entry.name for entry in folder.iterdir()} == {"certificate.json", "certificate.md"}
    document = json.loads((folder / "certificate.json").read_text())
    killed, *others = document["columns"]
    assert document["green"] and len(killed["ends"]) == kills
    found = {verdict["property"]: verdict["text"] for verdict in killed["verdicts"]}
    equal = ("sample ids", "boxes", "flips", "masks", "pixels", "losses", "parameters")
    assert {found[name] for name in (*equal, "optimiser", "random")} == {"equal"}
    assert others[-1]["stage"]["title"].startswith(title)
    assert len(others) == len(options) // 2  # a run for each option
    for column in others:
        found = {verdict["property"]: verdict["text"] for verdict in column["verdicts"]}
        assert found["masks"] == "equal"
        assert found["losses"].startswith("equal" if title.startswith("2 ranks") else "within")


def red(
    work: Callable[[Job], None], pictures: Path, folder: Path, kills: int = 2, seed: int = 0
) -> Certificate:
    path, keys = overrides("mae", pictures, folder)
    request = Request(str(path), keys, steps=6, kills=kills, ranks=(1,), seed=seed)
    certificate, written = certify(request, work)
    assert not certificate.is_green and "RED" in (written / "certificate.md").read_text()
    assert (written / "killed" / "process0-rank0.jsonl").exists()  # to look into
    return certificate


def test_an_impure_draw_is_named_with_its_step(pictures: Path, tmp_path: Path) -> None:
    certificate = red(impure.draw_by_process, pictures, tmp_path)
    verdicts = {verdict.property: verdict for verdict in certificate.columns[0].verdicts}
    assert verdicts["masks"].step == verdicts["losses"].step == 5  # the first of the second epoch
    assert "2 kills: masks differ from step 5 on" in headline(certificate)
    assert "**differ from step 5 on**" in table(certificate)
    for name in ("sample ids", "boxes", "flips", "pixels"):
        assert verdicts[name].holds


def test_a_forgotten_state_is_named_with_its_step(pictures: Path, tmp_path: Path) -> None:
    # The last kill is a SIGTERM in step 4: the process after it does go on from a checkpoint.
    certificate = red(impure.forget_the_momenta, pictures, tmp_path, kills=4, seed=2)
    verdicts = {verdict.property: verdict for verdict in certificate.columns[0].verdicts}
    assert verdicts["masks"].holds
    assert not verdicts["parameters"].holds and not verdicts["optimiser"].holds
    assert verdicts["parameters"].step is not None and verdicts["parameters"].step > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kills", "0"), "--kills is 0; give at least 1"),
        (("--ranks", "1,two"), "--ranks is '1,two'; give numbers of ranks such as 1,2,1"),
        (("--ranks", "1,5"), "must be a multiple of their number, 5; use"),
        (("--also", "data.bath_size=4"), "unknown key 'data.bath_size'"),
        (("trainer.run_folder=/dev/null/x",), "is not a writable folder"),
        (
            ("data.path=nowhere",),
            "run 'undisturbed' of the certificate ended with exit code 2: nowhere",
        ),
        (("encoder.deptg=1",), "encoder.deptg"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...],
    message: str,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, keys = overrides("mae", pictures, tmp_path)
    assert run_command(lambda: command.main([str(path), *keys, *arguments])) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said


def test_five_kills_with_a_bucket_that_misbehaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drill of 200 kills, small: what it promises holds at five."""
    use_bucket(monkeypatch, "")  # what the drill sets is put back in the end
    tally, verdicts = drill(tmp_path, 5, 16, outages=[2.0], seed=1, silence=3.0)
    assert not tally.faults
    assert sum(tally.ends.values()) >= 2  # of five: some come too late in so short a run
    assert all(verdict.holds for verdict in verdicts)
