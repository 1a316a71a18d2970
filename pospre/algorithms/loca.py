"""LOCA: where in a reference view each patch of a query view lies (arXiv 2212.02400).

Patches of query views attend once to a few patches of a reference view, and each says in which of
its N cells it lies. They also predict the cluster that a momentum teacher gives the reference
there. Only patches inside the reference count. The loss is the cross-entropy of places, plus that
of clusters, less the entropy of the mean predicted cluster.
"""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre import draws
from pospre.algorithms.dinov2.losses import sinkhorn, soft_cross_entropy
from pospre.algorithms.dinov2.prototype_task import PrototypeHead
from pospre.batch import EPOCH, INDEX, Batch, flip_key, known_boxes, view_keys
from pospre.collectives import num_ranks, sum_over_ranks
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective, Outputs
from pospre.model.position_task import PlaceObjective, ViewAnswers
from pospre.model.refusals import check_unmixed
from pospre.model.task_description import TaskDescription
from pospre.model.teacher import Frozen, Momentum
from pospre.model.uses import ALL, Pass, Uses
from pospre.nn.block import CrossBlock
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_weights
from pospre.nn.masking import gather_tokens, num_visible, scatter_tokens, slot_mask
from pospre.nn.places import label_in, mirrored_boxes
from pospre.nn.positions.sincos import sincos_table
from pospre.ranges import PositiveShare, Ratio

QUERIES = ("query", "focal")
CONTEXT, KEPT = "loca/context", "loca/query"
PLACE, ENCODED = "loca/place", "loca/encoded"


class PlaceInReference(PlaceObjective):
    """The attention to the reference, the classifier of places, and the clusters."""

    def __init__(self, encoder: PatchEncoder, options: "LOCA") -> None:
        super().__init__()
        self.weight, self.options = options.weight, options
        self.num_prefix, dim = encoder.num_prefix_tokens, encoder.embed_dim
        self.attend = CrossBlock(dim, encoder.positions.dims.num_heads)
        self.norm = nn.LayerNorm(dim, 1e-6)
        self.predict = nn.Linear(dim, encoder.num_patches)
        init_weights(self)
        self.clusters = PrototypeHead(
            dim,
            options.num_prototypes,
            hidden=options.head_hidden,
            bottleneck=options.head_bottleneck,
        )
        self.teacher_clusters = Frozen(self.clusters)
        told = options.tells_places(encoder)
        cells = sincos_table(dim, *encoder.grid) if told else torch.zeros(1, dim)
        self.cells = nn.Buffer(cells, persistent=False)

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the head of clusters with its teacher."""
        return [(self.clusters, self.teacher_clusters.module)]

    def forward(self, passes: dict[str, Tensor], batch: Batch) -> Outputs:
        """Return ``logits`` (B, Q, N) and what the loss has of clusters, of all query patches."""
        options, reference = self.options, passes["teacher"][:, self.num_prefix :]
        samples = len(reference)
        groups = [passes[group][:, self.num_prefix :] for group in QUERIES if group in passes]
        query = torch.cat([each.unflatten(0, (samples, -1)).flatten(1, 2) for each in groups], 1)
        context = gather_tokens(reference + self.cells, batch[CONTEXT])
        outputs = {"logits": self.predict(self.norm(self.attend(query, context)))}
        # Sinkhorn starts from softmaxed rows, as in the published code
        logits = self.teacher_clusters(reference).float().flatten(0, 1)
        targets = sinkhorn((logits / options.teacher_temperature).log_softmax(-1), 1.0)
        targets = targets.unflatten(0, reference.shape[:2])
        predicted, temperature = self.clusters(query), options.student_temperature
        wanted = gather_tokens(targets, self.places(batch).clamp_min(0))
        outputs["cluster"] = soft_cross_entropy(predicted, wanted, temperature)
        mean_K = (predicted.float() / temperature).softmax(-1).mean((0, 1))
        mean_K = sum_over_ranks(mean_K) / num_ranks()
        outputs["mean_entropy"] = torch.special.entr(mean_K).sum()
        outputs["entropy"] = torch.special.entr(targets).sum(-1).mean()
        return outputs

    def places(self, batch: Batch) -> Tensor:
        """Return the reference's cell of every encoded query patch, −1 outside: int64 (B, Q)."""
        return batch[PLACE].gather(1, batch[ENCODED])

    def loss(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Return the sum of both cross-entropies, over patches inside, less the mean's entropy."""
        places = self.places(batch)
        inside = places >= 0
        # of all ranks' patches: their mean would weigh a rank's by how few it has
        count = (sum_over_ranks(inside.sum().float()) / num_ranks()).clamp_min(1e-6)
        logits = outputs["logits"].float().mT
        cell = F.cross_entropy(logits, places, ignore_index=-1, reduction="sum") / count
        cluster = (outputs["cluster"] * inside).sum() / count
        return cell + cluster - outputs["mean_entropy"]

    def answers(self, outputs: Outputs, batch: Batch) -> ViewAnswers:
        """Return the predicted cells of all patches of the query views, row by row.

        Those that are encoded and lie inside the reference count.
        """
        places, index, logits = batch[PLACE], batch[ENCODED], outputs["logits"]
        nothing = logits.new_zeros(*places.shape, logits.shape[-1])
        asked = slot_mask(index, places.shape[1])
        answers = scatter_tokens(nothing, index, logits)
        return ViewAnswers(answers, places, ~asked, asked & (places >= 0))

    def metrics(self, outputs: Outputs, batch: Batch) -> dict[str, Tensor]:
        """Return the ``accuracy`` of places, the entropy of targets and that of the mean cluster.

        ``inside`` is the share of query patches that lie in the reference.
        """
        places = self.places(batch)
        inside = places >= 0
        right = (outputs["logits"].argmax(-1) == places) & inside
        return {
            "accuracy": right.sum() / inside.sum().clamp_min(1),
            "entropy": outputs["entropy"],
            "mean_entropy": outputs["mean_entropy"],
            "inside": inside.float().mean(),
        }


@dataclass(kw_only=True, eq=False)
class LOCA(PretrainAlgorithm):
    """Predict where patches of crops lie in a reference view, and its clusters there.

    Needs the group ``view``, the reference, and ``query``, one or more crops of the whole image;
    ``focal``, smaller crops, is optional. Writes ``loca/context`` (B, M), the patches of the
    reference that give keys, a run in row-major order, and ``loca/query`` (B, V, K), the patches
    that are encoded of each view of ``query``. All patches of ``focal`` are. ``loca/place`` (B, P)
    has the reference's cell of all patches of the queries, ``loca/encoded`` (B, Q) which of them
    are encoded.
    """

    pretext_task: ClassVar[TaskDescription | None] = TaskDescription(
        "A part of a picture, and some patches of a larger part. Where in it does each patch lie?",
        "accuracy",
        "share of patches inside the larger part that are put in their place",
    )
    objective: ClassVar[type[Objective] | None] = PlaceInReference

    query_mask_ratio: Ratio = 0.64
    """Share of the patches of ``query`` that are left out, at random, in [0, 1)."""
    context_ratio: PositiveShare = 0.2
    """Share of the reference's patches that queries see, in (0, 1]."""
    context_places: bool | None = None
    """Add fixed sinusoids of their cells to these patches, in the head; null: unless the encoder's
    positions are only added (its tokens then tell them, as published).
    """
    num_prototypes: Annotated[int, Field(ge=2)] = 4096
    """Number of clusters K."""
    head_hidden: PositiveInt = 2048
    """Width of the hidden layers of the head of clusters."""
    head_bottleneck: PositiveInt = 256
    """Width in which cosines with the clusters are taken."""
    student_temperature: PositiveFloat = 0.1
    """Temperature of predicted clusters."""
    teacher_temperature: PositiveFloat = 0.05
    """Temperature of the teacher's, before Sinkhorn's three rounds."""
    momentum_start: float | None = 0.996
    """Momentum of the teacher at the first step; None: another algorithm's teacher."""
    momentum_end: float = 1.0
    """Limit of the momentum at the last step, along a cosine."""
    weight: NonNegativeFloat = 1.0
    """Factor of this loss in the total."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Declare the teacher's pass over the reference, and those over the queries."""
        keys: dict[str, str | None] = {CONTEXT: "queries see them", PLACE: None, ENCODED: None}
        passes = {"teacher": Pass(teacher=True), "focal": Pass("focal", optional=True)}
        passes["query"] = Pass("query", over=KEPT if self.query_mask_ratio else ALL)
        if self.query_mask_ratio:
            keys[KEPT] = None
        return Uses(
            views={"view": 1, "query": None},
            passes=passes,
            keys=keys,
            predicts="view_places",
            teacher=Momentum.given(self.momentum_start, self.momentum_end),
            couples={"the targets": True},
            entropies={"entropy": math.log(self.num_prototypes)},
        )

    def tells_places(self, encoder: PatchEncoder) -> bool:
        """Return whether the head adds the places of the reference's patches."""
        if self.context_places is None:
            return not encoder.positions.is_added
        return self.context_places

    def num_context(self, encoder: PatchEncoder) -> int:
        """Return how many patches of the reference queries see: ``int(N·ratio)``."""
        return int(encoder.num_patches * self.context_ratio)

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if queries would see no patch, or none that has a place."""
        super().check_encoder(encoder)
        if not self.num_context(encoder):
            raise UserError(
                f"loca.context_ratio = {self.context_ratio} shows none of {encoder.num_patches} "
                f"patches of the reference. Use at least {1 / encoder.num_patches:.4f}."
            )
        if not (encoder.positions.can_forget or self.tells_places(encoder)):
            raise UserError(
                "loca.context_places = False with encoder.positions = "
                f"{encoder.positions.name}: nothing would tell where the reference's patches are. "
                "Remove it."
            )

    def check(self, layout: Layout) -> None:
        """Raise ``UserError`` if no patch of ``query`` would be left, or the reference is mixed."""
        check_unmixed(layout, self.module_name())
        self.num_kept(layout.grid("query"))

    def num_kept(self, grid: tuple[int, int]) -> int:
        """Return how many patches of a view of ``query`` are encoded."""
        return num_visible(math.prod(grid), self.query_mask_ratio, key="loca.query_mask_ratio")

    def write(self, batch: Batch, model: PretrainModel) -> None:
        """Draw the patches that queries see, and those of ``query``; find where all of them lie."""
        patches, count = model.encoder.num_patches, self.num_context(model.encoder)
        keys = draws.sample_keys(model.seed, batch[EPOCH], batch[INDEX], 0, CONTEXT)
        start = (draws.uniform(keys, 1) * (patches - count + 1)).long()
        batch[CONTEXT] = start + torch.arange(count, device=start.device)
        # labels are integers, which no precision of FSDP2 rounds as it would boxes
        cells = [self._cells(batch, group, model) for group in QUERIES if group in model.views]
        batch[PLACE] = torch.cat(cells, 1)
        encoded = torch.arange(batch[PLACE].shape[1], device=start.device).expand(len(start), -1)
        if self.query_mask_ratio:
            grid, views = model.grid("query"), model.views["query"].count
            own = math.prod(grid)
            order = draws.permutation(view_keys(batch, views, model.seed, KEPT), own)
            batch[KEPT] = order[..., : self.num_kept(grid)]
            first = encoded[:, : views * own].unflatten(1, (views, own)).gather(2, batch[KEPT])
            encoded = torch.cat([first.flatten(1), encoded[:, views * own :]], dim=1)
        batch[ENCODED] = encoded

    def _cells(self, batch: Batch, group: str, model: PretrainModel) -> Tensor:
        """Return the reference's cell of all patches of a group's views: (B, V·N)."""
        reference, views = (
            mirrored_boxes(known_boxes(batch, each, self.module_name()), batch[flip_key(each)])
            for each in ("view", group)
        )
        whole = reference.expand_as(views).flatten(0, 1)
        cells = label_in(whole, model.encoder.grid, views.flatten(0, 1), model.grid(group))
        return cells.unflatten(0, views.shape[:2]).flatten(1)
