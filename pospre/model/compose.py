"""How methods become one model: ``compose`` lays out what they declare, or refuses it.

Pure functions, which need no weights. The order in which methods are listed decides nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pospre.batch import HIDDEN, MASKED, VISIBLE
from pospre.data.views.options import ViewGroup
from pospre.model import refusals
from pospre.model.layout import Layout
from pospre.model.passes import EncoderPass
from pospre.model.uses import ALL, SEEN, Method, Pass, Uses
from pospre.nn.encoder_interface import PatchEncoder


def compose(
    methods: Sequence[Method],
    encoder: PatchEncoder,
    views: Mapping[str, ViewGroup],
    reference: PatchEncoder | None = None,
) -> Layout:
    """Lay out the passes of these methods, in any order.

    Args:
        methods: the methods, with their options.
        encoder: the encoder, of whose weights nothing is read.
        views: the view groups by name.
        reference: the frozen encoder, if there is one.

    Raises:
        UserError: they do not work together, or not with this encoder or these views.
    """
    refusals.check_list(methods)
    named = {each.module_name(): each for each in sorted(methods, key=lambda m: m.module_name())}
    for method in named.values():
        method.check_encoder(encoder)
    uses = {name: method.uses(encoder) for name, method in named.items()}
    hider = _hider(named, uses)
    order = sorted(
        named,
        key=lambda name: (
            not named[name].is_host,
            name != hider,
            uses[name].places_views,
            uses[name].on is not None,
        ),
    )
    layout = Layout(
        encoder,
        views,
        reference,
        methods={name: named[name] for name in order},
        uses={name: uses[name] for name in order},
        hider=hider,
        placer=next((name for name in order if uses[name].places_views), None),
    )
    if not named:
        return layout
    refusals.check_needs(layout)
    writers, captions = _keys(layout)
    layout = replace(layout, writers=writers, captions=captions)
    refusals.check_seen(layout)
    layout = replace(layout, passes=_passes(layout))
    layout = replace(layout, teacher=refusals.teacher_owner(layout))
    refusals.check_complete(layout)
    refusals.check_options(layout)
    for method in layout.methods.values():
        method.check(layout)
    return layout


def _hider(methods: Mapping[str, Method], uses: Mapping[str, Uses]) -> str | None:
    """Return the method that hides patches of ``view``: a host before others."""
    hiding = {name: each.hides for name, each in uses.items() if each.hides is not None}
    firm = [name for name, hides in hiding.items() if not hides.unless_host]
    refusals.check_one(firm, "hide patches of 'view'")
    others = [name for name in hiding if name not in firm]
    if not firm:
        refusals.check_one(others, "hide patches of 'view'")
    return next(iter((*firm, *others)), None)


def _keys(layout: Layout) -> tuple[dict[str, str], dict[str, str]]:
    """Return the writer of each batch key, and the captions of those that mark patches."""
    writers: dict[str, str] = {}
    captions: dict[str, str] = {}
    for name, uses in layout.uses.items():
        keys = dict(uses.keys)
        hides = layout.hides if name == layout.hider else None
        if hides is not None:
            left = "hidden from the encoder" if hides.left_out else None
            keys = {VISIBLE: None, HIDDEN: left, **keys}
            keys |= {} if hides.left_out else {MASKED: "masked"}
        for key, caption in keys.items():
            for each in _every_group(key, layout.views):
                owner = writers.setdefault(each, name)
                refusals.check_one([owner, name], f"write the batch key '{each}'")
                if caption is not None:
                    captions[each] = caption
    return writers, captions


def _every_group(key: str, groups: Iterable[str]) -> list[str]:
    return [f"{group}{key[1:]}" for group in groups] if key.startswith("*/") else [key]


def _passes(layout: Layout) -> dict[str, EncoderPass]:
    """Return the passes: equal declarations are one pass."""
    passes: dict[str, EncoderPass] = {}
    declared = [
        (name, method, own)
        for method, uses in layout.uses.items()
        for name, own in uses.passes.items()
        if own.if_left_out in (None, _left_out(layout))
        and not (own.optional and own.group not in layout.views)
    ]
    for name, method, own in sorted(declared, key=lambda each: each[2].joins):  # joins come last
        refusals.check_group(layout, method, name, own)
        if own.joins and not own.or_all:
            refusals.check_joined(passes, method, name)
        laid = _laid_out(layout, method, own)
        before = passes.get(name, laid)
        if not own.joins:
            refusals.check_same(name, before, method, laid)
        passes[name] = replace(
            before,
            content=(*before.content, *(e for e in laid.content if e not in before.content)),
            places=(*before.places, *(e for e in laid.places if e not in before.places)),
            needs_patches=before.needs_patches or own.needs_patches,
            readers=(*before.readers, method),
        )
    twins = {name: own.twin_of for name, _, own in declared if own.twin_of is not None}
    for name, other in twins.items():
        original = passes[other]
        passes[name] = replace(passes[name], content=original.content, places=original.places)
    return passes


def _left_out(layout: Layout) -> bool:
    return layout.hides is not None and layout.hides.left_out


def _laid_out(layout: Layout, method: str, own: Pass) -> EncoderPass:
    """Return the pass that ``method`` declares, as if it were alone."""
    seen = f"{own.group}/visible" if _left_out(layout) else None
    if own.reference:
        group = layout.seen_by_reference(own.group)
        return EncoderPass(group, reference=True, rolls=own.rolls, needs_patches=own.needs_patches)
    visible = {ALL: None, SEEN: seen}.get(own.over, own.over)
    count: int | None = None
    if visible is None:
        rows, columns = layout.grid(own.group)
        count = rows * columns
    elif visible == f"{own.group}/visible" and layout.hides is not None:
        count = layout.hides.visible
    return EncoderPass(
        group=own.group,
        visible=visible,
        context=own.context,
        content=(method,) if own.edits_content else (),
        places=(method,) if own.edits_places else (),
        teacher=own.teacher,
        grad=own.grad,
        needs_patches=own.needs_patches,
        count=count,
    )
