"""The sections of what is watched in a run, and how it is judged."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pospre.arguments import Section
from pospre.recipe.values import (
    PlainPath,
)


class LossSpikes(Section):
    """Arguments of ``pospre.training.callbacks.bad_steps.LossSpikes``."""

    action: Literal["warn", "stop"] = "warn"
    """What to do when the loss spikes."""
    window: int = Field(default=100, ge=10)
    """Steps that a loss is compared with."""
    factor: float = Field(default=10.0, gt=0)
    """Deviations above their median."""


class Collapse(Section):
    """Arguments of ``pospre.training.callbacks.watchers.Collapse``."""

    every: int = Field(default=100, gt=0)
    """Steps between checks."""
    share: float = Field(default=0.1, gt=0, lt=1)
    """Minimal share of the initial value."""


class PositionShortcut(Section):
    """Arguments of ``pospre.training.callbacks.watchers.PositionShortcut``."""

    every: int = Field(default=200, gt=0)
    """Steps between checks."""


class Stalls(Section):
    """Arguments of ``pospre.training.callbacks.stalls.Stalls``."""

    loader_share: float = Field(default=0.3, gt=0, lt=1)
    """Maximal share of the time."""
    patience: float = Field(default=60.0, gt=0)
    """Seconds above it before the warning."""
    silence: float = Field(default=120.0, gt=0)
    """Seconds without a finished step."""


class Callbacks(Section):
    """Monitoring of a run, besides the stop at a loss that is not finite; null turns one off."""

    loss_spikes: LossSpikes | None = LossSpikes()
    """The loss rises far above the last ones."""
    collapse: Collapse | None = Collapse()
    """The features of student or teacher collapse."""
    position_shortcut: PositionShortcut | None = PositionShortcut()
    """Positions are predicted without content."""
    stalls: Stalls | None = Stalls()
    """The loader is slow, or no step ends."""
    gradient_norms: bool = True
    """Log the norm of the gradients of the encoder and of each head."""


class Verdict(Section):
    """Whether training improved on the weights it started from: declared before it starts.

    The figure and its guards are measured at the end, on the half ``judge`` of the images, beside
    the start; looks during training (``evaluation.<name>.every``) are on the half ``choose``. Drift
    from the start is measured at the start, at the end of each stage and at the end.
    """

    figure: str | None = None
    """EVALUATION/FIGURE, as knn/top1, set in evaluation; None: only drift is measured."""
    guard: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Figures that must not become worse, as [segmentation/mIoU]."""
    data: PlainPath | None = None
    """Images to judge on, with labels if the figure needs them; None: those of the evaluation."""
    weights: Literal["student", "teacher"] = "student"
    """The encoder to judge: the one to export."""
    stop: Literal["worse"] | None = None
    """``worse``: end the run when three looks in a row find the figure worse than the start, of
    looks at every twentieth of the run after its first quarter. A run may fall first and rise later
    (a fall to 4 points below that ended 2 above was stopped in 94 % of trials), hence null.
    """


class Loggers(Section):
    """Logging besides ``metrics.jsonl``: arguments of Composer's loggers; null: none."""

    tensorboard: dict[str, Any] | None = None
    """TensorboardLogger's arguments."""
    wandb: dict[str, Any] | None = None
    """WandBLogger's arguments."""
    mlflow: dict[str, Any] | None = None
    """MLFlowLogger's arguments."""
    comet: dict[str, Any] | None = None
    """CometMLLogger's arguments."""
    neptune: dict[str, Any] | None = None
    """NeptuneLogger's arguments."""
