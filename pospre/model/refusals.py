"""What ``compose`` refuses, with the remedy in the words of recipes."""

from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from pospre.batch import MASKED
from pospre.errors import UserError, suggestion
from pospre.model import reference
from pospre.model.layout import Layout
from pospre.model.passes import EncoderPass
from pospre.model.uses import Method, Pass, Predicts, Uses
from pospre.nn.places import Places
from pospre.nn.positions import schemes_that


def check_list(methods: Sequence[Method]) -> None:
    """Raise ``UserError`` for what is no method, and for one that is listed twice."""
    for method in methods:
        if not hasattr(method, "module_name") or isinstance(method, type):
            raise UserError(
                f"PretrainModel got {method!r} as an algorithm; make algorithms with their "
                "options, such as [pospre.MAE(mask_ratio=0.75), pospre.DropPos(weight=0.05)]."
            )
    names = [each.module_name() for each in methods]
    for name in (each for each in names if names.count(each) > 1):
        raise UserError(f"algorithms.{name} is given twice; give it once.")


def check_one(names: Sequence[str], what: str) -> None:
    """Raise ``UserError`` if different methods do ``what``, which only one may."""
    different = sorted(set(names))
    if len(different) > 1:
        raise UserError(f"algorithms: {' and '.join(different)} both {what}. Use one of them.")


def check_needs(layout: Layout) -> None:
    """Raise ``UserError`` if a method lacks another one, views, or a class token."""
    for name, uses in layout.uses.items():
        if uses.on is not None and layout.named(uses.on) is None:
            raise UserError(f"algorithms.{name} needs algorithms.{uses.on}. {uses.hint}")
        for group, count in uses.views.items():
            _check_views(layout, name, group, count)
        for part, (dim, heads) in uses.widths.items():
            if dim % heads:
                raise UserError(
                    f"{name}.{part}_heads = {heads} does not divide {name}.{part}_dim = {dim}. "
                    "Choose a width that is a multiple of the number of heads."
                )
        read = [each.class_token for each in uses.passes.values() if each.class_token is not None]
        if read and not layout.encoder.has_class_token:
            raise UserError(
                f"{read[0]} needs a class token, but encoder.class_token is false. Change one of "
                "them."
            )
        if uses.predicts is not None and uses.predicts not in get_args(Predicts):
            raise UserError(
                f"algorithms.{name} declares predicts = '{uses.predicts}'."
                f"{suggestion(uses.predicts, get_args(Predicts))}"
            )


def _check_views(layout: Layout, name: str, group: str, count: int | None) -> None:
    """Raise ``UserError`` unless there is this view group, of the right count and size."""
    check_group_exists(layout, name, group, count or 1)
    needed, size = layout.views[group], layout.encoder.image_size
    if count is not None and needed.count != count:
        views = "one view" if count == 1 else f"{count} views"
        raise UserError(
            f"algorithms.{name} works on {views} of the group '{group}', but "
            f"data.views.{group}.count is {needed.count}. Set it to {count}."
        )
    if group == "view" and needed.shape != size:
        raise UserError(
            f"data.views.view.size = {list(needed.shape)}, but algorithms.{name} needs the whole "
            f"grid of encoder.image_size = {list(size)}. Remove the size."
        )


def check_group_exists(layout: Layout, name: str, group: str, count: int = 1) -> None:
    """Raise ``UserError`` if the batches have no such view group."""
    if group not in layout.views:
        raise UserError(
            f"algorithms.{name} needs the view group '{group}', but data.views has "
            f"{', '.join(layout.views)}. Add data.views.{group} with count: {count}."
        )


def check_seen(layout: Layout) -> None:
    """Raise ``UserError`` if the encoder cannot hide patches so, or a method needs others."""
    hides, hider, encoder = layout.hides, layout.hider, layout.encoder
    if hides is not None and hides.left_out:
        if hides.visible is not None and not encoder.takes(hides.visible):
            raise UserError(
                f"algorithms.{hider} leaves {hides.visible} patches visible, but "
                f"{encoder.timm_name} needs a square of them. Use mask_ratio: 0.75 with "
                "sampling: uniform."
            )
    elif hides is not None and not encoder.positions.can_forget:
        raise UserError(
            f"algorithms.{hider} masks patches, which then differ by their places alone, but "
            f"encoder.positions = {encoder.positions.name} has none: all would be predicted "
            f"alike. Use {schemes_that('can_forget')}."
        )
    masking = layout.writers.get(MASKED)
    for name, uses in layout.uses.items():
        if uses.sees == "all" and hider not in (None, name):
            raise UserError(
                f"algorithms.{name} needs every patch of 'view', but '{hider}' hides some of them "
                f"from the encoder. {uses.hint}"
            )
        if uses.sees == "shown" and masking not in (None, name):
            raise UserError(
                f"algorithms.{name} uses the patches that the encoder sees, but '{masking}' "
                f"includes masked ones, which differ only by their positions. {uses.hint}"
            )
        if uses.sees == "part" and hides is None:
            others = ", ".join(each for each in layout.methods if each != name)
            none = f"{others} hide{'' if ',' in others else 's'} none" if others else "none is"
            raise UserError(
                f"algorithms.{name} needs a view with hidden patches, but {none} of 'view'. "
                f"{uses.hint}"
            )


def check_options(layout: Layout) -> None:
    """Raise ``UserError`` for options that have no effect beside another method.

    These are of a method that would hide patches if no host did, or would have a teacher.
    """
    host = f"the host {layout.hider}, which chooses the visible patches"
    for name, uses in layout.uses.items():
        method = layout.methods[name]
        for option in uses.hides.options if uses.hides and name != layout.hider else ():
            method.check_used(option, False, host)
        for option in ("momentum_start", "momentum_end") if name != layout.teacher else ():
            if uses.teacher is not None and hasattr(method, option):
                method.check_used(option, False, f"the teacher of {layout.teacher}")


def check_group(layout: Layout, method: str, name: str, own: Pass) -> None:
    """Raise ``UserError`` if the views or the positions do not allow this pass of ``method``."""
    check_group_exists(layout, method, own.group)
    if own.reference:
        reference.check_pass(layout, method, name, own)
        return
    if own.or_all and own.group == "view":
        _check_views(layout, method, "view", None)
    positions, grid = layout.encoder.positions, layout.grid(own.group)
    if grid != layout.encoder.grid and not positions.takes_any_grid:
        raise UserError(
            f"algorithms.{method}: encoder.positions = {positions.name} supports only the grid of "
            f"encoder.image_size, but the views of data.views.{own.group} have another one. Use "
            f"{schemes_that('takes_any_grid')}."
        )
    if own.edits_places and not positions.can_forget:
        raise UserError(
            f"algorithms.{method} changes the places of patches in the pass '{name}', but "
            f"encoder.positions = {positions.name} has none to change. Use "
            f"{schemes_that('can_forget')}."
        )


def check_unmixed(layout: Layout, method: str) -> None:
    """Raise ``UserError`` if 'view', which ``method`` compares with other views, is mixed."""
    if (mixer := layout.writers.get("view/pixels")) is not None:
        raise UserError(
            f"algorithms.{method} compares views of one image, but {mixer} mixes images in "
            f"'view'. Turn its mixing off, or leave {method} out."
        )


def check_joined(passes: Mapping[str, EncoderPass], method: str, name: str) -> None:
    """Raise ``UserError`` if no method runs the pass that ``method`` joins."""
    if name not in passes:
        declared = ", ".join(f"'{known}'" for known in passes) or "none"
        raise UserError(
            f"algorithms.{method} joins the encoder pass '{name}', which no method listed runs; "
            f"there is {declared}. Add a method that runs it."
        )


def check_same(name: str, before: EncoderPass, method: str, laid: EncoderPass) -> None:
    """Raise ``UserError`` if two methods would encode different tokens in one pass."""
    if _tokens(before) != _tokens(laid):
        other = ", or change the host's mask_ratio: some hosts can either hide patches or show all"
        raise UserError(
            f"algorithms: {' and '.join(before.readers)} encodes {_tokens(before)}, but {method} "
            f"{_tokens(laid)}, and both read the pass '{name}'. Use one of them"
            f"{other if before.group == laid.group and not laid.teacher else ''}."
        )


def _tokens(laid: EncoderPass) -> str:
    """Return in words which tokens a pass encodes."""
    words = "every patch" if laid.visible is None else f"the patches of '{laid.visible}' alone"
    words += f" of '{laid.group}'" if laid.visible is None else ""
    words += f", with keys from '{laid.context}' alone" if laid.context else ""
    words += " in the teacher" if laid.teacher else ""
    words += " in the reference" if laid.reference else ""
    return words if laid.grad else f"{words}, without gradient"


def teacher_owner(layout: Layout) -> str | None:
    """Return the method that has the teacher: a host, else an average, else another method.

    Raises:
        UserError: a momentum is out of range, a teacher is missing, or an average has no use.
    """
    having = {name: each.teacher for name, each in layout.uses.items() if each.teacher is not None}
    for name, momentum in having.items():
        momentum.check(name)
    hosts = [name for name in having if layout.methods[name].is_host]
    averages = [name for name in having if layout.uses[name].averages]
    if averages and len([*hosts, *averages]) > 1:
        first, *_, idle = *hosts, *averages
        raise UserError(
            f"algorithms: {first} has a teacher of its own, so {idle} has nothing to do. Remove "
            "one of them."
        )
    owner: str | None = next(iter((*hosts, *averages, *having)), None)
    taught = [each.readers[0] for each in layout.passes.values() if each.teacher]
    if taught and owner is None:
        raise UserError(
            f"algorithms.{taught[0]} uses a momentum teacher, but there is none. Add ema_teacher, "
            "or set the momentum_start of a method that has one (0.996 is usual)."
        )
    return owner


def check_complete(layout: Layout) -> None:
    """Raise ``UserError`` if there is no loss, a part is unused, or the encoder gets an answer."""
    having = [name for name, each in layout.methods.items() if each.objective is not None]
    if not having:
        raise UserError(
            f"algorithms: none of those listed ({', '.join(layout.methods)}) has a loss. Add a "
            "host, or another algorithm with a loss; pospre/algorithms/README.md lists them."
        )
    read = {laid.group for laid in layout.passes.values()}
    for name in having:
        wanted = sorted({each.group for each in layout.uses[name].passes.values()})
        if not any(name in laid.readers for laid in layout.passes.values()):
            if wanted:
                raise UserError(
                    f"algorithms.{name} reads one of the view groups {' and '.join(wanted)}, but "
                    f"data.views has {', '.join(layout.views)}. Name one of them so."
                )
            raise UserError(
                f"algorithms.{name} has a loss, but reads no pass of the encoder. Declare one in "
                'its uses: passes={"student": Pass()}.'
            )
    around = {layout.views[group].inside for group in read}  # boxes of others lie in them
    for group in (each for each in layout.views if each not in read | around):
        raise UserError(
            f"data.views.{group} is not read by any algorithm listed; only "
            f"{', '.join(sorted(read))} is. Remove it, or add an algorithm that needs it."
        )
    if layout.reference is not None and not any(p.reference for p in layout.passes.values()):
        raise UserError(
            "reference: none of the algorithms listed reads it. Remove it, or add one that does, "
            "such as gram or distill."
        )
    _check_placer(layout)
    for name, laid in layout.passes.items():
        check_one(laid.places, f"change the places of the encoder pass '{name}'")
    for name, uses in layout.uses.items():
        _check_answer(layout, name, uses)


def _check_placer(layout: Layout) -> None:
    """Raise ``UserError`` if views are placed, but the positions do not take boxes."""
    positions, placer = layout.encoder.positions, layout.placer
    if placer is None:
        return
    if not positions.takes_boxes:
        known = "only whole cells of one grid" if positions.can_forget else "no places"
        raise UserError(
            f"algorithms.{placer} places views anywhere in the image, but encoder.positions = "
            f"{positions.name} supports {known}. Use {schemes_that('takes_boxes')}."
        )
    # options of a scheme may refuse boxes, too
    positions.check(Places(layout.encoder.grid).within(torch.tensor([[0.0, 0.0, 1.0, 1.0]])))


def _check_answer(layout: Layout, name: str, uses: Uses) -> None:
    """Raise ``UserError`` if the encoder gets what the method ``name`` predicts."""
    positions, placer = layout.encoder.positions, layout.placer
    if any(name in laid.places for laid in layout.passes.values()):
        if uses.predicts is None:
            raise UserError(
                f"algorithms.{name} changes the places of an encoder pass, so its uses must say "
                "what it predicts: predicts='places', 'view_places' or 'content' (see "
                "pospre/model/uses.py)."
            )
    elif uses.predicts in ("places", "view_places") and placer is not None:
        raise UserError(
            f"algorithms.{name} declares predicts='{uses.predicts}', but {placer} gives the "
            "encoder the place of every patch, and thus the answer. Use one of the two, or hide "
            "those places with an editor of places, as droppos does."
        )
    elif uses.predicts == "places" and positions.can_forget:
        raise UserError(
            f"algorithms.{name} predicts the places of patches, but encoder.positions = "
            f"{positions.name} gives them to the encoder. Set encoder.positions: "
            f"{schemes_that('can_forget', False)}; or hide them with an editor of places, as "
            "droppos does."
        )
