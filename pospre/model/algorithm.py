"""What an algorithm is: an attachment to the model plus what it writes into each batch."""

import importlib
import pkgutil
from abc import abstractmethod
from collections.abc import Sequence
from inspect import isabstract, signature
from typing import Any, ClassVar

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import nn

from pospre import algorithms
from pospre.batch import EPOCH, INDEX, Batch, loaded_keys, numbered, whole_numbers
from pospre.errors import UserError, suggestion
from pospre.model.model import PretrainModel
from pospre.model.optimizer_check import check_followed, check_optimized, check_stepped
from pospre.model.outside import is_outside, load_class
from pospre.model.progress import Progress, as_progress, training_progress
from pospre.model.question import Question
from pospre.nn.patch_encoder import PatchEncoder
from pospre.recipe.recipe import check_arguments

_FORWARDS = (Event.BEFORE_FORWARD, Event.EVAL_BEFORE_FORWARD, Event.PREDICT_BEFORE_FORWARD)


class PretrainAlgorithm(Algorithm):
    """A host or a position algorithm as a Composer ``Algorithm``.

    ``attach`` adds its modules before the optimiser is made, and does nothing the second time (at
    ``Event.INIT``). Before each forward it sets its schedules and writes its masks into the batch.
    Its options are the fields of a dataclass.

    Attributes:
        question: what it asks of a model, with which a run's page begins; None: nothing.
        is_host: hosts own the visible patches and attach first.
        gives_positions: it gives those of every pass, instead of the encoder's table.
        takes_merged_patches: works with encoders whose tokens stand for several patches (Swin).
    """

    question: ClassVar[Question | None] = None
    is_host: ClassVar[bool] = False
    gives_positions: ClassVar[bool] = False
    takes_merged_patches: ClassVar[bool] = False
    _progress: Progress = Progress(0.0, 0.0)

    def __post_init__(self) -> None:
        """Check the options as recipes are checked: this is for algorithms made in code."""
        given = {name: getattr(self, name) for name in signature(type(self)).parameters}
        checked = check_arguments(self.module_name(), type(self), given, source="algorithms")
        vars(self).update(checked)

    @classmethod
    def module_name(cls) -> str:
        """Return the name that recipes use: that of the module; of a class elsewhere its own."""
        home, _, name = cls.__module__.rpartition(".")
        return name if home.startswith(algorithms.__name__) else cls.__name__

    @classmethod
    def names(cls) -> set[str]:
        """Return its name, and those of the algorithms that it is made from."""
        kinds = (kind for kind in cls.__mro__ if issubclass(kind, PretrainAlgorithm))
        return {kind.module_name() for kind in kinds}

    @classmethod
    def for_classes(
        cls, arguments: dict[str, Any], classes: Sequence[str] | None, path: str
    ) -> dict[str, Any]:
        """Return the recipe's arguments, completed by what the training data says.

        Args:
            arguments: of the constructor, all of them.
            classes: names of the data's classes; None without labels.
            path: of the data, for errors.
        """
        return arguments

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if this needs a token for every patch and the encoder merges them."""
        if encoder.patches_per_token > 1 and not self.takes_merged_patches:
            able = [
                name for name in algorithm_names() if algorithm_class(name).takes_merged_patches
            ]
            raise UserError(
                f"algorithms.{self.module_name()} needs a token for every patch, but encoder.name "
                f"makes {encoder.timm_name}, which merges patches. Use a ViT; of all algorithms "
                f"only {', '.join(able)} take such an encoder."
            )

    @abstractmethod
    def attach(self, model: PretrainModel) -> None:
        """Add passes, objectives and position modules to ``model``; idempotent."""

    @abstractmethod
    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Write this algorithm's keys into ``batch``: pure functions of seed, epoch and index."""

    def schedule(self, model: PretrainModel, progress: Progress) -> None:
        """Set what changes over training, into buffers (no recompilation); nothing by default."""
        return

    def after_step(self, model: PretrainModel, progress: Progress) -> None:
        """Move the teacher if this algorithm's momentum counts; ``progress`` began the step."""
        if model.teachers.owner in self.names():
            model.teachers.update(progress.step)

    def couples_samples(self) -> str | None:
        """Return what of it looks at all samples of a forward at once, as a plural; None: nothing.

        The gradients of several microbatches, or of several ranks, are then not those of one batch.
        """
        return None

    def match(self, event: Event, state: State) -> bool:
        """Run at INIT, at the start of training, before every forward, and when a step is done."""
        return event in (Event.INIT, Event.FIT_START, *_FORWARDS, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Attach at INIT; check all at FIT_START; prepare each batch; then ``after_step``."""
        model = pretrain_model(state)
        if event == Event.INIT:
            self.check_encoder(model.encoder)
            self.attach(model)
        elif event == Event.FIT_START:
            model.check_complete()
            if hasattr(state.dataloader, "check_ranks"):  # a loader of ours
                state.dataloader.check_ranks(dist.get_world_size())
                state.dataloader.check_augment(model.views)
            _check_given(model, state.algorithms)
            check_optimized(model, state.optimizers)
        elif event in _FORWARDS:
            if event == Event.BEFORE_FORWARD:  # an evaluation is as far as the training is
                self._progress = training_progress(state)
            number = state.timestamp.epoch.value
            state.batch = numbered(state.batch, epoch=number)
            prepare(model, [self], state.batch, self._progress)
        else:
            self.after_step(model, self._progress)


def attach(
    model: PretrainModel, name: str | type[PretrainAlgorithm], **options: Any
) -> PretrainAlgorithm:
    """Attach the algorithm ``name`` to ``model``; call it before the optimiser is made.

    Args:
        model: the model; hosts first, then what joins them.
        name: as in recipes, see ``pospre/algorithms/README.md``; or a class of your own.
        options: the algorithm's, by the names that recipes use; the others have their defaults.

    Returns:
        The algorithm, for ``Trainer(algorithms=[...])`` or for ``prepare`` and ``after_step``.

    Raises:
        UserError: the algorithm or an option is unknown, it is attached already, or it cannot work
            with this model.
    """
    if not isinstance(model, PretrainModel):
        raise UserError(
            f"pospre.attach takes a PretrainModel, and got {type(model).__name__}: make one of the "
            "encoder, pospre.PretrainModel(pospre.wrap_encoder(vit), seed=0)."
        )
    kind = algorithm_class(name) if isinstance(name, str) else name
    if not isinstance(kind, type) or not issubclass(kind, PretrainAlgorithm):
        raise UserError(
            f"pospre.attach got {name!r}, and takes an algorithm's name, or a class of your own, "
            'and its options beside it: attach(model, "mae", mask_ratio=0.75).'
        )
    name = kind.module_name()
    if name in model.registry.attached:
        raise UserError(f"algorithms.{name} is attached to this model already; attach it once.")
    joining = [each for each, is_host in model.registry.attached.items() if not is_host]
    if kind.is_host and joining:
        raise UserError(
            f"algorithms.{name} is a host, and {joining[0]} is attached already, which joins what "
            f"it finds: attach {name} first, then {joining[0]}."
        )
    algorithm = kind(**check_arguments(name, kind, options, source="algorithms"))
    algorithm.check_encoder(model.encoder)
    algorithm.attach(model)
    model.check_places()
    model.to(next(model.encoder.parameters()).device)  # where the encoder was moved before
    model.registry.attached[name] = kind.is_host
    return algorithm


def prepare(
    model: nn.Module,
    algorithms: Sequence[PretrainAlgorithm],
    batch: Batch,
    progress: Progress | float,
) -> Batch:
    """Set the schedules and write the algorithms' draws into ``batch``, before a forward.

    Args:
        model: what they are attached to, or DDP's or ``torch.compile``'s wrapper around it.
        algorithms: in the order of their attachment.
        batch: see ``pospre.batch``, on the model's device; changed in place.
        progress: the share of the training that is done, in [0, 1).

    Returns:
        The batch, for ``model(batch)``.

    Raises:
        UserError: the batch has no ``index`` or ``epoch`` of whole numbers, or others had the same;
            ``progress`` is no share, an algorithm is missing, or stands before the one that it
            reads from; or the weights move without ``after_step``, which the teacher needs.
    """
    model = unwrapped(model)
    if not isinstance(progress, Progress):  # a loop without Composer
        _check_given(model, algorithms)
        if not model.is_prepared:
            for algorithm in algorithms:
                algorithm.attach(model)  # again, as under a Trainer: what came late is checked
            model.check_complete()
            model.is_prepared = True
        check_followed(model)
    for key in (INDEX, EPOCH):
        if key not in batch:
            raise UserError(
                f"the batch lacks '{key}', from which masks are drawn; pospre.build_loader writes "
                "it, and pospre.from_images(images, index=…, epoch=…)."
            )
        batch[key] = whole_numbers(batch[key], key)
    if model.training:
        model.number_check.look(batch)
    for algorithm in algorithms:
        algorithm.schedule(model, as_progress(progress))
        try:
            algorithm.write(batch, model)
        except KeyError as error:
            key = error.args[0]
            if key in batch or key not in (*model.registry.writers, *loaded_keys(model.views)):
                raise
            raise model.registry.lacking(key) from error
    return batch


def after_step(
    model: nn.Module, algorithms: Sequence[PretrainAlgorithm], progress: Progress | float
) -> None:
    """Move the teacher, if there is one, after the optimiser's step begun at ``progress``.

    Raises:
        UserError: an algorithm that is attached is not there, or some tensors hold a gradient that
            the optimiser's first step has not used.
    """
    model = unwrapped(model)
    _check_given(model, algorithms)
    model.is_followed = True
    check_stepped(model)
    for algorithm in algorithms:
        algorithm.after_step(model, as_progress(progress))


def _check_given(model: PretrainModel, algorithms: Sequence[Algorithm]) -> None:
    ours = [each for each in algorithms if isinstance(each, PretrainAlgorithm)]
    names = [each.module_name() for each in ours]
    for name in (each for each in names if names.count(each) > 1):
        raise UserError(f"algorithms.{name} is given twice; give each once.")
    left = [name for name in model.registry.attached if name not in names]
    if left:
        raise UserError(
            f"algorithms.{left[0]} is attached to the model, but not among the algorithms given; "
            "give all of them, in the order of their attachment."
        )
    owner = model.teachers.owner
    if owner is not None and not any(owner in each.names() for each in ours):
        raise UserError(
            f"algorithms: the teacher is that of '{owner}', and none of those given has this name "
            f"({', '.join(names)}), so that nothing would move it. Give all of them; one of your "
            "own asks for it as model.add_teacher(self.module_name(), …)."
        )


def pretrain_model(state: State) -> PretrainModel:
    """Return the model of a Composer state, out of its DDP wrapper if it has one."""
    return unwrapped(state.model)


def unwrapped(model: nn.Module) -> PretrainModel:
    """Return a model out of the wrapper of DDP or of ``torch.compile``, if it has one."""
    own = getattr(model, "module", model)
    own = getattr(own, "_orig_mod", own)
    if not isinstance(own, PretrainModel):
        raise UserError(
            "pospre's algorithms and layer_decay are for a PretrainModel, the one that is trained, "
            f"and got {type(own).__name__}."
        )
    return own


def require_one_view(model: PretrainModel, owner: str, group: str) -> None:
    """Raise ``UserError`` unless ``group`` is there and holds exactly one view per sample."""
    count = model.registry.require_views(owner, group).count
    if count != 1:
        raise UserError(
            f"algorithms.{owner} works on one view of the group '{group}', but "
            f"data.views.{group}.count is {count}. Set it to 1."
        )


def algorithm_names() -> list[str]:
    """Return the names of all algorithms: the modules and folders of ``pospre.algorithms``."""
    return sorted(module.name for module in pkgutil.iter_modules(algorithms.__path__))


def algorithm_class(name: str) -> type[PretrainAlgorithm]:
    """Return the algorithm that recipes call ``name``.

    Args:
        name: of the module ``pospre.algorithms.<name>``, or ``<name>.<name>``; or
            ``package.module:Class``, a class of another package.

    Raises:
        UserError: there is no such module, or no algorithm in it.
    """
    if is_outside(name):
        return _outside_class(name)
    if name not in algorithm_names():
        own = " A class of yours is package.module:Class." if "." in name else ""
        near = suggestion(name, algorithm_names())
        raise UserError(f"algorithms: '{name}' is not known.{own}{near}")
    module = importlib.import_module(f"{algorithms.__name__}.{name}")
    if hasattr(module, "__path__"):  # a folder has the method in the module of its own name
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
        f"algorithms: {module.__file__} defines no PretrainAlgorithm that has attach and write."
    )


def _outside_class(address: str) -> type[PretrainAlgorithm]:
    """Return the algorithm ``package.module:Class``."""
    found = load_class(address)
    if not issubclass(found, PretrainAlgorithm):
        raise UserError(
            f"algorithms: '{address}' is no algorithm; derive it from "
            "pospre.model.algorithm.PretrainAlgorithm."
        )
    if isabstract(found):
        lacks = " and ".join(sorted(found.__abstractmethods__))
        raise UserError(f"algorithms: '{address}' lacks {lacks}; write every method that it names.")
    return found
