"""Whether a card computes what the CPU does, and a resumed run what an undisturbed one does.

Small trials beside what ``gpu_cell.py`` measures. Each returns facts: what was asked, whether it
holds (None: this machine cannot show it), and why.
"""

import traceback
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor

from data_prep.scenes import Settings, render_scenes
from pospre.batch import Batch
from pospre.evaluation.run import whole_float32
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe
from pospre.training.build import Components, build_model
from pospre.training.scale.compilation import compile_model
from pospre.training.train import train
from tests.benchmarks.gpu_cell import Turn, check_possible, recipe_of, synthetic
from tests.training.fitting import fit

Fact = dict[str, Any]
Result = tuple[Tensor, dict[str, Tensor]]
"""Loss and gradients by the parameter's name."""
_NEAR = 1e-3  # of float32 in another order of sums
_NO_GPU = "needs a GPU"
_OURS = ("pospre", "composer", "tests")


def fact(what: str, holds: bool | None, why: str = "") -> Fact:
    """Return whether something holds; None: that could not be seen here."""
    return {"fact": what, "holds": holds, "why": why}


def right(asked: dict[str, Any], turn: Turn, folder: Path) -> dict[str, Any]:
    """Compare the step with the CPU's in float32, compiled with eager; look for host syncs."""
    in_fp32 = ["trainer.precision=fp32", "trainer.compile=true", "trainer.residual=auto"]
    run = synthetic(recipe_of(asked, folder, *in_fp32))
    check_possible(run)
    with whole_float32():
        facts = [*_as_on_the_cpu(run, asked["method"])]
    whole = ["trainer.compile=true", "trainer.log_interval=2"]
    facts.append(_without_sync(synthetic(recipe_of(asked, folder, *whole)), asked["method"]))
    return {"facts": facts}


def _as_on_the_cpu(run: Components, method: str) -> Iterator[Fact]:
    """Yield the facts of one step on the CPU, on the device, and there compiled."""
    device = torch.device("cuda" if run.device.name == "gpu" else "cpu")
    given, model = next(iter(run.loader)), build_model(run.recipe).train()
    batch = model.prepare(dict(given), 0.5)
    expected = _step(model, batch)
    on_device = _copy(model, run.recipe).to(device)
    drawn = on_device.prepare({key: value.to(device) for key, value in given.items()}, 0.5)
    other = [key for key, value in batch.items() if not torch.equal(value, drawn[key].cpu())]
    yield fact(f"{method}: the draws are the CPU's", not other, ", ".join(other))
    moved = {key: value.to(device) for key, value in batch.items()}
    eager = _step(on_device, moved)
    yield _compare(f"{method}: loss and gradients in float32 are the CPU's", expected, eager)
    compiled = _copy(model, run.recipe).to(device)
    compiled.prepare(dict(moved), 0.5)  # sets its schedules
    compile_model(compiled, "step", run.device)
    found = _step(compiled, moved)
    yield _compare(f"{method}: compiled = eager in float32", eager, found)


def _copy(model: PretrainModel, recipe: Recipe) -> PretrainModel:
    """Return another model with the same weights: parts of the recipe's method belong to one."""
    other = build_model(recipe)
    other.load_state_dict(model.state_dict())
    return other.train()


def _step(model: PretrainModel, batch: Batch, *, half: bool = False) -> Result:
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16, enabled=half):
        outputs = model(dict(batch))
        loss = model.loss(outputs, batch)["total"]
    loss.backward()
    named = model.named_parameters()
    grads = {name: one.grad.cpu() for name, one in named if one.grad is not None}
    model.zero_grad()
    return loss.detach().cpu(), grads


def _compare(what: str, expected: Result, found: Result) -> Fact:
    """Return whether two steps are near: ‖difference‖ / ‖expected‖ of all gradients together."""
    (loss, grads), (other, others) = expected, found
    if grads.keys() != others.keys():
        return fact(what, False, f"gradients of others: {sorted(grads.keys() ^ others.keys())[:3]}")
    errors = {name: float((grads[name] - others[name]).double().norm()) for name in grads}
    norms = (float(one.double().norm()) for one in grads.values())
    whole = _norm(errors.values()) / max(_norm(norms), 1e-30)
    of_loss = abs(float(loss - other)) / max(abs(float(loss)), 1e-30)
    worst = max(errors, key=lambda name: errors[name])
    why = f"loss {of_loss:.1e}, gradients {whole:.1e} (most: {worst})"
    return fact(f"{what}, to {_NEAR:g}", max(of_loss, whole) <= _NEAR, why)  # False for NaN


def _norm(parts: Iterable[float]) -> float:
    return sum(part**2 for part in parts) ** 0.5


class _Syncs(Callback):
    """Notes where the host waits for the GPU, from the third step to the last."""

    def __init__(self) -> None:
        self.places: list[str] = []

    def batch_start(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 2 and torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")

    def fit_end(self, state: State, logger: Logger) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")

    def note(self, message: Warning | str, *_: Any) -> None:
        """Note the place in our code, or Composer's, that a warning comes from."""
        if "synchronizing CUDA operation" in str(message):
            frames = [
                f"{Path(frame.filename).name}:{frame.lineno}"
                for frame in traceback.extract_stack()[-2::-1]
                if any(f"/{one}/" in frame.filename for one in _OURS)
            ]
            self.places.append(" < ".join(frames[:3]))


def _without_sync(run: Components, method: str) -> Fact:
    """Train six steps, and see whether any after the second waits for the GPU."""
    syncs = _Syncs()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = syncs.note  # type: ignore[assignment]
        fit(run, syncs)
    what = f"{method}: no host sync in the trainer's step"
    if run.device.name != "gpu":
        return fact(what, None, _NO_GPU)
    return fact(what, not syncs.places, "; ".join(dict.fromkeys(syncs.places)))


class _Killed(Exception):
    """Ends a run in the middle of a step."""


class _Kill(Callback):
    def after_forward(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value == 4:
            raise _Killed


class _Keep(Callback):
    """Keeps the loss of every step, and the weights at the end."""

    def __init__(self) -> None:
        self.losses: dict[int, Any] = {}
        self.weights: dict[str, Tensor] = {}

    def batch_end(self, state: State, logger: Logger) -> None:
        self.losses[int(state.timestamp.batch.value)] = state.total_loss_dict

    def fit_end(self, state: State, logger: Logger) -> None:
        self.weights = {key: one.cpu() for key, one in state.model.state_dict().items()}


def resumed(asked: dict[str, Any], turn: Turn, folder: Path) -> dict[str, Any]:
    """Train six steps, undisturbed and killed in the fifth after a save at the third."""
    images = folder / "scenes"
    render_scenes(images, Settings(4 * asked["images"], 64, 0, "train", 1), num_workers=1)
    more = [f"data.path={images}", "trainer.save_interval=3ba", "trainer.compile=false"]

    def run(name: str, *callbacks: Callback) -> _Keep:
        recipe, keep = recipe_of(asked, folder, *more, f"run_name={name}"), _Keep()
        train(recipe, [keep, *callbacks])
        return keep

    whole = run("undisturbed")
    try:
        run("killed", _Kill())
    except _Killed:
        again = run("killed")
    what = f"{asked['method']}: resumed = undisturbed, every bit"
    other = [key for key, one in whole.weights.items() if not torch.equal(one, again.weights[key])]
    from_start = sorted(again.losses)[0]
    if not other and from_start == 4:
        return {
            "facts": [fact(what, True, f"steps {from_start} to 6, {len(whole.weights)} tensors")]
        }
    first = [step for step, losses in again.losses.items() if {**losses} != {**whole.losses[step]}]
    why = f"{len(other)} tensors differ ({', '.join(other[:2])}), losses from step {first[:1]} on"
    return {"facts": [fact(what, False, f"{why}; {_unrepeatable(recipe_of(asked, folder))}")]}


def _unrepeatable(recipe: Recipe) -> str:
    """Return what differs if a device computes the same step twice, and operators torch names."""
    run = synthetic(recipe)
    device = torch.device("cuda" if run.device.name == "gpu" else "cpu")
    model = run.model.to(device).train()
    batch = {key: value.to(device) for key, value in next(iter(run.loader)).items()}
    batch = model.prepare(batch, 0.5)
    (_, one), (_, other) = (_step(model, batch, half=True) for _ in range(2))
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            _step(model, batch, half=True)
    finally:
        torch.use_deterministic_algorithms(False)
    said = {str(one.message).split(" does not")[0].splitlines()[0][:60] for one in found}
    return f"the same step twice: {len(differ)} gradients differ; not deterministic: {sorted(said)}"
