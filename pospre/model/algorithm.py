"""The base class of algorithms: an attachment to the model, and the keys it writes per batch."""

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from inspect import isabstract, signature
from typing import Any, ClassVar

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pospre import algorithms
from pospre.arguments import check_arguments
from pospre.batch import Batch, numbered
from pospre.errors import UserError, suggestion
from pospre.model.attached import (
    Progress,
    attach_algorithm,
    check_given,
    training_progress,
    write_draws,
)
from pospre.model.external_class import UntrustedClass, load_class
from pospre.model.loop_checks import check_held, check_optimized
from pospre.model.model import PretrainModel
from pospre.model.needs import Needs
from pospre.model.objective import Objective
from pospre.model.task_description import TaskDescription
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.vit import Encoder

_FORWARDS = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD)


class PretrainAlgorithm(Algorithm):
    """A host or a position algorithm, as a Composer ``Algorithm``.

    Its ``needs`` are checked first. Then ``attach`` adds its modules, once, before the optimiser is
    made. Before each forward it sets its schedules and writes its masks into the batch. Its options
    are the fields of a dataclass.

    Attributes:
        pretext_task: the task that it sets the model, shown at the top of a run's page; None: none.
        objective: the class that it adds to ``model.objectives``. Evaluations require a kind of
            objective, such as ``PositionObjective``; None: no evaluation needs it.
        is_host: hosts choose the visible patches and attach first.
        takes_merged_patches: works with encoders whose tokens cover several patches (Swin).
        half_residual: the published code keeps tokens in half precision between blocks. Runs under
            amp_bf16 then keep them in bf16, unless ``trainer.residual`` overrides it.
    """

    pretext_task: ClassVar[TaskDescription | None] = None
    objective: ClassVar[type[Objective] | None] = None
    is_host: ClassVar[bool] = False
    takes_merged_patches: ClassVar[bool] = False
    half_residual: ClassVar[bool] = False
    _progress: Progress = Progress(0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the options of algorithms made in code, as recipes are checked."""
        given = {name: getattr(self, name) for name in signature(type(self)).parameters}
        checked = check_arguments(self.module_name(), type(self), given, source="algorithms")
        vars(self).update(checked)

    @classmethod
    def module_name(cls) -> str:
        """Return the name used in recipes: the module's, or an outside class's own."""
        home, _, name = cls.__module__.rpartition(".")
        return name if home.startswith(algorithms.__name__) else cls.__name__

    @classmethod
    def names(cls) -> set[str]:
        """Return its name and those of the algorithms it consists of."""
        kinds = (kind for kind in cls.__mro__ if issubclass(kind, PretrainAlgorithm))
        return {kind.module_name() for kind in kinds}

    @classmethod
    def offers(cls, kind: type) -> bool:
        """Return whether it or its objective is a ``kind``."""
        return issubclass(cls, kind) or issubclass(cls.objective or object, kind)

    @classmethod
    def for_classes(
        cls, arguments: dict[str, Any], classes: Sequence[str] | None, path: str
    ) -> dict[str, Any]:
        """Return the recipe's arguments, completed from the training data.

        Args:
            arguments: all arguments of the constructor.
            classes: names of the data's classes; None: no labels.
            path: path of the data, for errors.
        """
        return arguments

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if it needs a token per patch but the encoder merges patches."""
        if encoder.patches_per_token > 1 and not self.takes_merged_patches:
            able = [
                name for name in algorithm_names() if algorithm_class(name).takes_merged_patches
            ]
            raise UserError(
                f"algorithms.{self.module_name()} needs a token for every patch, but encoder.name "
                f"makes {encoder.timm_name}, which merges patches. Use a ViT. Only "
                f"{', '.join(able)} support merged patches."
            )

    def needs(self, encoder: Encoder) -> Needs:
        """Return the requirements checked before it attaches; by default one view of ``view``."""
        return Needs()

    @abstractmethod
    def attach(self, model: PretrainModel) -> None:
        """Check the options, and add passes, objectives and position modules to ``model``."""

    def check_company(self, model: PretrainModel) -> None:
        """Raise ``UserError`` if it cannot work with another attached algorithm.

        Called before ``attach``, and again when all algorithms are attached.
        """
        return

    def check_used(self, option: str, used: bool, other: str) -> None:
        """Raise ``UserError`` if an option is set, but has no effect.

        Args:
            option: the option's name.
            used: whether it has an effect.
            other: the option that disables it, or another reason in words.
        """
        value, name = getattr(self, option), self.module_name()
        if used or value == getattr(type(self), option):
            return
        reason = f"{name}.{other} = {getattr(self, other)}" if hasattr(self, other) else other
        raise UserError(
            f"{name}.{option} = {value} has no effect with {reason}. Remove it, or change the "
            "latter."
        )

    @abstractmethod
    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Write this algorithm's keys into ``batch``: pure functions of seed, epoch and index."""

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set what changes over training, in buffers to avoid recompilation; default: nothing."""
        return

    def after_step(self, model: PretrainModel, progress: Progress) -> None:
        """Update the objectives' statistics, and the teacher if this algorithm owns it.

        ``progress`` is that before the step.
        """
        for name in model.objectives:  # all of them: the teacher also follows statistics
            model.objectives[name].after_step()
        if model.teachers.owner in self.names():
            model.teachers.update(progress.step)

    def couples_samples(self) -> str | None:
        """Name the part that couples the samples of a batch, as a plural; None: no part does.

        Gradients accumulated over microbatches or ranks then differ from those of one batch.
        """
        return None

    def match(self, event: Event, state: State) -> bool:
        """Run at the start of training and of epochs, before every forward, after every step."""
        starts = Event.INIT, Event.FIT_START, Event.EPOCH_START
        return event in (*starts, *_FORWARDS, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Attach at INIT, check all at FIT_START, prepare each batch, then call ``after_step``."""
        model = pretrain_model(state)
        if event == Event.INIT:
            attach_algorithm(model, self)
        elif event == Event.FIT_START:
            model.loop_watch.start(model)
            if hasattr(state.dataloader, "check_ranks"):  # our own loader
                state.dataloader.check_ranks(dist.get_world_size())
                state.dataloader.check_augment(model.views)
            check_given(model, state.algorithms)
            check_optimized(model, state.optimizers)
        elif event == Event.EPOCH_START:  # tensors may have been added or unfrozen since
            if not isinstance(model, FSDPModule):  # a forward may have left whole ones in it
                check_held(model, state.optimizers)
        elif event in _FORWARDS:
            if event == Event.BEFORE_FORWARD:  # evaluations use the training's progress
                self._progress = training_progress(state)
            number = state.timestamp.epoch.value
            state.batch = numbered(state.batch, epoch=number)
            write_draws(model, [self], state.batch, self._progress)
        else:
            self.after_step(model, self._progress)


def attach(
    model: PretrainModel, name: str | type[PretrainAlgorithm], **options: Any
) -> PretrainAlgorithm:
    """Attach the algorithm ``name`` to an existing model: before the optimiser, hosts first.

    Args:
        model: the model.
        name: its name in recipes, see ``pospre/algorithms/README.md``; or your own class.
        options: the algorithm's options, named as in recipes; others keep their defaults.

    Returns:
        The algorithm, also listed in ``model.algorithms``.

    Raises:
        UserError: the algorithm or an option is unknown, it is already attached, or it cannot work
            with this model.
    """
    if not isinstance(model, PretrainModel):
        raise UserError(
            f"pospre.attach takes a PretrainModel, not {type(model).__name__}. Make one from the "
            "encoder: pospre.PretrainModel(vit, [pospre.MAE()], seed=0)."
        )
    kind = algorithm_class(name) if isinstance(name, str) else name
    if not isinstance(kind, type) or not issubclass(kind, PretrainAlgorithm):
        raise UserError(
            f"pospre.attach takes an algorithm's name or your own class, not {name!r}, and options "
            'as keywords: attach(model, "mae", mask_ratio=0.75).'
        )
    key = kind.module_name()
    algorithm = kind(**check_arguments(key, kind, options, source="algorithms"))
    attach_algorithm(model, algorithm)
    return algorithm


def pretrain_model(state: State) -> PretrainModel:
    """Return the model of a Composer state, without its DDP wrapper."""
    return unwrapped(state.model)


def unwrapped(model: nn.Module) -> PretrainModel:
    """Return a model without the wrapper of DDP or ``torch.compile``."""
    own = getattr(model, "module", model)
    own = getattr(own, "_orig_mod", own)
    if not isinstance(own, PretrainModel):
        raise UserError(
            "pospre's algorithms and layer_decay need the PretrainModel that is trained, not "
            f"{type(own).__name__}."
        )
    return own


def algorithm_names() -> list[str]:
    """Return the names of all algorithms: modules and folders of ``pospre.algorithms``."""
    return sorted(module.name for module in pkgutil.iter_modules(algorithms.__path__))


def algorithm_class(name: str) -> type[PretrainAlgorithm]:
    """Return the algorithm's class by its name in recipes.

    Args:
        name: of the module ``pospre.algorithms.<name>`` or ``<name>.<name>``; or
            ``package.module:Class`` for a class of another package.

    Raises:
        UserError: there is no such module, or it has no algorithm.
    """
    if ":" in name:
        return _outside_class(name)
    if name not in algorithm_names():
        own = " Write your own class as package.module:Class." if "." in name else ""
        near = suggestion(name, algorithm_names())
        raise UserError(f"algorithms: '{name}' is not known.{own}{near}")
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    if hasattr(module, "__path__"):  # a folder holds the method in the module of the same name
        module = importlib.import_module(f"{module.__name__}.{name}")
    for member in vars(module).values():
        if (
            isinstance(member, type)
            and issubclass(member, PretrainAlgorithm)
            and member.__module__ == module.__name__
            and not isabstract(member)
        ):
            return member
    raise UserError(
        f"algorithms: {module.__file__} defines no PretrainAlgorithm with attach and write."
    )


def untrusted_classes(algorithms: Iterable[str]) -> dict[str, UserError]:
    """Return what is said of each algorithm that ``pospre.trust`` keeps from being imported."""
    found: dict[str, UserError] = {}
    for name in algorithms:
        try:
            algorithm_class(name)
        except UntrustedClass as error:
            found[name] = error
    return found


def method_of(
    algorithms: Mapping[str, dict[str, Any]], kind: type
) -> tuple[str, dict[str, Any]] | None:
    """Return the name and options of the first algorithm of a recipe that offers ``kind``.

    Args:
        algorithms: the recipe's.
        kind: see ``PretrainAlgorithm.offers``.

    Returns:
        None where there is none.
    """
    return next(
        (each for each in algorithms.items() if algorithm_class(each[0]).offers(kind)), None
    )


def _outside_class(address: str) -> type[PretrainAlgorithm]:
    """Return the class of ``package.module:Class``."""
    found = load_class(address)
    if not issubclass(found, PretrainAlgorithm):
        raise UserError(
            f"algorithms: '{address}' is not an algorithm; derive it from "
            "pospre.model.algorithm.PretrainAlgorithm."
        )
    if isabstract(found):
        lacks = " and ".join(sorted(found.__abstractmethods__))
        raise UserError(f"algorithms: '{address}' lacks {lacks}; implement all abstract methods.")
    return found
