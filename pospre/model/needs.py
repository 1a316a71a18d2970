"""What a method requires of the model it attaches to, and the errors if it is missing."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pospre.batch import MASKED
from pospre.errors import UserError
from pospre.nn.decoder import check_heads

if TYPE_CHECKING:  # circular import
    from pospre.model.model import PretrainModel
    from pospre.model.objective import Objective


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
    objective: "tuple[type[Objective], str] | None" = None
    class_token: str | None = None
    teacher: str | None = None
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hint: str = "Leave one of them out."


def check_needs(model: "PretrainModel", owner: str, needs: Needs) -> None:
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
        check_heads(owner, part, dim, heads)
    if needs.class_token is not None and not model.encoder.has_class_token:
        raise UserError(
            f"{needs.class_token} needs a class token, but encoder.class_token is false. Change "
            "one of them."
        )


def _check_company(model: "PretrainModel", owner: str, needs: Needs) -> None:
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


def check_teacher(model: "PretrainModel", needs: Needs) -> None:
    """Raise ``UserError`` if a method needs a teacher and no method provides one."""
    if needs.teacher is not None and model.teacher is None:
        raise UserError(
            f"{needs.teacher} uses another algorithm's momentum teacher, but there is none. Add "
            "lut or ema_teacher, or change the option."
        )
