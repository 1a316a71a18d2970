"""The files in yamls/launch: what they run is what a launcher should run, and what they do after.

The programs of clusters are stood in for by scripts that note how they were called.
"""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from composer.cli.launcher import _get_parser

from pospre.recipe.recipe import load_recipe
from pospre.run.peers.ranks import Process, read_process
from tests.processes import LIMIT, started

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "yamls" / "launch"
RECIPE = "yamls/demo/mae.yaml"
Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Return ``program(name, script)``, which puts a program first into the search path."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(ROOT)

    def write(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return write


def result(*command: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    surroundings = os.environ | environment
    return subprocess.run(
        command, env=surroundings, capture_output=True, text=True, check=False, timeout=60
    )


def trains(arguments: list[str]) -> None:
    """Check that ``-m pospre.train …`` is a command of this package."""
    assert arguments[:2] == ["-m", "pospre.train"]
    load_recipe(arguments[2], arguments[3:])


@pytest.mark.parametrize("code", [0, 1, 2, 69, 75, 134, 137, 143])
def test_slurm(code: int, program: Program) -> None:
    program("scontrol", '[ "$1" = requeue ] && echo "requeued $2" || printf "node7\\nnode8\\n"')
    program(
        "srun",
        "shift; for SLURM_PROCID in 0 1 2 3; do export SLURM_PROCID SLURM_NTASKS=4; "
        "export SLURM_LOCALID=$((SLURM_PROCID % 2)) SLURM_NODEID=$((SLURM_PROCID / 2)); "
        f'"$@"; done; exit {code}',
    )
    program("rank", 'env | grep -E "RANK|WORLD|MASTER"; echo "called $*"')
    job = {"SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_ID": "31234", "PYTHON": "rank"}
    done = result(
        "bash", str(LAUNCH / "slurm.sbatch"), RECIPE, "seed=7", SLURM_NTASKS_PER_NODE="2", **job
    )
    assert done.returncode == code and not done.stderr
    assert ("requeued 31234" in done.stdout) == (code >= 69)
    *said, _ = done.stdout.split("called ")
    for rank, (lines, call) in enumerate(zip(said, done.stdout.split("called ")[1:], strict=True)):
        places = dict(line.split("=") for line in lines.splitlines() if "=" in line)
        places.pop("seed", None)
        assert read_process(places) == Process(rank, 4, rank % 2, 2, "node7", 21234)
        assert places["NODE_RANK"] == str(rank // 2)
        trains(call.splitlines()[0].split())
    often = result("bash", str(LAUNCH / "slurm.sbatch"), RECIPE, SLURM_RESTART_COUNT="20", **job)
    assert "requeued" not in often.stdout


def test_ssh_starts_a_launcher_on_each_host_and_passes_sigterm_on(
    program: Program, tmp_path: Path
) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    program("ssh", 'shift; exec bash -c "$*"')
    program(".venv/bin/composer", "rank $* & wait $!")
    program("rank", 'trap "exit 75" TERM; printf "%s\\n" "$*"; while true; do sleep 0.05; done')
    given = {"HOSTS": "node7 node8", "RANKS": "4", "DIR": str(tmp_path)}
    command = ["bash", str(LAUNCH / "ssh.sh"), RECIPE, "seed=7"]
    with started(command, env=os.environ | given) as script:
        assert script.stdout is not None
        called = [script.stdout.readline().split() for _ in range(2)]
        script.terminate()
        _, errors = script.communicate(timeout=LIMIT)
    assert script.returncode == 75 and not errors
    places = [_get_parser().parse_args(words) for words in called]
    assert sorted(place.node_rank for place in places) == [0, 1]
    for place in places:
        assert (place.nproc, place.world_size, place.master_addr) == (4, 8, "node7")
        trains(["-m", place.training_script, *place.training_script_args])


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yml").read_text())
    return service, job


def test_kubernetes_describes_one_job() -> None:
    service, job = documents()
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    name = service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == name and pod["restartPolicy"] == "Never"
    assert f"{job['metadata']['name']}-0.{name} " in container["args"][0]
    assert str(job["spec"]["completions"]) == values["NODES"] == str(job["spec"]["parallelism"])
    assert str(container["resources"]["limits"]["nvidia.com/gpu"]) == values["RANKS"]
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in job["spec"]["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [2], "Ignore": [75]}


def test_kubernetes_runs_a_launcher_on_each_node_and_passes_sigterm_on(program: Program) -> None:
    (container,) = documents()[1]["spec"]["template"]["spec"]["containers"]
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    given |= {"RECIPE": RECIPE, "JOB_COMPLETION_INDEX": "1"}
    program("composer", 'printf "%s\\n" "$@"; rank & sleep 0.5; kill -TERM $PPID; wait $!')
    program("rank", 'trap "exit 75" TERM; while true; do sleep 0.05; done')
    done = result(*container["command"], *container["args"], **given)
    assert done.returncode == 75 and not done.stderr
    called = _get_parser().parse_args(done.stdout.split())
    assert called.nproc == 8 and called.world_size == 16 and called.node_rank == 1
    assert called.master_addr == "pospre-0.pospre" and called.master_port == 29400
    assert called.module_mode and called.training_script == "pospre.train"
    trains(["-m", called.training_script, *called.training_script_args])
