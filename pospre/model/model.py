"""The one model that every host and every position algorithm attaches to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import torch
from composer.models import ComposerModel
from torch import Tensor, nn

from pospre.augment.device import DeviceAugment, ViewDraws
from pospre.batch import EPOCH, INDEX, Batch, flip_key, image_key, per_row, view_keys
from pospre.data.views.plan import ViewGroup, first_view
from pospre.errors import UserError
from pospre.model.objective import Objective, ObjectiveSet, Outputs
from pospre.model.passes import EditSet, EncoderPass
from pospre.model.teacher import Frozen, Momentum, follow
from pospre.nn.build import check_divides
from pospre.nn.encoder import Edit, Encoder
from pospre.nn.positions import resample_positions


class PretrainModel(ComposerModel):
    """An encoder, the passes declared over it, and the objectives that read their tokens.

    Algorithms attach to it before the optimiser is made: they claim the batch keys they write,
    require view groups, declare passes, and add objectives, editors and the teacher.

    Args:
        encoder: what is pre-trained and exported.
        seed: the run's seed; every mask is a function of it.
        views: the view groups of each batch by name; by default one group ``view`` of the
            encoder's size.
        mean: of the normalisation, for each channel in [0, 1] or each column of features; None
            takes ImageNet's, or 0 where there are other than three channels.
        std: of the normalisation; None takes ImageNet's, or 1.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        seed: int,
        views: Mapping[str, ViewGroup] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.normalise_by(mean, std)
        self.contents = EditSet()
        self.positions = EditSet()
        self.objectives = ObjectiveSet()
        self.teacher: Frozen | None = None
        self.teacher_positions: Frozen | None = None
        self.momentum: Momentum | None = None
        self.teacher_owner: str | None = None
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self.passes: dict[str, EncoderPass] = {}
        self.writers: dict[str, str] = {}
        # by batch key, how many patches it lists of every sample
        self.counts: dict[str, int] = {}
        # by view group, what mixes its views (B, V, 3, H, W) in training
        self.mixes: dict[str, Callable[[Tensor, Batch], Tensor]] = {}
        self.position_source: str | None = None
        self.seed = seed
        self.views = dict(views or {"view": ViewGroup(size=encoder.image_size)})
        for name, group in self.views.items():
            for side, patch in zip(group.shape, encoder.patch_size, strict=True):
                check_divides(side, patch, key=f"data.views.{name}.size")
            group.augment.check_channels(name, encoder.channels)

    def normalise_by(self, mean: Sequence[float] | None, std: Sequence[float] | None) -> None:
        """Set the normalisation of all views; see the class's arguments."""
        self.augment = DeviceAugment(mean, std, channels=self.encoder.channels)

    # -- what algorithms attach ---------------------------------------------------------------

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
        if self.views[group].count < count:
            raise UserError(
                f"algorithms.{owner} needs {count} views of the group '{group}', but "
                f"data.views.{group}.count is {self.views[group].count}."
            )
        shape, size = self.views[group].shape, self.encoder.image_size
        if group == "view" and shape != size:
            raise UserError(
                f"data.views.view.size = {list(shape)}, but algorithms.{owner} works on the whole "
                f"grid of encoder.image_size = {list(size)}. Leave the size out."
            )
        return self.views[group]

    def grid(self, group: str = "view") -> tuple[int, int]:
        """Return (rows, columns) of patches of a group's views."""
        if group == "view":
            return self.encoder.grid
        return self.encoder.grid_of(*self.views[group].shape)

    def claim(self, key: str, writer: str, *, count: int | None = None) -> None:
        """Register ``writer`` as the only algorithm that writes the batch key ``key``.

        Args:
            key: of the batch.
            writer: the algorithm's name.
            count: of the patches it lists, for those who must know before anything is drawn.

        Raises:
            UserError: another algorithm already writes it.
        """
        owner = self.writers.setdefault(key, writer)
        if owner != writer:
            raise UserError(
                f"algorithms: '{owner}' and '{writer}' both write the batch key '{key}'. "
                "Use one of them, or attach the host first."
            )
        if count is not None:
            self.counts[key] = count

    def add_pass(self, name: str, encoder_pass: EncoderPass) -> None:
        """Declare an encoder pass, or add editors to one that is declared.

        Raises:
            UserError: the pass is declared over other tokens, or attention with relative positions
                would not see all tokens.
        """
        if encoder_pass.group not in self.views:
            raise UserError(
                f"algorithms: the encoder pass '{name}' needs the view group "
                f"'{encoder_pass.group}', but data.views has {', '.join(self.views)}."
            )
        before = self.passes.get(name)
        if before is not None:
            bare = replace(
                encoder_pass,
                positions=before.positions,
                content=before.content,
                prefix_only=before.prefix_only,
            )
            if bare != before:
                different = [
                    f"{field.name} = {getattr(before, field.name)} and {getattr(bare, field.name)}"
                    for field in fields(bare)
                    if getattr(before, field.name) != getattr(bare, field.name)
                ]
                raise UserError(
                    f"algorithms: two of them need the encoder pass '{name}' over other tokens "
                    f"({', '.join(different)}). Use one of the two; supervised shows what the "
                    "other wants with a mask_ratio above 0."
                )
            encoder_pass = replace(
                before,
                positions=_joined(before.positions, encoder_pass.positions),
                content=_joined(before.content, encoder_pass.content),
                prefix_only=before.prefix_only and encoder_pass.prefix_only,
            )
        if self.encoder.is_relative and (encoder_pass.keep or encoder_pass.context):
            raise UserError(
                f"encoder.positions = {self.encoder.position_kind} needs all tokens in attention, "
                f"but the pass '{name}' leaves some out. Use sincos, learned or none."
            )
        self.passes[name] = encoder_pass

    def add_objective(self, name: str, objective: Objective) -> None:
        """Add an objective; ``name`` becomes its loss term."""
        self.objectives.add(name, objective)
        for student, teacher in objective.mirrored():
            self.mirror(student, teacher)

    def add_position_source(self, name: str, module: nn.Module) -> None:
        """Let ``module`` give the positions of every pass instead of the encoder's table.

        Called with an empty batch it gives those of a whole image. The teacher gets its own copy.

        Raises:
            UserError: another algorithm already gives the positions.
        """
        self.claim("positions", name)
        self.positions.named[name] = module
        self.position_source = name
        self._copy_positions()

    def add_teacher(self, owner: str, momentum: Momentum | None) -> None:
        """Make sure that there is a momentum teacher; who asks first says how fast it follows.

        Args:
            owner: the algorithm's name, for errors.
            momentum: None takes the teacher that another algorithm has made.

        Raises:
            UserError: no momentum from anyone, or one out of range.
        """
        if momentum is not None:
            momentum.check(owner)
        if self.teacher is not None:
            return
        if momentum is None:
            raise UserError(
                f"algorithms.{owner} needs a teacher, but its momentum is null and no other "
                f"algorithm brings one. Set {owner}.momentum_start (0.996 is usual)."
            )
        self.momentum, self.teacher_owner = momentum, owner
        self.teacher = Frozen(self.encoder)
        self.mirror(self.encoder, self.teacher.module)
        self._copy_positions()

    def _copy_positions(self) -> None:
        if self.teacher is None or self.position_source is None or self.teacher_positions:
            return
        source = EditSet()
        source.named[self.position_source] = self.positions.named[self.position_source]
        self.teacher_positions = Frozen(source)
        self.mirror(source, self.teacher_positions.module)

    def mirror(self, student: nn.Module, teacher: nn.Module) -> None:
        """Let ``teacher``, a module of the same structure, follow ``student`` by momentum."""
        self.pairs.append((student, teacher))

    def update_teacher(self, progress: float, *, owner: str | None = None) -> None:
        """Move the teacher towards the trained weights, after the step begun at ``progress``.

        Args:
            progress: share of the training that was done when the step began.
            owner: who asks; only the algorithm whose momentum counts moves the teacher, so that
                several may ask. None moves it in any case.
        """
        if self.momentum is not None and owner in (None, self.teacher_owner):
            follow(self.pairs, self.momentum.at(progress))

    def check_complete(self) -> None:
        """Raise ``UserError`` if nothing attached has a loss, or views are cut for nobody."""
        if not len(self.objectives.named):
            raise UserError(
                "algorithms: none of those listed has a loss of its own. Add a host (mae, simmim, "
                "ijepa, dinov2, supervised), droppos or mp3."
            )
        read = {declared.group for declared in self.passes.values()}
        for group in (name for name in self.views if name not in read):
            raise UserError(
                f"data.views.{group} would be decoded for nothing: no algorithm listed reads it, "
                f"only {', '.join(sorted(read))}. Remove it, or add an algorithm that needs it."
            )

    # -- what runs ----------------------------------------------------------------------------

    def images(self, batch: Batch, group: str = "view") -> Tensor:
        """Return the group's views, flipped and normalised: float32 (B, V, 3, H, W).

        In training they are augmented as the group says; an evaluation may have its own group.
        """
        views, flips = batch[image_key(group)], batch[flip_key(group)]
        if not self.training or self.views[group].augment.is_off:
            return self.augment(views, flips)
        chosen = self.views[group]
        first = first_view(self.views.values(), group)
        source = ViewDraws(self.seed, batch[EPOCH], batch[INDEX], first, chosen.count)
        return self.augment(views, flips, chosen.augment, source)

    def tokens(self, images_BCHW: Tensor) -> Tensor:
        """Encode whole images as whoever uses the exported encoder does: (B, P+N, D)."""
        if self.position_source is None:
            return self.encoder(images_BCHW)
        whole = EncoderPass(grid=self.encoder.grid_of(*images_BCHW.shape[-2:]))
        source = partial(self.positions, (self.position_source,), {}, whole)
        return self.encoder(images_BCHW, positions=source)

    @torch.no_grad()
    def position_table(self, grid: tuple[int, int]) -> Tensor:
        """Return the positions of whole images of ``grid`` patches, prefix first: (1, P+N, D)."""
        table = self.encoder.pos_embed
        assert table is not None
        prefix, patches = table[0].tensor_split([self.encoder.num_prefix_tokens])
        if self.position_source is None:
            patches = resample_positions(patches, self.encoder.grid, grid)
        else:
            blank = patches.new_zeros(1, grid[0] * grid[1], self.encoder.embed_dim)
            source = (self.position_source,)
            patches = self.positions(source, {}, EncoderPass(grid=grid), blank)[0]
        return torch.cat([prefix, patches]).unsqueeze(0)

    def encode(self, name: str, images_BVCHW: Tensor, batch: Batch) -> Tensor:
        """Run the declared pass ``name``: (B·V, P+K, D) tokens, or (B·V, P, D)."""
        declared = self.passes[name]
        images = images_BVCHW.flatten(0, 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and declared.has_grad):
            encoder = self.teacher if declared.teacher else self.encoder
            assert encoder is not None
            return encoder(
                images,
                _rows(batch, declared.keep, len(images)),
                self._edit_positions(declared, batch),
                content=self._edit_content(declared, batch),
                context_BM=_rows(batch, declared.context, len(images)),
                keys_B=self._dropping_keys(name, declared, batch, images_BVCHW.shape[1]),
                prefix_only=declared.prefix_only,
            )

    def _edit_content(self, declared: EncoderPass, batch: Batch) -> Edit | None:
        if not declared.content:
            return None
        return partial(self.contents, declared.content, batch, declared)

    def _edit_positions(self, declared: EncoderPass, batch: Batch) -> Edit | None:
        source = () if self.position_source is None else (self.position_source,)
        names = (*source, *declared.positions)
        if not names:
            return None
        positions = self.teacher_positions if declared.teacher else None
        return partial(positions or self.positions, names, batch, declared)

    def _dropping_keys(
        self, name: str, declared: EncoderPass, batch: Batch, views: int
    ) -> Tensor | None:
        """Return the draw keys (B·V,) of drop path and dropout in this pass, in training."""
        drops = self.encoder.drop_path or self.encoder.dropout
        if not self.training or declared.teacher or not drops:
            return None
        return view_keys(batch, views, self.seed, f"drop_path/{name}").flatten()

    def forward(self, batch: Batch) -> dict[str, Outputs]:
        """Run the passes, then the objectives.

        Args:
            batch: see ``pospre.batch``; the algorithms have written their masks into it.

        Returns:
            The outputs of each objective by name.
        """
        groups = dict.fromkeys(declared.group for declared in self.passes.values())
        pixels = {group: self.images(batch, group) for group in groups}
        if self.training:
            for group in groups:
                if group in self.mixes:
                    pixels[group] = self.mixes[group](pixels[group], batch)
        batch = {**batch, **{f"{group}/pixels": views for group, views in pixels.items()}}
        # autocast keeps the weights it casts: cast without gradient first, they would never learn
        order = sorted(self.passes, key=lambda name: not self.passes[name].has_grad)
        passes = {name: self.encode(name, pixels[self.passes[name].group], batch) for name in order}
        return self.objectives(passes, batch)

    def loss(  # type: ignore[override]  # Composer also takes a dict of terms
        self, outputs: dict[str, Outputs], batch: Batch
    ) -> dict[str, Tensor]:
        """Return ``total``, one term per objective, and ``metric/<name>`` scalars."""
        terms: dict[str, Tensor] = {}
        measured: dict[str, Tensor] = {}
        weighted = []
        for name in self.objectives:
            objective = self.objectives[name]
            terms[name] = objective.loss(outputs[name], batch)
            weighted.append(objective.weight * terms[name])
            for metric, value in objective.metrics(outputs[name], batch).items():
                measured[f"metric/{name}_{metric}"] = value.detach()
        return {"total": torch.stack(weighted).sum(), **terms, **measured}


def _rows(batch: Batch, key: str | None, num_rows: int) -> Tensor | None:
    return None if key is None else per_row(batch[key], num_rows)


def _joined(names: tuple[str, ...], more: tuple[str, ...]) -> tuple[str, ...]:
    return (*names, *(name for name in more if name not in names))
