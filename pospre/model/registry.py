"""Declarations of a model's algorithms: batch keys, encoder passes and their readers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from pospre.batch import HIDDEN, MASKED, VISIBLE, Batch, field_box_key
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.passes import EncoderPass
from pospre.nn.places import Places
from pospre.nn.positions import schemes_that
from pospre.nn.vit import Encoder


@dataclass(frozen=True)
class HiddenPatches:
    """The algorithm that hides patches of ``view``, and how; see ``Registry.hide``."""

    owner: str
    visible: int | None
    shuffled: bool
    left_out: bool


class Registry:
    """The declarations of all attached algorithms, each checked when it is made.

    Attributes:
        passes: the encoder passes by name, in order of declaration.
        writers: algorithm that writes each batch key.
        hidden: the algorithm that hides patches of ``view``, and how; None: all are visible.
        captions: for batch keys that mark patches: their colour in pictures of a step, grey or
            green, and the caption.
        mixes: functions that mix a group's views (B, V, 3, H, W) in training, by group.
        twins: for a pass, the pass of another group that it copies.
        readers: by pass, the algorithms that declared or joined it; their objectives get it.
        editors: the algorithm that added each editor of places.
        encoder: the encoder of these passes.
        views: the view groups by name.
    """

    def __init__(self, encoder: Encoder, views: Mapping[str, ViewGroup]) -> None:
        self.encoder, self.views = encoder, views
        self.passes: dict[str, EncoderPass] = {}
        self.writers: dict[str, str] = {}
        self.hidden: HiddenPatches | None = None
        self.captions: dict[str, tuple[str, str]] = {}
        self.mixes: dict[str, Callable[[Tensor, Batch], Tensor]] = {}
        self.readers: dict[str, list[str]] = {}
        self.twins: dict[str, str] = {}
        self.editors: dict[str, str] = {}

    def require_views(self, owner: str, group: str, count: int = 1) -> ViewGroup:
        """Return the view group that ``owner`` needs.

        Raises:
            UserError: the batches do not have this group, or too few views in it.
        """
        if group not in self.views:
            raise UserError(
                f"algorithms.{owner} needs the view group '{group}', but data.views has "
                f"{', '.join(self.views)}. Add data.views.{group} with count: {count}."
            )
        found, size = self.views[group], self.encoder.image_size
        if found.count < count:
            raise UserError(
                f"algorithms.{owner} needs {count} views of the group '{group}', but "
                f"data.views.{group}.count is {found.count}."
            )
        if group == "view" and found.shape != size:
            raise UserError(
                f"data.views.view.size = {list(found.shape)}, but algorithms.{owner} needs the "
                f"whole grid of encoder.image_size = {list(size)}. Remove the size."
            )
        return found

    def claim(self, key: str, writer: str, *, grey: str = "", green: str = "") -> None:
        """Register ``writer`` as the only algorithm that writes the batch key ``key``.

        Args:
            key: the batch key.
            writer: the algorithm's name.
            grey: caption for pictures of a step in which the marked patches are grey.
            green: caption for patches framed in green. The key holds patch indices, or a bool for
                each patch or each visible patch.

        Raises:
            UserError: another algorithm already writes it.
        """
        owner = self.writers.setdefault(key, writer)
        if owner != writer:
            raise UserError(
                f"algorithms: '{owner}' and '{writer}' both write the batch key '{key}'. "
                "Use one of them, or attach the host first."
            )
        if grey or green:
            self.captions[key] = ("grey", grey) if grey else ("green", green)

    def hide(
        self, owner: str, visible: int | None, *, shuffled: bool, left_out: bool = True
    ) -> EncoderPass:
        """Reserve for ``owner`` to hide patches of ``view`` and to write which are visible.

        Args:
            owner: the algorithm's name.
            visible: number of visible patches per sample; None: varies.
            shuffled: both lists are in random order, so any prefix is a random subset.
            left_out: the encoder does not get hidden patches. Otherwise ``owner`` also writes
                ``view/masked`` and replaces them by a mask token.

        Returns:
            The pass over the encoder's input, for ``add_pass``.

        Raises:
            UserError: another algorithm already hides patches, or the encoder does not support
                this.
        """
        if left_out and visible is not None and not self.encoder.takes(visible):
            raise UserError(
                f"algorithms.{owner} leaves {visible} patches visible, but "
                f"{self.encoder.timm_name} needs a square of them. Use mask_ratio: 0.75 with "
                "sampling: uniform."
            )
        if not left_out and not self.encoder.positions.can_forget:
            raise UserError(
                f"algorithms.{owner} masks patches, which then differ by their places alone, but "
                f"encoder.positions = {self.encoder.positions.name} has none: all would be "
                f"predicted alike. Use {schemes_that('can_forget')}."
            )
        self.claim(VISIBLE, owner)
        if left_out:
            self.claim(HIDDEN, owner, grey="grey patches are hidden from the encoder")
        else:
            self.claim(HIDDEN, owner)
            self.claim(MASKED, owner, grey="grey patches are masked")
        self.hidden = HiddenPatches(owner, visible, shuffled, left_out)
        return EncoderPass(visible=VISIBLE if left_out else None)

    @property
    def place_source(self) -> str | None:
        """The algorithm that places views: the writer of ``g/field_box``; None: no algorithm."""
        return next(filter(None, (self.writers.get(field_box_key(g)) for g in self.views)), None)

    def place_views(self, owner: str) -> None:
        """Reserve for ``owner`` to place the views of every pass and to write ``g/field_box``.

        Raises:
            UserError: another algorithm already does, or the encoder's positions do not take boxes.
        """
        if self.place_source not in (None, owner):
            raise UserError(
                f"algorithms: {self.place_source} and {owner} both place views. Use one of the two."
            )
        positions = self.encoder.positions
        if not positions.takes_boxes:
            known = "only whole cells of one grid" if positions.can_forget else "no places"
            raise UserError(
                f"algorithms.{owner} places views anywhere in the image, but encoder.positions = "
                f"{positions.name} supports {known}. Use {schemes_that('takes_boxes')}."
            )
        # options of a scheme may refuse boxes, too
        positions.check(Places(self.encoder.grid).within(torch.tensor([[0.0, 0.0, 1.0, 1.0]])))
        for group in self.views:
            self.claim(field_box_key(group), owner)

    def add_pass(self, name: str, owner: str, encoder_pass: EncoderPass) -> EncoderPass:
        """Declare an encoder pass; an existing one over the same tokens is shared.

        Args:
            name: of the pass.
            owner: the algorithm whose objective reads its tokens.
            encoder_pass: its tokens, editors and needs.

        Returns:
            The pass, merged with its earlier declarations.

        Raises:
            UserError: the pass was declared over other tokens.
        """
        if encoder_pass.group not in self.views:
            raise UserError(
                f"algorithms: the encoder pass '{name}' needs the view group "
                f"'{encoder_pass.group}', but data.views has {', '.join(self.views)}."
            )
        self._check_grid(owner, encoder_pass.group)
        before = self.passes.get(name)
        if before is not None:
            _check_same_tokens(name, before, encoder_pass)
            return self.join_pass(
                name,
                owner,
                needs_patches=encoder_pass.needs_patches,
                content=encoder_pass.content,
                places=encoder_pass.places,
            )
        return self._set(name, owner, replace(encoder_pass, count=self._count(encoder_pass)))

    def _check_grid(self, owner: str, group: str) -> None:
        """Raise ``UserError`` if the views' grid is not supported by the positions."""
        positions, grid = self.encoder.positions, self.encoder.grid_of(*self.views[group].shape)
        if grid != self.encoder.grid and not positions.takes_any_grid:
            raise UserError(
                f"algorithms.{owner}: encoder.positions = {positions.name} supports only the grid "
                f"of encoder.image_size, but the views of data.views.{group} have another one. Use "
                f"{schemes_that('takes_any_grid')}."
            )

    def join_pass(
        self,
        name: str,
        owner: str,
        *,
        needs_patches: bool = True,
        content: tuple[str, ...] = (),
        places: tuple[str, ...] = (),
    ) -> EncoderPass:
        """Join a pass declared by another algorithm, whichever patches it runs over.

        Args:
            name: of the pass.
            owner: the algorithm whose objective reads its tokens.
            needs_patches: whether it reads patch tokens; False: only prefix tokens.
            content: editors of patch embeddings to add, see ``EncoderPass``.
            places: editors of places to add; no other algorithm may edit places too.

        Returns:
            The pass. Its ``visible`` names the batch key of its patches (None: all); its ``count``
            is their number (None: varies).

        Raises:
            UserError: it is not declared, or another algorithm edits its places.
        """
        before = self.passes.get(name)
        if before is None:
            declared = ", ".join(f"'{known}'" for known in self.passes) or "none"
            raise UserError(
                f"algorithms.{owner} joins the encoder pass '{name}', but only these are declared "
                f"before it: {declared}. Add an algorithm that runs this pass, and list {owner} "
                "after it."
            )
        joined = replace(
            before,
            content=_joined(before.content, content),
            places=_joined(before.places, places),
            needs_patches=before.needs_patches or needs_patches,
        )
        return self._set(name, owner, joined)

    def add_twin(self, name: str, owner: str, of: str, group: str, visible: str | None) -> None:
        """Declare a copy of a pass over another group; later edits apply to both.

        Args:
            name: of the new pass.
            owner: the algorithm whose objective reads its tokens.
            of: the other pass.
            group: the view group.
            visible: batch key of the patches that the new pass encodes; None: all.
        """
        self.twins[name] = of
        twin = replace(self.passes[of], group=group, visible=visible, needs_patches=True)
        self.add_pass(name, owner, twin)

    def _set(self, name: str, owner: str, encoder_pass: EncoderPass) -> EncoderPass:
        if encoder_pass.places and not self.encoder.positions.can_forget:
            raise UserError(
                f"algorithms.{owner} changes the places of the encoder pass '{name}' "
                f"({', '.join(encoder_pass.places)}), but encoder.positions = "
                f"{self.encoder.positions.name} has none to change. "
                f"Use {schemes_that('can_forget')}."
            )
        editors = dict.fromkeys(encoder_pass.places, owner) | self.editors
        owners = {editors[editor] for editor in encoder_pass.places}
        if len(owners) > 1:
            raise UserError(
                f"algorithms: {' and '.join(sorted(owners))} both change the places of the encoder "
                f"pass '{name}', without regard to each other. Use one of them, or give each its "
                "own pass."
            )
        self.editors = editors
        self.passes[name] = encoder_pass
        for twin in (each for each, of in self.twins.items() if of == name and each in self.passes):
            self.passes[twin] = replace(
                self.passes[twin], content=encoder_pass.content, places=encoder_pass.places
            )
        readers = self.readers.setdefault(name, [])
        if owner not in readers:
            readers.append(owner)
        return encoder_pass

    def _count(self, encoder_pass: EncoderPass) -> int | None:
        """Return the number of patches per view in the pass; None if it varies by batch."""
        if encoder_pass.visible is not None:
            hidden = self.hidden if encoder_pass.visible == VISIBLE else None
            return None if hidden is None else hidden.visible
        rows, cols = self.encoder.grid_of(*self.views[encoder_pass.group].shape)
        return rows * cols


def _check_same_tokens(name: str, before: EncoderPass, after: EncoderPass) -> None:
    """Raise ``UserError`` if two declarations of a pass conflict."""
    different = [
        f"{field.name} = {getattr(before, field.name)} and {getattr(after, field.name)}"
        for field in fields(EncoderPass)
        if field.name in ("group", "visible", "context", "teacher", "grad")
        and getattr(before, field.name) != getattr(after, field.name)
    ]
    if different:
        raise UserError(
            f"algorithms: two of them need the encoder pass '{name}' over different tokens "
            f"({', '.join(different)}). Use one of the two, or change the host's mask_ratio: some "
            "hosts can either hide patches or show all."
        )


def _joined(names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(name for name in more if name not in names))
