"""What the algorithms of a model declare: batch keys, encoder passes, and who reads which."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

from torch import Tensor

from pospre.batch import HIDDEN, MASKED, VISIBLE, Batch
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.passes import EncoderPass
from pospre.nn.positions import schemes_that
from pospre.nn.vit import Encoder


@dataclass(frozen=True)
class HiddenPatches:
    """Which algorithm hides patches of ``view``, and how; see ``Registry.hide``."""

    owner: str
    visible: int | None
    shuffled: bool
    left_out: bool


class Registry:
    """The declarations of all attached algorithms, each checked as it is made.

    Attributes:
        passes: the encoder passes by name, in the order of their declaration.
        writers: by batch key, the algorithm that writes it.
        hidden: who hides patches of ``view``, and how; None: they are all visible.
        captions: by batch key that marks patches, the colour of these in pictures of a step, grey
            or green, and what it means.
        mixes: by view group, what mixes its views (B, V, 3, H, W) in training.
        twins: by pass, the one that it is like in another group.
        readers: by pass, the algorithms that declared or joined it: their objectives get it.
        editors: by editor of places, the algorithm that brought it.
        encoder: whose passes these are.
        views: the view groups by name.
        place_source: the algorithm that says where views lie (``g/field_box``), if one does.
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
        self.place_source: str | None = None

    def require_views(self, owner: str, group: str, count: int = 1) -> ViewGroup:
        """Return the view group that ``owner`` needs.

        Raises:
            UserError: the batches have no such group, or too few views in it.
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
                f"data.views.view.size = {list(found.shape)}, but algorithms.{owner} works on the "
                f"whole grid of encoder.image_size = {list(size)}. Leave the size out."
            )
        return found

    def claim(self, key: str, writer: str, *, grey: str = "", green: str = "") -> None:
        """Register ``writer`` as the only algorithm that writes the batch key ``key``.

        Args:
            key: of the batch.
            writer: the algorithm's name.
            grey: the words below pictures of a step in which the patches that it marks are grey.
            green: the same of patches framed in green. It marks patches by their numbers, or by a
                bool for each patch, or for each visible one.

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
        """Let ``owner`` alone hide patches of ``view`` and write which are visible.

        Args:
            owner: the algorithm's name.
            visible: how many patches of a sample are visible; None: that varies.
            shuffled: both lists are in random order, so that any first of them are a random choice.
            left_out: the encoder does not get the hidden ones; if not, ``owner`` also writes
                ``view/masked`` and puts a mask token in their place.

        Returns:
            The pass over what the encoder gets, for ``add_pass``.

        Raises:
            UserError: another algorithm hides some already, or the encoder cannot take these.
        """
        if left_out and visible is not None and not self.encoder.takes(visible):
            raise UserError(
                f"algorithms.{owner} leaves {visible} patches visible, which fill no square for "
                f"{self.encoder.timm_name}. Use mask_ratio: 0.75, with sampling: uniform."
            )
        self.claim(VISIBLE, owner)
        if left_out:
            self.claim(HIDDEN, owner, grey="grey patches are hidden from the encoder")
        else:
            self.claim(HIDDEN, owner)
            self.claim(MASKED, owner, grey="grey patches are masked")
        self.hidden = HiddenPatches(owner, visible, shuffled, left_out)
        return EncoderPass(visible=VISIBLE if left_out else None)

    def place_views(self, owner: str) -> None:
        """Let ``owner`` alone say where the views of every pass lie.

        Raises:
            UserError: another algorithm does already, or the encoder knows whole cells only.
        """
        if self.place_source not in (None, owner):
            raise UserError(
                f"algorithms: {self.place_source} and {owner} both say where views lie. Use one of "
                "the two."
            )
        positions = self.encoder.positions
        if not positions.takes_boxes:
            known = "whole cells of one grid only" if positions.can_forget else "no place at all"
            raise UserError(
                f"algorithms.{owner} places views anywhere in the image, but encoder.positions = "
                f"{positions.name} knows {known}. Use {schemes_that('takes_boxes')}."
            )
        self.place_source = owner

    def add_pass(self, name: str, owner: str, encoder_pass: EncoderPass) -> EncoderPass:
        """Declare an encoder pass; one that is declared already over the same tokens is shared.

        Args:
            name: of the pass.
            owner: the algorithm whose objective reads its tokens.
            encoder_pass: its tokens, editors and needs.

        Returns:
            The pass as all who share it have it.

        Raises:
            UserError: the pass is declared over other tokens.
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
        """Raise ``UserError`` for views of another grid than the one that the positions know."""
        positions, grid = self.encoder.positions, self.encoder.grid_of(*self.views[group].shape)
        if grid != self.encoder.grid and not positions.takes_any_grid:
            raise UserError(
                f"algorithms.{owner}: encoder.positions = {positions.name} knows one grid only, "
                f"that of encoder.image_size, but the views of data.views.{group} have another. "
                f"Use {schemes_that('takes_any_grid')}."
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
        """Join a pass that another algorithm has declared, whatever patches it runs over.

        Args:
            name: of the pass.
            owner: the algorithm whose objective reads its tokens.
            needs_patches: whether it reads patch tokens; false: only the prefix tokens.
            content: editors of patch embeddings to add to it, see ``EncoderPass``.
            places: editors of places to add to it; no other algorithm's beside them.

        Returns:
            The pass: its ``visible`` names the batch key of the patches it runs over (None: all),
            its ``count`` how many they are (None: that varies).

        Raises:
            UserError: it is not declared, or another algorithm edits its places.
        """
        before = self.passes.get(name)
        if before is None:
            declared = ", ".join(f"'{known}'" for known in self.passes) or "none"
            raise UserError(
                f"algorithms.{owner} joins the encoder pass '{name}', but those declared before "
                f"it are: {declared}. Add an algorithm that runs this pass, and list {owner} after "
                "it."
            )
        joined = replace(
            before,
            content=_joined(before.content, content),
            places=_joined(before.places, places),
            needs_patches=before.needs_patches or needs_patches,
        )
        return self._set(name, owner, joined)

    def add_twin(self, name: str, owner: str, of: str, group: str, visible: str | None) -> None:
        """Declare a pass like another one over another group: what edits that one edits it, too.

        Args:
            name: of the new pass.
            owner: the algorithm whose objective reads its tokens.
            of: the other pass.
            group: of the views.
            visible: batch key of the patches that the new pass encodes; None: all.
        """
        self.twins[name] = of
        twin = replace(self.passes[of], group=group, visible=visible, needs_patches=True)
        self.add_pass(name, owner, twin)

    def _set(self, name: str, owner: str, encoder_pass: EncoderPass) -> EncoderPass:
        if encoder_pass.places and not self.encoder.positions.can_forget:
            raise UserError(
                f"algorithms.{owner} changes the places of the encoder pass '{name}' "
                f"({', '.join(encoder_pass.places)}), but there are none to change: "
                f"encoder.positions is {self.encoder.positions.name}. "
                f"Use {schemes_that('can_forget')}."
            )
        editors = dict.fromkeys(encoder_pass.places, owner) | self.editors
        owners = {editors[editor] for editor in encoder_pass.places}
        if len(owners) > 1:
            raise UserError(
                f"algorithms: {' and '.join(sorted(owners))} both change the places of the "
                f"encoder pass '{name}', and neither knows what the other hides. Use one of them, "
                "or let each have a pass of its own."
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
        """Return how many patches of a view the pass runs over; None if only the batch says."""
        if encoder_pass.visible is not None:
            hidden = self.hidden if encoder_pass.visible == VISIBLE else None
            return None if hidden is None else hidden.visible
        rows, cols = self.encoder.grid_of(*self.views[encoder_pass.group].shape)
        return rows * cols


def _check_same_tokens(name: str, before: EncoderPass, after: EncoderPass) -> None:
    """Raise ``UserError`` if two declarations of a pass differ in more than what can be joined."""
    different = [
        f"{field.name} = {getattr(before, field.name)} and {getattr(after, field.name)}"
        for field in fields(EncoderPass)
        if field.name in ("group", "visible", "context", "teacher", "grad")
        and getattr(before, field.name) != getattr(after, field.name)
    ]
    if different:
        raise UserError(
            f"algorithms: two of them need the encoder pass '{name}' over other tokens "
            f"({', '.join(different)}). Use one of the two; a host that can hide patches or show "
            "all of them does either by its mask_ratio."
        )


def _joined(names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(name for name in more if name not in names))
