"""The model: builds what ``compose`` has laid out, and runs it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from composer.models import ComposerModel
from torch import Tensor, nn
from torchmetrics import Metric

from pospre import draws
from pospre.augment.device import DeviceAugment, ViewDraws
from pospre.batch import EPOCH, INDEX, Batch, flip_key, image_key, per_row, place_keys, view_keys
from pospre.data.views.crop_plan import first_view
from pospre.data.views.options import ViewGroup, Views, named_groups
from pospre.errors import UserError
from pospre.model.compose import compose
from pospre.model.loop_watch import LoopWatch
from pospre.model.objective import LossTerm, Outputs, StepOutputs
from pospre.model.parts import make_parts
from pospre.model.passes import EncoderPass
from pospre.model.prepare import check_batch, check_normalised, lacking, write_draws
from pospre.model.progress import Progress, as_progress
from pospre.model.reference import Reference
from pospre.model.sample_numbers import SampleNumbers
from pospre.model.uses import Method
from pospre.nn.build import check_divides
from pospre.nn.encoder_interface import Edit, PatchEncoder
from pospre.nn.places import Places, view_places
from pospre.nn.positions.fading import Fading
from pospre.nn.vit import Encoder, as_vit
from pospre.nn.weights.timm_models import wrap_encoder

FEATURES = "features"
"""Key of a model's outputs, besides the objectives': the features of each pass by name."""


class PretrainModel(ComposerModel):
    """An encoder with methods: the passes over it, and the objectives that read their tokens.

    Attributes:
        algorithms: the methods, in the order in which they draw; give them to Composer's Trainer.
        layout: what they run and write together, see ``pospre.model.compose``.

    Args:
        encoder: the encoder to pre-train and export, from ``build_encoder``; or a timm ViT, which
            ``wrap_encoder`` copies: later changes to it have no effect.
        algorithms: the methods in any order; none only to evaluate the encoder.
        seed: the run's seed; all masks and the initial weights of all heads are functions of it.
        views: the view groups of each batch, as a dict by name or a sequence. Default: one group
            ``view`` of the encoder's size.
        mean: for normalisation, per channel in [0, 1] or per column of features. None: that of the
            weights (of the wrapped timm model, or of what ``load_weights`` loads), if known, else
            ImageNet's, or 0 if there are not three channels.
        std: for normalisation, as ``mean``; else ImageNet's, or 1.
        reference: the encoder of published weights that methods such as ``gram`` compare with: a
            model, an encoder or a timm ViT, which is copied and never changes.

    Raises:
        UserError: the methods do not work together, or not with this encoder or these views.
    """

    def __init__(
        self,
        encoder: nn.Module,
        algorithms: Sequence[Method] = (),
        *,
        seed: int = 0,
        views: Views | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        reference: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(encoder, nn.Module):
            raise UserError(
                "PretrainModel takes an encoder from pospre.build_encoder(...) or a timm ViT, not "
                f"{type(encoder).__name__}."
            )
        if not isinstance(encoder, PatchEncoder):
            encoder = wrap_encoder(encoder)
        self.encoder = encoder
        self.augment = DeviceAugment(mean, std, channels=encoder.channels)
        self.augment.expect(encoder.pixels_expected, "timm's")
        self.seed = seed
        self.views = named_groups(views or [ViewGroup(size=encoder.image_size)])
        self.reference = None if reference is None else Reference.of(reference)
        for name, group in self.views.items():
            if group.of is None:  # the reference sees the others, with patches of its own
                for side, patch in zip(group.shape, encoder.patch_size, strict=True):
                    check_divides(side, patch, key=f"data.views.{name}.size")
            group.augment.check_channels(name, encoder.channels)
        frozen = None if self.reference is None else self.reference.module
        self.layout = compose(algorithms, encoder, self.views, frozen)
        self.algorithms: list[Any] = [*self.layout.methods.values()]
        self.is_one_graph = False  # of ``run_step``: forward also returns the losses
        self.draw_stream: Callable[[Callable[[], Batch]], Batch] = _at_once  # or on a stream
        self.loop_watch = LoopWatch()
        parts = make_parts(self.layout, seed)
        self.contents, self.places, self.objectives = parts.contents, parts.places, parts.objectives
        self.teacher, self.teachers = parts.teacher, parts.teachers
        if torch.empty(0).device.type != "meta":  # the parts are made there, to be replaced
            self.to(next(encoder.parameters()).device)

    def grid(self, group: str = "view") -> tuple[int, int]:
        """Return (rows, columns) of patches in a group's views."""
        return self.layout.grid(group)

    def check_trainable(self) -> None:
        """Raise ``UserError`` if the model has no method, and thus no loss."""
        if not self.algorithms:
            raise UserError(
                "this model has no algorithm, and thus no loss. Make it with those to train: "
                "pospre.PretrainModel(encoder, [pospre.MAE()], seed=0)."
            )

    # -- running ------------------------------------------------------------------------------

    def images(self, batch: Batch, group: str = "view") -> Tensor:
        """Return the group's views, flipped and normalised: float32 (B, V, 3, H, W).

        In training they are also augmented; evaluations may use their own group.
        """
        for key in (image_key(group), flip_key(group)):
            if key not in batch:
                raise lacking(self.layout, key)
        views, flips = batch[image_key(group)], batch[flip_key(group)]
        if not self.training or self.views[group].augment.is_off:
            return self.augment(views, flips)
        chosen = self.views[group]
        first = first_view(self.views.values(), group)
        source = ViewDraws(self.seed, batch[EPOCH], batch[INDEX], first, chosen.count)
        return self.augment(views, flips, chosen.augment, source)

    def pass_images(self, declared: EncoderPass, batch: Batch) -> Tensor:
        """Return the images (B, V, C, H, W) of a pass; the reference's are without colours."""
        if self.reference is None or not declared.reference:
            return self.images(batch, declared.group)
        source = self.views[declared.group].of or declared.group
        return self.reference.augment(batch[image_key(declared.group)], batch[flip_key(source)])

    def features(
        self, images_BCHW: Tensor, layers: Sequence[int], places: Places | None = None
    ) -> list[Tensor]:
        """Return the patch tokens (B, N, D) after each of these blocks and the final norm.

        Args:
            images_BCHW: normalised images, of any size that the encoder's positions support.
            layers: 0 is the input of the first block (patches and positions), 1 its output, and so
                on.
            places: of the patches; None: their own.

        Raises:
            UserError: the encoder is not a ViT, or lacks a layer; or the images are not normalised.
        """
        vit = self.vit
        if isinstance(layers, int):
            raise UserError(f"layers = {layers}, but model.features takes a list: [{layers}].")
        check_normalised(images_BCHW)
        hidden = vit(images_BCHW, places=places, layers=layers)
        return [vit.norm(tokens)[:, vit.num_prefix_tokens :] for tokens in hidden]

    @property
    def vit(self) -> Encoder:
        """The encoder for readers of its blocks; ``UserError`` if it is no ViT."""
        return as_vit(self.encoder, "model.features")

    def timm_state(self, vit: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the encoder's weights in timm's layout; see ``Encoder.timm_state``."""
        return self.encoder.timm_state(vit)

    def run_pass(self, name: str, images_BVCHW: Tensor, batch: Batch) -> Tensor:
        """Run the declared pass ``name``: (B·V, P+K, D) tokens, or (B·V, P, D)."""
        declared = self.layout.passes[name]
        if declared.reference:
            assert self.reference is not None
            shifts = None
            if declared.rolls:
                keys_BV = view_keys(batch, images_BVCHW.shape[1], self.seed, "rolls")
                shifts = draws.uniform(keys_BV.flatten(), 2 * declared.rolls)
            prefix_only = not declared.needs_patches
            return self.reference(images_BVCHW, prefix_only=prefix_only, shifts_RK=shifts)
        images = images_BVCHW.flatten(0, 1)
        with torch.set_grad_enabled(torch.is_grad_enabled() and declared.has_grad):
            encoder = self.teacher if declared.teacher else self.encoder
            assert encoder is not None
            visible = _rows(batch, declared.visible, len(images))
            return encoder(
                images,
                visible,
                self.pass_places(declared, batch, visible),
                content=self._edit_content(declared, batch),
                context_BM=_rows(batch, declared.context, len(images)),
                keys_B=self._dropping_keys(name, declared, batch, images_BVCHW.shape[1]),
                prefix_only=not declared.needs_patches,
            )

    def pass_places(self, declared: EncoderPass, batch: Batch, visible_RK: Tensor | None) -> Places:
        """Return the places of a pass's tokens, given by the views and edited by algorithms.

        Args:
            declared: the pass.
            batch: the batch with the algorithms' masks.
            visible_RK: the visible patches of the pass.
        """
        own = view_places(batch, declared.group, self.grid(declared.group), visible_RK)
        if declared.teacher:  # it gets the unedited places
            own = replace(own, keys=None)
        return self.places(declared.places, batch, declared, own)

    def _edit_content(self, declared: EncoderPass, batch: Batch) -> Edit | None:
        if not declared.content:
            return None
        return partial(self.contents, declared.content, batch, declared)

    def _dropping_keys(
        self, name: str, declared: EncoderPass, batch: Batch, views: int
    ) -> Tensor | None:
        """Return the draw keys (B·V,) of drop path and dropout in this pass during training."""
        drops = self.encoder.drop_path or self.encoder.dropout
        if not self.training or declared.teacher or not drops:
            return None
        return view_keys(batch, views, self.seed, f"drop_path/{name}").flatten()

    @torch.compiler.disable
    def prepare(self, batch: Batch, progress: Progress | float) -> Batch:
        """Set the schedules and write the algorithms' draws into ``batch``, before a forward.

        Args:
            batch: see ``pospre.batch``, on the model's device; modified in place.
            progress: completed share of the training, in [0, 1].

        Returns:
            The batch, for ``model(batch)``.

        Raises:
            UserError: the batch is invalid, has no integer ``index`` or ``epoch``, or repeats those
                of other samples; ``progress`` is out of range; the weights change without
                ``after_step``, which the teacher needs; or an optimiser omits tensors that have a
                gradient.
        """
        if not isinstance(progress, Progress):  # a loop without Composer
            progress = as_progress(progress)
            self.loop_watch.begin(self, progress.step)
        for method in self.algorithms:
            method.schedule(self, progress)
        if self.training:
            self._fade(progress.step)
        numbers = self.loop_watch.numbers if self.training else None
        return self.draw_stream(partial(self.draw, batch, numbers))

    def _fade(self, progress: float) -> None:
        """Set the share of positions that fade in, of the encoder and its teacher."""
        copies = [] if self.teacher is None else [self.teacher.module]
        for encoder in (self.encoder, *copies):
            if isinstance(encoder.positions, Fading):
                encoder.positions.fade(progress)

    def draw(self, batch: Batch, numbers: SampleNumbers | None = None) -> Batch:
        """Write the algorithms' draws into ``batch`` and return it; see ``prepare``."""
        return write_draws(self, self.layout, batch, numbers)

    def after_step(self, progress: Progress | float) -> None:
        """Update statistics and the teacher after the optimiser step that began at ``progress``.

        Raises:
            UserError: some tensors have a gradient, but no optimiser holds them; or this is called
                more often than the optimiser steps.
        """
        done = as_progress(progress)
        if not isinstance(progress, Progress):  # a loop without Composer
            self.loop_watch.end(self, done.step)
        for name in self.objectives:  # before the teacher, which also follows their statistics
            self.objectives[name].after_step()
        self.teachers.update(done.step)

    def forward(
        self, batch: Batch, progress: Progress | float | None = None
    ) -> dict[str, Outputs] | StepOutputs:
        """Run the passes, then the objectives.

        Args:
            batch: see ``pospre.batch``.
            progress: completed share of the training, for loops without Composer; the batch is
                then prepared first, see ``prepare``. None: the batch is prepared already.

        Returns:
            The outputs of each objective by name, and ``features``: one vector per view and
            pass, (B·V, D), without gradient. With ``progress``, or if the step is compiled as
            one graph, also ``.loss``, the weighted total, and its ``.terms``.

        Raises:
            UserError: the batch is invalid, lacks an algorithm's keys, or has other views.
        """
        if progress is not None:
            batch = self.prepare(batch, progress)  # a separate line: otherwise each step recompiles
        elif not (self.training and self.is_one_graph):
            return self._run(batch)
        return StepOutputs(*self.run_step(batch))

    def run_step(self, batch: Batch) -> tuple[dict[str, Outputs], dict[str, Tensor]]:
        """Return the outputs of ``forward`` and the terms of ``loss``, as one graph to compile."""
        outputs = self._run(batch)
        return outputs, self._terms(outputs, batch)

    def _run(self, batch: Batch) -> dict[str, Outputs]:
        check_batch(self.layout, batch)
        declared = self.layout.passes
        frozen = {name for name, each in declared.items() if each.reference}
        groups = dict.fromkeys(declared[name].group for name in declared if name not in frozen)
        pixels = {group: self._mixed(self.images(batch, group), batch, group) for group in groups}
        batch = {**batch, **{f"{group}/pixels": views for group, views in pixels.items()}}
        if self.training and self.encoder.positions.is_drawn:
            for group, views in pixels.items():
                batch[place_keys(group)] = view_keys(batch, views.shape[1], self.seed, "places")
        # autocast caches cast weights: if first cast without gradient, they would never learn
        order = sorted(declared, key=lambda name: not declared[name].has_grad)
        passes = {
            name: self.run_pass(name, pixels[declared[name].group], batch)
            for name in order
            if name not in frozen
        }
        features = {name: self._features(tokens) for name, tokens in passes.items()}
        for name in frozen:
            views = self._mixed(
                self.pass_images(declared[name], batch), batch, declared[name].group
            )
            passes[name] = self.run_pass(name, views, batch)
        return {**self.objectives(passes, batch, declared), FEATURES: features}

    def _mixed(self, pixels_BVCHW: Tensor, batch: Batch, group: str) -> Tensor:
        """Return the views of a group as a method mixes them, if one does."""
        mixer = self.layout.mixer(group, training=self.training)
        return pixels_BVCHW if mixer is None else mixer.mix(pixels_BVCHW, batch, self.encoder)

    def _features(self, tokens_RND: Tensor) -> Tensor:
        """Return the mean of the patch tokens, or the class token of a pass without these."""
        prefix = self.encoder.num_prefix_tokens
        tokens_RND = tokens_RND.detach()
        patches = tokens_RND[:, prefix:] if tokens_RND.shape[1] > prefix else tokens_RND[:, :1]
        return patches.mean(1)

    def loss(  # type: ignore[override]  # Composer also takes a dict of terms
        self, outputs: dict[str, Outputs], batch: Batch
    ) -> dict[str, Tensor]:
        """Return ``total``, one term per objective, and ``metric/<name>`` scalars."""
        if self.is_one_graph and isinstance(outputs, StepOutputs):
            return outputs.terms  # from the graph
        return self._terms(outputs, batch)

    def _terms(self, outputs: dict[str, Outputs], batch: Batch) -> dict[str, Tensor]:
        if all(name == FEATURES for name in outputs):
            self.check_trainable()
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

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        """Return Composer's metrics over an ``eval_dataloader``: the mean loss and its terms."""
        return (
            {}
            if is_train
            else {f"loss/{key}": LossTerm(key) for key in ("total", *self.objectives)}
        )

    def update_metric(self, batch: Batch, outputs: dict[str, Outputs], metric: Metric) -> None:
        """Add a batch of the evaluation."""
        assert isinstance(metric, LossTerm)
        metric.update(self.loss(outputs, batch)[metric.term], weight=len(batch[INDEX]))


def _at_once(make: Callable[[], Batch]) -> Batch:
    return make()


def _rows(batch: Batch, key: str | None, num_rows: int) -> Tensor | None:
    return None if key is None else per_row(batch[key], num_rows)
