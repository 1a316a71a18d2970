"""What the algorithms of a model declare: batch keys, encoder passes, and who reads which."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields, replace

from torch import Tensor

from pospre.batch import HIDDEN, MASKED, VISIBLE, Batch, image_key
from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.objective import Predicts
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
        place_source: the algorithm that says where views lie (``g/field_box``), if one does.
    """

    def __init__(self, encoder: Encoder, views: Mapping[str, ViewGroup]) -> None:
        self._encoder, self._views = encoder, views
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
        if group not in self._views:
            raise UserError(
                f"algorithms.{owner} needs the view group '{group}', but data.views has "
                f"{', '.join(self._views)}. Add data.views.{group} with count: {count}."
            )
        found, size = self._views[group], self._encoder.image_size
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
        if left_out and visible is not None and not self._encoder.takes(visible):
            raise UserError(
                f"algorithms.{owner} leaves {visible} patches visible, which fill no square for "
                f"{self._encoder.timm_name}. Use mask_ratio: 0.75, with sampling: uniform."
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
        positions = self._encoder.positions
        if not positions.takes_boxes:
            known = "whole cells of one grid only" if positions.can_forget else "no place at all"
            raise UserError(
                f"algorithms.{owner} places views anywhere in the image, but encoder.positions = "
                f"{positions.name} knows {known}. Use {schemes_that('takes_boxes')}."
            )
        self.place_source = owner

    def lacking(self, key: str) -> UserError:
        """Return the error of a batch without ``key``, of an algorithm's or of a loader's."""
        if key in self.writers:
            return UserError(
                f"the batch lacks '{key}', which algorithms.{self.writers[key]} writes before the "
                "forward: call model(batch, progress=…), or give the Trainer "
                "algorithms=model.algorithms."
            )
        group = key.rpartition("/")[0]
        where = f", of the views of the group '{group}'" if group else ""
        return UserError(
            f"the batch lacks '{key}'{where}; pospre.build_loader writes it, and "
            "pospre.from_images."
        )

    def check_is_batch(self, batch: Batch) -> None:
        """Raise ``UserError`` if ``batch`` is none, such as images alone."""
        if not isinstance(batch, dict):
            raise UserError(
                "a PretrainModel takes a batch, a dict as pospre.from_images makes it, and got "
                f"{type(batch).__name__}; the tokens of whole images are model.tokens(images)."
            )

    def check_batch(self, batch: Batch) -> None:
        """Raise ``UserError`` unless the passes' patches are there, and views are as declared."""
        self.check_is_batch(batch)
        for declared in self.passes.values():
            views, key = self._views[declared.group], image_key(declared.group)
            shape = (views.count, self._encoder.channels, *views.shape)
            if key in batch and batch[key].shape[1:] != shape:
                raise UserError(
                    f"'{key}' has the shape {tuple(batch[key].shape)}, but the model was made for "
                    f"(B, {', '.join(map(str, shape))}): views, channels, height and width. Cut "
                    "the images to that size, or make encoder and model for theirs."
                )
            for patches in (declared.visible, declared.context):
                if patches in self.writers and patches not in batch:
                    raise self.lacking(patches)

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
        if encoder_pass.group not in self._views:
            raise UserError(
                f"algorithms: the encoder pass '{name}' needs the view group "
                f"'{encoder_pass.group}', but data.views has {', '.join(self._views)}."
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
        positions, grid = self._encoder.positions, self._encoder.grid_of(*self._views[group].shape)
        if grid != self._encoder.grid and not positions.takes_any_grid:
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
        if encoder_pass.places and not self._encoder.positions.can_forget:
            raise UserError(
                f"algorithms.{owner} changes the places of the encoder pass '{name}' "
                f"({', '.join(encoder_pass.places)}), but there are none to change: "
                f"encoder.positions is {self._encoder.positions.name}. "
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
        rows, cols = self._encoder.grid_of(*self._views[encoder_pass.group].shape)
        return rows * cols

    def check_read(self, objectives: list[str]) -> None:
        """Raise ``UserError`` for an objective that joins no pass, and views cut for nobody."""
        for name in objectives:
            if not any(name in readers for readers in self.readers.values()):
                raise UserError(
                    f"algorithms: the objective '{name}' reads no encoder pass. Let its algorithm "
                    f"declare one (add_pass) or join another's (join_pass) in the name of '{name}'."
                )
        read = {declared.group for declared in self.passes.values()}
        for group in (name for name in self._views if name not in read):
            raise UserError(
                f"data.views.{group} would be decoded for nothing: no algorithm listed reads it, "
                f"only {', '.join(sorted(read))}. Remove it, or add an algorithm that needs it."
            )

    def check_places(self, predicts: Mapping[str, Predicts | None]) -> None:
        """Raise ``UserError`` where the encoder is told what an objective shall predict.

        Args:
            predicts: of each objective by name.
        """
        positions, source = self._encoder.positions, self.place_source
        for name, predicted in predicts.items():
            if name in self.editors.values():
                if predicted is None:
                    raise UserError(
                        f"algorithms.{name} changes the places of an encoder pass, so its "
                        "objective must say what it predicts: predicts = 'places', 'view_places' "
                        "or 'content' (see pospre/model/objective.py)."
                    )
            elif predicted in ("places", "view_places") and source is not None:
                raise UserError(
                    f"algorithms.{name} predicts places, but {source} tells the encoder the place "
                    "of every patch, and the answer with it. Use one of the two; or hide those "
                    "places by an editor of places, as droppos does."
                )
            elif predicted == "places" and positions.can_forget:
                raise UserError(
                    f"algorithms.{name} predicts the places of patches, which encoder.positions = "
                    f"{positions.name} tells the encoder. Set encoder.positions: "
                    f"{schemes_that('can_forget', False)}; or hide them by an editor of places, "
                    "as droppos does."
                )

    def check_editors(self, contents: Container[str], places: Container[str]) -> None:
        """Raise ``UserError`` if a pass names an editor that is not among those of the model."""
        for name, declared in self.passes.items():
            parts = (
                ("contents", declared.content, contents),
                ("places", declared.places, places),
            )
            for place, asked, added in parts:
                for editor in (each for each in asked if each not in added):
                    raise UserError(
                        f"algorithms: the encoder pass '{name}' names the editor '{editor}' in its "
                        f"{place}, but model.{place}.named has none of that name."
                    )


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
