"""The door of a run: held by one at a time, opened by ``train`` itself, and all given back."""

from pathlib import Path

from pospre.recipe.recipe import load_recipe
from pospre.run.run import Run
from pospre.training.train import train, train_in
from tests.disk import snapshot
from tests.processes import finished, launcher
from tests.refusals import refuses
from tests.training.tiny_runs import SHORT, curve, environment


def test_train_alone_is_a_whole_run(tiny: Path, tmp_path: Path) -> None:
    recipe, folder = load_recipe(tiny, SHORT), tmp_path / "runs" / "tiny"
    before = snapshot(tmp_path)
    with Run(recipe) as run:
        refuses("in use by another run", lambda: train(recipe))
        assert run.is_new()
    assert snapshot(tmp_path) == before
    assert not train(recipe)
    assert [step for step, *_ in curve(folder)] == [1, 2, 3, 4, 5, 6]
    assert not list(folder.glob("*.lock"))
    with Run(recipe) as run:
        assert not run.is_new()
        assert train_in(run)  # is finished


def test_shards_are_refused_on_disks_that_the_nodes_do_not_share(
    tiny: Path, tmp_path: Path
) -> None:
    script = Path(__file__).with_name("two_disks.py")
    done = finished([*launcher(2), str(script), str(tiny), str(tmp_path)], env=environment())
    assert done.returncode == 0, done.stdout + done.stderr
