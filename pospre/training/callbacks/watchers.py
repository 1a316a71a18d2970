"""Monitoring callbacks: when they check and how they warn; collapse, and position shortcuts.

A collapse: features no longer distinguish images, or targets are uninformative. A shortcut:
accuracy that the images' content does not explain.
"""

import contextlib
import json
import math
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import Callback, State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from tqdm import tqdm

from pospre.batch import Batch, image_key, numbered
from pospre.model.algorithm import pretrain_model
from pospre.model.model import FEATURES, PretrainModel
from pospre.model.position_task import PlaceObjective
from pospre.training.callbacks.metrics import drop_after

WARNINGS = "watch.jsonl"
"""The file with a run's warnings, in its folder."""
_ROWS = 256  # maximal number of features used, over all ranks
_NOTHING = 1e-3  # a spread below this is none, whatever the initial value
_ENTROPY = 0.005  # of log K: demo runs that learn stay more than 0.02 away
_SAMPLES = 64  # filled with their mean colour, over all ranks
_DEVIATIONS = 4.0  # above guessing are a shortcut


class Watcher(Callback):
    """Warns on stderr, and in a file if there is one; each problem once, until it is over.

    Args:
        log: file for a JSON line per warning: ``step``, ``time`` (seconds since 1970), ``watch``
            (the name of the class) and ``warning``.
    """

    def __init__(self, log: Path | None = None) -> None:
        self.log = log
        self._troubled: set[str] = set()

    def fit_start(self, state: State, logger: Logger) -> None:
        """Drop the warnings of steps that will be trained again."""
        if self.log is not None and dist.get_global_rank() == 0:
            drop_after(self.log, state.timestamp.batch.value)

    def judge(self, step: int, trouble: str, warning: str | None) -> None:
        """Warn when a problem begins; ``warning`` is None while there is none."""
        if warning is None:
            self._troubled.discard(trouble)
        elif trouble not in self._troubled:
            self._troubled.add(trouble)
            self.warn(step, warning)

    def warn(self, step: int, warning: str) -> None:
        """Write one line, on rank 0."""
        if dist.get_global_rank() == 0:
            tqdm.write(f"warning: step {step}: {warning}", file=sys.stderr)  # above a progress bar
            note(self.log, step, type(self).__name__, warning)


def note(log: Path | None, step: int, watch: str, warning: str) -> None:
    """Append a warning to a file, if there is one; a full disk is ignored."""
    if log is None:
        return
    line = {"step": step, "time": round(time.time(), 3), "watch": watch, "warning": warning}
    with contextlib.suppress(OSError):
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def is_due(step: int, interval: int, every: int = 1) -> bool:
    """Return whether to check at ``step``: the first, and the first logged one of every ``every``.

    Args:
        step: counted from 1.
        interval: steps between lines of ``metrics.jsonl``: only then may the host wait for a GPU.
        every: steps between checks.
    """
    return step == 1 or (step % interval == 0 and step // every > (step - interval) // every)


class Quantity(NamedTuple):
    """A watched quantity, and its values after a collapse."""

    value: float  # its current value
    ends: tuple[float, ...]  # its possible values after a collapse
    nothing: float  # a distance to an end below this is a collapse, whatever the initial value
    # whether being much nearer to an end than initially is also a collapse
    is_relative: bool = True


class Collapse(Watcher):
    """Logs how well student and teacher distinguish images; warns if little of it is left.

    It uses the step's own features, one vector per view: the mean of its patch tokens, or the class
    token if a pass has no others. Up to 256 views over all ranks are used, from the (last)
    microbatch.

    ``features/<pass>_std``: the standard deviation over the views of features of length 1, times
    √D: 1 if directions are random, 0 if all are the same. ``features/<pass>_rank``: RankMe
    (Garrido et al. 2023), from 1 (all the same, up to length) to min(views, D). It also checks
    ``metric/<objective>_entropy`` of a teacher's targets: 0 if each is one prototype, log K if they
    are uniform; both are a collapse, within half a percent of log K.

    Args:
        share: features have collapsed if their std, or their rank minus 1, is below this share of
            its value at the first check.
        every: steps between checks.
        interval: steps between lines of metrics; checks happen only with a line.
        log: see ``Watcher``.
    """

    def __init__(
        self, *, share: float = 0.1, every: int = 100, interval: int = 10, log: Path | None = None
    ) -> None:
        super().__init__(log)
        self.share, self.every, self.interval = share, every, interval
        self._start: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the initial values."""
        return {"start": dict(self._start)} if self._start else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint; without initial values, the next check sets them."""
        self._start = dict(state.get("start", {}))

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure and check, if due."""
        step, model = state.timestamp.batch.value, pretrain_model(state)
        if not is_due(step, self.interval, self.every):
            return
        values: dict[str, Quantity] = {}
        outputs: Any = state.outputs  # those of our model
        for name in _watched(model):
            features = _gathered(outputs[FEATURES][name])
            values[f"features/{name}_std"] = Quantity(feature_std(features), (0.0,), _NOTHING)
            values[f"features/{name}_rank"] = Quantity(effective_rank(features), (1.0,), _NOTHING)
        logger.log_metrics({name: quantity.value for name, quantity in values.items()})
        for name, quantity in (values | _entropies(state, model)).items():
            if name in self._start:
                self.judge(step, name, self._warning(name, quantity))
            self._start.setdefault(name, quantity.value)

    def _warning(self, name: str, quantity: Quantity) -> str | None:
        value, start = quantity.value, self._start[name]
        for end in quantity.ends:
            share = self.share if quantity.is_relative else 0.0
            if abs(value - end) < max(share * abs(start - end), quantity.nothing):
                return (
                    f"training is collapsing: {name} is {value:.3g}, was {start:.3g} at the start, "
                    f"and is {end:.3g} if all images look the same. Try a lower "
                    "optimizer.base_lr or a longer schedule.warmup; if a teacher gives the "
                    "targets, check its momentum, temperature and centering"
                )
        return None


def feature_std(features_RD: Tensor) -> float:
    """Return the standard deviation over rows of length 1, times √D."""
    rows = torch.nn.functional.normalize(features_RD.double(), dim=1)
    return (rows.var(0, unbiased=False).mean().sqrt() * math.sqrt(rows.shape[1])).item()


def effective_rank(features_RD: Tensor) -> float:
    """Return RankMe: the exponential of the entropy of the singular values' shares."""
    rows = features_RD.double()
    if rows.shape[0] > rows.shape[1]:
        rows = rows.T
    values = torch.linalg.eigvalsh(rows @ rows.T).clamp_min(0).sqrt()
    shares = values / values.sum().clamp_min(1e-300)
    return torch.special.entr(shares).sum().exp().item()


def _watched(model: PretrainModel) -> list[str]:
    """Return the first trained pass, and the first teacher pass."""
    passes = model.layout.passes
    student = [name for name, declared in passes.items() if declared.has_grad]
    teacher = [name for name, declared in passes.items() if declared.teacher]
    return [*student[:1], *teacher[:1]]


def _entropies(state: State, model: PretrainModel) -> dict[str, Quantity]:
    """Return the entropies of teachers' targets that the step has logged."""
    quantities = {}
    for name, uses in model.layout.uses.items():
        for entropy, most in uses.entropies.items():
            metric = f"metric/{name}_{entropy}"
            value = state.total_loss_dict[f"loss/train/{metric}"]
            quantities[metric] = Quantity(value, (0.0, most), _ENTROPY * most, is_relative=False)
    return quantities


def _gathered(features_RD: Tensor) -> Tensor:
    """Return features of all ranks on the CPU."""
    own = features_RD[: _ROWS // dist.get_world_size()].float().cpu()
    return torch.cat(dist.all_gather_object(own))


class PositionShortcut(Watcher):
    """Lets the heads that predict places guess those of images that show nothing.

    At intervals, some images of the step are filled with their mean colour. The model predicts
    places, in evaluation mode and without gradient. The content gives no information, so correct
    predictions must come from elsewhere: a position that was not dropped, or the order of tokens.
    The level of guessing is the score of the same predictions for redrawn places.
    ``metric/<objective>_blank_accuracy`` (of relations ``_blank_r2``, one of whose numbers is
    enough) above it by more than four standard deviations is a leak.

    Leaks in the pixels themselves (a camera's vignette) are not detected.

    Args:
        every: steps between checks.
        interval: steps between lines of metrics; checks happen only with a line.
        log: see ``Watcher``.
    """

    def __init__(self, *, every: int = 200, interval: int = 10, log: Path | None = None) -> None:
        super().__init__(log)
        self.every, self.interval = every, interval

    def batch_end(self, state: State, logger: Logger) -> None:
        """Measure, log and check, if due and the model has a position head."""
        step, model = state.timestamp.batch.value, pretrain_model(state)
        named = model.objectives.named.items()
        heads = {name: head for name, head in named if isinstance(head, PlaceObjective)}
        if not heads or step == 1 or not is_due(step, self.interval, self.every):
            return
        batch = self._batch(state, model)
        outputs = _ask(state, model, batch)
        for name, head in heads.items():
            answers = head.answers(outputs[name], batch)
            all_three = torch.stack([answers.score(), *answers.chance()]).float()
            dist.all_reduce(all_three)
            score, chance, deviation = all_three / dist.get_world_size()
            deviation = deviation / math.sqrt(dist.get_world_size())
            logger.log_metrics({f"metric/{name}_blank_{answers.measure}": score.mean().item()})
            found = f"{score.mean():.1%}; guessing would have {chance.mean():.1%}"
            warning = (
                f"{name} knows places without looking: on blank images, its {answers.measure} is "
                f"{found}. Something leaks them: a position that is not dropped, or the order of "
                "the tokens"
            )
            leaks = bool((score > chance + _DEVIATIONS * deviation).any())
            self.judge(step, name, warning if leaks else None)

    def _batch(self, state: State, model: PretrainModel) -> Batch:
        """Return some samples of the step without their content, with new masks."""
        size = max(1, _SAMPLES // dist.get_world_size())
        few = {key: value[:size] for key, value in state.batch.items()}
        assert state.previous_timestamp is not None
        few = numbered(few, epoch=state.previous_timestamp.epoch.value)
        few = state.device.batch_to_device(few)
        for group in model.views:
            few[image_key(group)] = blank(few[image_key(group)])
        return model.draw(few)


def blank(images_BVCHW: Tensor) -> Tensor:
    """Return each view filled with its mean colour."""
    mean = images_BVCHW.float().mean((3, 4), keepdim=True)
    return mean.to(images_BVCHW.dtype).expand_as(images_BVCHW).contiguous()


@torch.no_grad()
def _ask(state: State, model: PretrainModel, batch: Batch) -> dict[str, dict[str, Tensor]]:
    was_training = model.training
    model.eval()
    try:
        with get_precision_context(state.precision, state.precision_config):
            return model(batch)
    finally:
        model.train(was_training)
