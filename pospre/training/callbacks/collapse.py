"""Detects collapse: features that no longer distinguish images, or uninformative targets."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer.core import State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from pospre.model.algorithm import pretrain_model
from pospre.model.model import FEATURES, PretrainModel
from pospre.training.callbacks.watcher import Watcher, is_due

_ROWS = 256  # maximal number of features used, over all ranks
_NOTHING = 1e-3  # a spread below this is none, whatever the initial value
_ENTROPY = 0.005  # of log K: demo runs that learn stay more than 0.02 away


class Quantity(NamedTuple):
    """A watched quantity, and its values after a collapse.

    Attributes:
        value: its current value.
        ends: its possible values after a collapse.
        nothing: a distance to an end below this is a collapse, whatever the initial value.
        is_relative: whether being much nearer to an end than initially is also a collapse.
    """

    value: float
    ends: tuple[float, ...]
    nothing: float
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
        self,
        *,
        share: float = 0.1,
        every: int = 100,
        interval: int = 10,
        log: Path | None = None,
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
        found: dict[str, Quantity] = {}
        outputs: Any = state.outputs  # those of our model
        for name in _watched(model):
            features = _gathered(outputs[FEATURES][name])
            found[f"features/{name}_std"] = Quantity(feature_std(features), (0.0,), _NOTHING)
            found[f"features/{name}_rank"] = Quantity(effective_rank(features), (1.0,), _NOTHING)
        logger.log_metrics({name: quantity.value for name, quantity in found.items()})
        for name, quantity in (found | _entropies(state, model)).items():
            self._start.setdefault(name, quantity.value)
            self.judge(step, name, self._warning(name, quantity))

    def _warning(self, name: str, quantity: Quantity) -> str | None:
        value, start = quantity.value, self._start[name]
        for end in quantity.ends:
            share = self.share if quantity.is_relative else 0.0
            if abs(value - end) < max(share * abs(start - end), quantity.nothing):
                return (
                    f"the training collapses: {name} is {value:.3g}, was {start:.3g} at the start, "
                    f"and {end:.3g} is where nothing tells the images apart. Try a lower "
                    "optimizer.base_lr or a longer schedule.warmup; where a teacher gives the "
                    "targets, look at its momentum, temperature and centering"
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
    passes = model.registry.passes
    student = [name for name, declared in passes.items() if declared.has_grad]
    teacher = [name for name, declared in passes.items() if declared.teacher]
    return [*student[:1], *teacher[:1]]


def _entropies(state: State, model: PretrainModel) -> dict[str, Quantity]:
    """Return the entropies of teachers' targets that the step has logged."""
    found = {}
    for name in model.objectives:
        prototypes, metric = model.objectives[name].num_prototypes, f"metric/{name}_entropy"
        if prototypes is not None:
            value, most = state.total_loss_dict[f"loss/train/{metric}"], math.log(prototypes)
            found[metric] = Quantity(value, (0.0, most), _ENTROPY * most, is_relative=False)
    return found


def _gathered(features_RD: Tensor) -> Tensor:
    """Return features of all ranks on the CPU."""
    own = features_RD[: _ROWS // dist.get_world_size()].float().cpu()
    return torch.cat(dist.all_gather_object(own))
