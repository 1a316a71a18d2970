"""What a method needs of the model that it attaches to, and the errors where it is not there."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pospre.batch import MASKED
from pospre.errors import UserError
from pospre.nn.decoder import check_heads

if TYPE_CHECKING:  # the model asks for this when a method attaches
    from pospre.model.model import PretrainModel
    from pospre.model.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What must be there before a method attaches, and with ``teacher`` when all have.

    Attributes:
        views: by view group, how many views of each sample; None: one or more.
        patches: of ``view``, those that the encoder must get: ``all``, with their content;
            ``shown``, none of them behind a mask token; ``part``, some being hidden. None: any.
        objective: of another method, which this one edits or takes its settings from; and the
            name of that method.
        class_token: the option that needs one, such as ``lut.pool = class_token``; None: none does.
        teacher: the option that takes the momentum teacher of another method; None: none does.
        heads: by part, such as ``decoder``, its width and its attention heads, which divide it.
        hint: how else to do it, which ends the errors about other methods.
    """

    views: Mapping[str, int | None] = field(default_factory=lambda: {"view": 1})
    patches: Literal["all", "shown", "part"] | None = None
    objective: "tuple[type[Objective], str] | None" = None
    class_token: str | None = None
    teacher: str | None = None
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    hint: str = "Leave one of them out."


def check_needs(model: "PretrainModel", owner: str, needs: Needs) -> None:
    """Raise ``UserError`` if the model lacks what ``owner`` needs, before it attaches."""
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
            f"{needs.class_token} needs a class token, but encoder.class_token is false. Set one "
            "of them the other way."
        )


def _check_company(model: "PretrainModel", owner: str, needs: Needs) -> None:
    """Raise ``UserError`` if those attached before hide too much, too little, or are not there."""
    hidden, others = model.registry.hidden, ", ".join(model.objectives) or "nothing"
    if needs.objective is not None and not model.objectives.has(needs.objective[0]):
        raise UserError(
            f"algorithms.{owner} needs algorithms.{needs.objective[1]}, which is not listed before "
            f"it. {needs.hint}"
        )
    if needs.patches == "all" and hidden is not None:
        raise UserError(
            f"algorithms.{owner} is about every patch of 'view', but '{hidden.owner}' hides some "
            f"of them from the encoder. {needs.hint}"
        )
    masking = model.registry.writers.get(MASKED)
    if needs.patches == "shown" and masking is not None:
        raise UserError(
            f"algorithms.{owner} is about the patches that the encoder sees, but '{masking}' gives "
            "it masked ones as well, which only their positions tell apart. " + needs.hint
        )
    if needs.patches == "part" and hidden is None:
        raise UserError(
            f"algorithms.{owner} is about a view of which some patches are hidden, but before it "
            f"there is {others}, which hides none of 'view'. {needs.hint}"
        )


def check_teacher(model: "PretrainModel", needs: Needs) -> None:
    """Raise ``UserError`` if no method has brought the teacher that one takes."""
    if needs.teacher is not None and model.teacher is None:
        raise UserError(
            f"{needs.teacher} takes another algorithm's momentum teacher, and none has one. Add "
            "lut or ema_teacher, or change the option."
        )
