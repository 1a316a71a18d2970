"""Requirements of methods, checked before one attaches and after all have.

Before: views, patches, other methods. After: no part is missing, and no answer leaks.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from pospre.batch import MASKED
from pospre.errors import UserError, suggestion
from pospre.model.objective import Predicts
from pospre.nn.positions import schemes_that

if TYPE_CHECKING:  # circular imports
    from pospre.model.model import PretrainModel
    from pospre.model.objective import Objective
    from pospre.model.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Requirements checked before a method attaches; ``teacher`` is checked after all have.

    Attributes:
        views: number of views per sample by view group; None: one or more.
        patches: patches of ``view`` that the encoder must get: ``all`` with their content;
            ``shown``, none replaced by a mask token; ``part``, some of them hidden. None: any.
        objective: another method's objective that this one edits or copies settings from, and that
            method's name.
        class_token: the option that needs a class token, such as ``lut.pool = class_token``; None.
        teacher: the option that uses another method's momentum teacher; None: no option does.
        heads: by part, such as ``decoder``: its width, and its attention heads, which must divide
            it.
        hint: the remedy at the end of errors about other methods.
    """

    views: Mapping[str, int | None] = field(default_factory=lambda: {"view": 1})
    patches: Literal["all", "shown", "part"] | None = None
    objective: tuple[type[Objective], str] | None = None
    class_token: str | None = None
    teacher: str | None = None
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hint: str = "Leave one of them out."


def check_needs(model: PretrainModel, owner: str, needs: Needs) -> None:
    """Raise ``UserError`` if the model does not meet ``owner``'s needs, before it attaches."""
    _check_company(model, owner, needs)
    for group, count in needs.views.items():
        found = model.registry.require_views(owner, group, count or 1).count
        if count is not None and found != count:
            views = "one view" if count == 1 else f"{count} views"
            raise UserError(
                f"algorithms.{owner} works on {views} of the group '{group}', but "
                f"data.views.{group}.count is {found}. Set it to {count}."
            )
    for part, (dim, heads) in needs.heads.items():
        _check_heads(owner, part, dim, heads)
    if needs.class_token is not None and not model.encoder.has_class_token:
        raise UserError(
            f"{needs.class_token} needs a class token, but encoder.class_token is false. Change "
            "one of them."
        )


def _check_heads(owner: str, part: str, dim: int, num_heads: int) -> None:
    """Raise ``UserError`` naming the algorithm ``owner`` if heads do not divide the width."""
    if dim % num_heads:
        raise UserError(
            f"{owner}.{part}_heads = {num_heads} does not divide {owner}.{part}_dim = {dim}. "
            "Choose a width that is a multiple of the number of heads."
        )


def _check_company(model: PretrainModel, owner: str, needs: Needs) -> None:
    """Raise ``UserError`` if attached methods hide the wrong patches, or a method is missing."""
    hidden, others = model.registry.hidden, ", ".join(model.objectives) or "nothing"
    if needs.objective is not None and not model.objectives.has(needs.objective[0]):
        raise UserError(
            f"algorithms.{owner} needs algorithms.{needs.objective[1]}, which is not listed before "
            f"it. {needs.hint}"
        )
    if needs.patches == "all" and hidden is not None:
        raise UserError(
            f"algorithms.{owner} needs every patch of 'view', but '{hidden.owner}' hides some of "
            f"them from the encoder. {needs.hint}"
        )
    masking = model.registry.writers.get(MASKED)
    if needs.patches == "shown" and masking is not None:
        raise UserError(
            f"algorithms.{owner} uses the patches that the encoder sees, but '{masking}' includes "
            "masked ones, which differ only by their positions. " + needs.hint
        )
    if needs.patches == "part" and hidden is None:
        raise UserError(
            f"algorithms.{owner} needs a view with hidden patches, but before it comes {others}, "
            f"which hides none of 'view'. {needs.hint}"
        )


def check_teacher(model: PretrainModel, needs: Needs) -> None:
    """Raise ``UserError`` if a method needs a teacher and no method provides one."""
    if needs.teacher is not None and model.teacher is None:
        raise UserError(
            f"{needs.teacher} uses another algorithm's momentum teacher, but there is none. Add "
            "lut or ema_teacher, or change the option."
        )


def check_complete(model: PretrainModel) -> None:
    """Raise ``UserError`` if no algorithm has a loss, or a part is unused."""
    if not len(model.objectives.named):
        raise UserError(
            "algorithms: none of those listed has a loss. Add a host, or another algorithm with a "
            "loss; pospre/algorithms/README.md lists them."
        )
    _check_read(model.registry, list(model.objectives))
    _check_editors(model.registry, {*model.contents.named}, {*model.places.named})
    check_places(model)
    for algorithm in model.algorithms:
        check_teacher(model, algorithm.needs(model.encoder))
        algorithm.check_company(model)


def _check_read(registry: Registry, objectives: list[str]) -> None:
    """Raise ``UserError`` for objectives without a pass, and views that nothing reads."""
    for name in objectives:
        if not any(name in readers for readers in registry.readers.values()):
            raise UserError(
                f"algorithms: the objective '{name}' reads no encoder pass. Its algorithm must "
                f"declare one (add_pass) or join another's (join_pass) under the name '{name}'."
            )
    read = {declared.group for declared in registry.passes.values()}
    for group in (name for name in registry.views if name not in read):
        raise UserError(
            f"data.views.{group} is not read by any algorithm listed; only "
            f"{', '.join(sorted(read))} is. Remove it, or add an algorithm that needs it."
        )


def check_places(model: PretrainModel) -> None:
    """Raise ``UserError`` if the encoder gets what an objective must predict."""
    registry = model.registry
    positions, source = registry.encoder.positions, registry.place_source
    for name in model.objectives:
        predicted = model.objectives[name].predicts
        if predicted is not None and predicted not in get_args(Predicts):
            raise UserError(
                f"algorithms.{name}: its objective has predicts = '{predicted}'."
                f"{suggestion(predicted, get_args(Predicts))}"
            )
        if name in registry.editors.values():
            if predicted is None:
                raise UserError(
                    f"algorithms.{name} changes the places of an encoder pass, so its "
                    "objective must say what it predicts: predicts = 'places', 'view_places' "
                    "or 'content' (see pospre/model/objective.py)."
                )
        elif predicted in ("places", "view_places") and source is not None:
            raise UserError(
                f"algorithms.{name} predicts places, but {source} gives the encoder the place "
                "of every patch, and thus the answer. Use one of the two, or hide those "
                "places with an editor of places, as droppos does."
            )
        elif predicted == "places" and positions.can_forget:
            raise UserError(
                f"algorithms.{name} predicts the places of patches, but encoder.positions = "
                f"{positions.name} gives them to the encoder. Set encoder.positions: "
                f"{schemes_that('can_forget', False)}; or hide them with an editor of places, "
                "as droppos does."
            )


def _check_editors(registry: Registry, contents: Container[str], places: Container[str]) -> None:
    """Raise ``UserError`` if a pass names an editor that the model does not have."""
    for name, declared in registry.passes.items():
        parts = (
            ("contents", declared.content, contents),
            ("places", declared.places, places),
        )
        for place, asked, added in parts:
            for editor in (each for each in asked if each not in added):
                raise UserError(
                    f"algorithms: the encoder pass '{name}' names the editor '{editor}' in its "
                    f"{place}, but model.{place}.named does not have it."
                )
