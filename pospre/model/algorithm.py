"""The base class of algorithms, and how they are found by name."""

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Mapping
from inspect import isabstract, signature
from typing import Any, ClassVar

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from pospre import algorithms
from pospre.arguments import check_arguments
from pospre.batch import Batch, numbered
from pospre.errors import UserError, suggestion
from pospre.external_class import load_class
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective
from pospre.model.optimizer_checks import check_held, unfrozen
from pospre.model.prepare import check_given
from pospre.model.progress import Progress, training_progress
from pospre.model.task_description import TaskDescription
from pospre.model.uses import Uses
from pospre.nn.encoder_interface import PatchEncoder

_FORWARDS = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD)


class PretrainAlgorithm(Algorithm):
    """A host or a position algorithm, as a Composer ``Algorithm``.

    It declares what it ``uses``, and the model composes all that do. Before each forward it sets
    its schedules and writes its draws into the batch. Its options are the fields of a dataclass.

    Attributes:
        pretext_task: the task that it sets the model, shown at the top of a run's page; None: none.
        objective: the class of its head and loss; None: it has no loss. Evaluations require a kind
            of objective, such as ``PositionObjective``.
        is_host: hosts come first: they choose the visible patches before others.
        takes_merged_patches: works with encoders whose tokens cover several patches (Swin).
    """

    pretext_task: ClassVar[TaskDescription | None] = None
    objective: ClassVar[type[Objective] | None] = None
    is_host: ClassVar[bool] = False
    takes_merged_patches: ClassVar[bool] = False
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
        """Return its name and those of the algorithms that it is derived from."""
        kinds = (kind for kind in cls.__mro__ if issubclass(kind, PretrainAlgorithm))
        return {kind.module_name() for kind in kinds if not isabstract(kind)}

    @classmethod
    def offers(cls, kind: type) -> bool:
        """Return whether it or its objective is a ``kind``."""
        return issubclass(cls, kind) or issubclass(cls.objective or object, kind)

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if its options do not fit one another, or this encoder.

        Here: it needs a token per patch, but the encoder merges patches.
        """
        if encoder.patches_per_token > 1 and not self.takes_merged_patches:
            able = [
                name for name in algorithm_names() if algorithm_class(name).takes_merged_patches
            ]
            raise UserError(
                f"algorithms.{self.module_name()} needs a token for every patch, but encoder.name "
                f"makes {encoder.timm_name}, which merges patches. Use a ViT. Only "
                f"{', '.join(able)} support merged patches."
            )

    @abstractmethod
    def uses(self, encoder: PatchEncoder) -> Uses:
        """Return what it declares; ``check_encoder`` has passed."""

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if it does not work beside the other algorithms of ``layout``."""
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

    def head(self, encoder: PatchEncoder, layout: Layout) -> Objective:
        """Return a new objective: by default the class ``objective`` of encoder and options."""
        assert self.objective is not None
        return self.objective(encoder, self)

    def content_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that changes embeddings in passes with ``edits_content``.

        Its ``forward(tokens, batch, where)`` gets the patches (rows, K, D) of the ``EncoderPass``
        ``where`` before positions are added, and returns them changed.
        """
        raise NotImplementedError

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that moves or forgets ``Places`` in passes with ``edits_places``."""
        raise NotImplementedError

    def mix(self, pixels_BVCHW: Tensor, batch: Batch, encoder: PatchEncoder) -> Tensor:
        """Return the views of the group whose ``g/pixels`` it declares, changed.

        In training; in evaluation too with ``Uses.mixes_always``.
        """
        raise NotImplementedError

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Write its keys into ``batch``: pure functions of seed, epoch and index."""
        return

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set what changes over training, in buffers to avoid recompilation; default: nothing."""
        return

    def match(self, event: Event, state: State) -> bool:
        """Run at the start of training and of epochs, before every forward, after every step."""
        starts = Event.INIT, Event.FIT_START, Event.EPOCH_START
        return event in (*starts, *_FORWARDS, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Check the model, prepare batches and follow steps; one algorithm acts for all."""
        ours = [each for each in state.algorithms if isinstance(each, PretrainAlgorithm)]
        if ours[0] is not self:
            return
        model = pretrain_model(state)
        if event == Event.INIT:
            check_given(model.layout, ours)
        elif event == Event.FIT_START:
            _start(model, state)
        elif event == Event.EPOCH_START:  # tensors may have been added or unfrozen since
            if not isinstance(model, FSDPModule):  # a forward may have left whole ones in it
                check_held(model, state.optimizers)
        elif event in _FORWARDS:
            if event == Event.BEFORE_FORWARD:  # evaluations use the training's progress
                self._progress = training_progress(state)
            number = state.timestamp.epoch.value
            state.batch = model.prepare(numbered(state.batch, epoch=number), self._progress)
        else:
            model.after_step(self._progress)


def _start(model: PretrainModel, state: State) -> None:
    """Check the model, its optimisers and our own loader before training."""
    model.loop_watch.start(model)
    if hasattr(state.dataloader, "check_ranks"):
        state.dataloader.check_ranks(dist.get_world_size())
        state.dataloader.check_augment(model.views)
    check_held(model, state.optimizers)
    for warning in unfrozen(model.layout, state.optimizers):
        model.loop_watch.warn(warning)


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
    raise UserError(f"algorithms: {module.__file__} defines no PretrainAlgorithm with uses.")


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
    loaded = load_class(address, "algorithms", "mylab.loca:LOCA")
    if not issubclass(loaded, PretrainAlgorithm):
        raise UserError(
            f"algorithms: '{address}' is not an algorithm; derive it from "
            "pospre.model.algorithm.PretrainAlgorithm."
        )
    if isabstract(loaded):
        lacks = " and ".join(sorted(loaded.__abstractmethods__))
        raise UserError(f"algorithms: '{address}' lacks {lacks}; implement all abstract methods.")
    return loaded
