"""The loggers of a run: ``metrics.jsonl``, and Composer's loggers in the recipe."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, NamedTuple

from composer import loggers as composer_loggers
from composer.core import State
from composer.loggers import Logger, LoggerDestination, TensorboardLogger
from composer.utils import dist

from pospre.arguments import check_arguments
from pospre.errors import UserError
from pospre.recipe.recipe import Recipe
from pospre.training.callbacks.metrics import MetricsFile


class TensorBoard(TensorboardLogger):
    """Composer's, with one event file per start rather than one per epoch."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Hide what an earlier start has logged of steps that will be trained again."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if dist.get_global_rank() == 0:
            writer: Any = self.writer
            first = state.timestamp.batch.value + 1
            start = SessionLog(status=SessionLog.START)
            writer.file_writer.add_event(Event(step=first, session_log=start))

    def _flush(self, logger: Logger) -> None:
        if self.writer is not None:
            self.writer.flush()

    def close(self, state: State, logger: Logger) -> None:
        """Write what is left and close the file."""
        if self.writer is not None:
            self.writer.close()


class WandB(composer_loggers.WandBLogger):
    """Composer's, adapted to wandb 0.22, where ``get_url()`` became ``url``."""

    def init(self, state: State, logger: Logger) -> None:
        """Start the run."""
        import wandb

        if not hasattr(wandb.Run, "get_url"):
            wandb.Run.get_url = lambda run: run.url
        super().init(state, logger)


class MLflow(composer_loggers.MLFlowLogger):
    """Composer's; a continued mlflow run, which cannot go back, gets each step once.

    A run of wandb or neptune that is continued skips earlier steps by itself. comet starts a new
    one each time, and without ``resume`` so does mlflow.
    """

    _last: Mapping[str, int] = MappingProxyType({})  # steps that the run already has, by metric

    def fit_start(self, state: State, logger: Logger) -> None:
        """Look up the last step of each metric."""
        if self._enabled:
            logged = self._mlflow_client.get_run(self._run_id).data._metric_objs
            self._last = {metric.key: metric.step for metric in logged}

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Log the values that the run does not have yet."""
        new = {k: v for k, v in metrics.items() if (step or 0) > self._last.get(self.rename(k), -1)}
        super().log_metrics(new, step)


class _Kind(NamedTuple):
    """A logger's class, its package with the requirement, and the home of its key."""

    made_by: type[LoggerDestination]
    package: str
    requirement: str
    key: str = ""


_SECRET_NAME = re.compile(r"(?i)(api_?key|token|password|passwd|secret)$")
_LOGIN = re.compile(r"://[^/\s]*:[^/\s]*@")  # https://name:password@host

# versions that work with Composer's loggers and with the protobuf of our requirements
_KINDS = {
    "tensorboard": _Kind(TensorBoard, "tensorboard", "tensorboard"),
    "wandb": _Kind(WandB, "wandb", "wandb>=0.26.1", "WANDB_API_KEY"),
    "mlflow": _Kind(
        MLflow,
        "mlflow",
        "mlflow>=3.17",
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
    ),
    "comet": _Kind(
        composer_loggers.CometMLLogger, "comet_ml", "comet_ml>=3.31.12,<4", "COMET_API_KEY"
    ),
    "neptune": _Kind(
        composer_loggers.NeptuneLogger, "neptune", "neptune>=1.6.2,<2", "NEPTUNE_API_TOKEN"
    ),
}


def check_loggers(recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Return the checked arguments of every logger in the recipe, except the file.

    ``UserError`` if an argument is unknown, of a wrong type or a secret, or a package is missing.
    """
    checked = {}
    for name, given in recipe.loggers:
        if given is None:
            continue
        kind = _KINDS[name]
        secret = _secret_in(given, f"loggers.{name}")
        if secret is not None:
            raise UserError(
                f"{secret} holds a secret, which would be written into recipe.yaml and into every "
                "checkpoint. Take it out of the recipe and set it in the environment"
                + (f": {kind.key}" if kind.key else "")
            )
        checked[name] = check_arguments(f"loggers.{name}", kind.made_by, given)
        if find_spec(kind.package) is None:
            raise UserError(
                f"loggers.{name} needs the package {kind.package}, which is not installed: "
                f"pip install '{kind.requirement}'"
            )
    return checked


def _secret_in(given: Any, key: str) -> str | None:
    """Return the dotted key of a password or of an API key in a logger's arguments, if any."""
    if isinstance(given, dict):
        pairs = ((f"{key}.{name}", value) for name, value in given.items())
        return next(filter(None, (_secret_in(value, name) for name, value in pairs)), None)
    if isinstance(given, list):
        return next(filter(None, (_secret_in(value, key) for value in given)), None)
    is_secret = _SECRET_NAME.search(key.rpartition(".")[2]) or _LOGIN.search(str(given))
    return key if given and is_secret else None


def build_metrics_file(recipe: Recipe) -> MetricsFile:
    """Return the file of metrics, which forwards every line to the recipe's other loggers."""
    folder, others = recipe.run_path(), {}
    for name, arguments in check_loggers(recipe).items():
        if name == "tensorboard" and arguments["log_dir"] is None:
            arguments["log_dir"] = str(folder / "tensorboard")
        try:
            others[name] = _KINDS[name].made_by(**arguments)
        except Exception as error:
            raise UserError(f"loggers.{name} cannot start: {error}") from error
    return MetricsFile(folder / "metrics.jsonl", recipe.trainer.log_interval, others)
