"""Detects position shortcuts: accuracy that the images' content does not explain."""

import math
from pathlib import Path

import torch
from composer.core import State, get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from pospre.batch import Batch, image_key, numbered
from pospre.model.algorithm import PretrainAlgorithm, pretrain_model
from pospre.model.model import PretrainModel
from pospre.model.position_task import PositionObjective
from pospre.training.callbacks.watcher import Watcher, is_due

_SAMPLES = 64  # over all ranks
_DEVIATIONS = 4.0


class PositionShortcut(Watcher):
    """Lets the position heads guess the places of patches that all look the same.

    At intervals, some images of the step are filled with their mean colour. The model predicts the
    place of each patch, in evaluation mode and without gradient. The content gives no
    information, so correct predictions must come from elsewhere: a position that was not dropped,
    or the order of tokens. The level of guessing is the accuracy of the same predictions for
    redrawn hidden places. ``metric/<objective>_blank_accuracy`` above it by more than four standard
    deviations (counting an image's patches as one guess) is a leak.

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
        heads = [name for name in model.objectives if _head(model, name) is not None]
        if not heads or step == 1 or not is_due(step, self.interval, self.every):
            return
        batch = self._batch(state, model)
        outputs = _ask(state, model, batch)
        for name in heads:
            head = _head(model, name)
            assert head is not None
            answers = head.answers(outputs[name], batch)
            both = torch.stack([answers.accuracy(), answers.chance()]).float()
            dist.all_reduce(both)
            found, chance = (both / dist.get_world_size()).tolist()
            logger.log_metrics({f"metric/{name}_blank_accuracy": found})
            samples = len(batch["index"]) * dist.get_world_size()
            limit = chance + _DEVIATIONS * math.sqrt(chance * (1 - chance) / samples)
            warning = (
                f"{name} knows where patches are without looking at them: on blank images it puts "
                f"{found:.1%} in their place, by guessing it would be {chance:.1%}. Something else "
                "tells it their positions: a position that is not dropped, or the tokens' order"
            )
            self.judge(step, name, warning if found > limit else None)

    def _batch(self, state: State, model: PretrainModel) -> Batch:
        """Return some samples of the step without their content, with new masks."""
        size = max(1, _SAMPLES // dist.get_world_size())
        few = {key: value[:size] for key, value in state.batch.items()}
        assert state.previous_timestamp is not None
        few = numbered(few, epoch=state.previous_timestamp.epoch.value)
        few = state.device.batch_to_device(few)
        for group in model.views:
            few[image_key(group)] = blank(few[image_key(group)])
        for algorithm in state.algorithms:
            if isinstance(algorithm, PretrainAlgorithm):
                algorithm.write(few, model)
        return few


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


def _head(model: PretrainModel, name: str) -> PositionObjective | None:
    objective = model.objectives[name]
    return objective if isinstance(objective, PositionObjective) else None
