"""Objectives, a model's set of them, and the objective that predicts hidden pixels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torchmetrics import MeanMetric

from pospre.batch import HIDDEN, Batch
from pospre.nn.block import Block
from pospre.nn.encoder_interface import patchify
from pospre.nn.masking import gather_tokens
from pospre.nn.vit import Encoder

Outputs = dict[str, Tensor]
Predicts = Literal["places", "view_places", "content"]


class Objective(nn.Module, ABC):
    """One pretext task: a head over encoder tokens and its loss.

    It owns its parameters and uses them only in ``forward``, so that FSDP can shard them. It never
    holds the encoder. ``loss`` and ``metrics`` are pure functions of the outputs.

    Attributes:
        predicts: ``places``: of patches in their view; ``view_places``: of views in the image or in
            each other; or ``content``: anything else. Required if the algorithm edits positions.
            ``places`` and ``view_places`` are refused if the encoder gets the answer.
        weight: factor of this loss in the total.
        num_prototypes: number of prototypes that its targets are distributions over. Runs log their
            ``entropy`` and check that it is neither 0 nor maximal. None: other targets.
        frozen_epochs: number of initial epochs with learning rate 0, by the start of a parameter's
            name within this module.
    """

    predicts: ClassVar[Predicts | None] = None
    weight: float = 1.0
    num_prototypes: int | None = None
    frozen_epochs: Mapping[str, int] = MappingProxyType({})

    @abstractmethod
    def forward(self, passes: dict[str, Tensor], batch: dict[str, Tensor]) -> Outputs:
        """Predict from the tokens of the encoder passes, given by pass name."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of ``forward``'s outputs."""

    def metrics(self, outputs: Outputs, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return detached scalars to log; default: none."""
        return {}

    def after_step(self) -> None:
        """Update statistics of the batches, such as a centre, once per optimiser step.

        ``forward`` runs for every microbatch of a step: it only gathers what this uses. Several
        algorithms may call it after a step. Default: nothing.
        """

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return its (student, teacher) modules for momentum updates; default: none.

        The teacher is the ``module`` of a ``pospre.model.teacher.Frozen``.
        """
        return []

    def averaged(self) -> list[tuple[nn.Module, nn.Module]]:
        """Create teachers for modules outside the encoder; return (student, teacher) pairs.

        ``ema_teacher`` calls it once to average these modules as well; default: none.
        """
        return []


Kind = TypeVar("Kind", bound=Objective)


class ObjectiveSet(nn.Module):
    """The objectives of a model by name, run in the order of attachment.

    A module with its own forward, because FSDP2 refuses a bare container.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()

    def add(self, name: str, objective: Objective) -> None:
        """Add an objective under the name of its loss term."""
        self.named[name] = objective

    def __getitem__(self, name: str) -> Objective:
        objective = self.named[name]
        assert isinstance(objective, Objective)
        return objective

    def find(self, kind: type) -> tuple[str, Any]:
        """Return the name of the first objective of class ``kind``, and the objective."""
        return next((name, each) for name, each in self.named.items() if isinstance(each, kind))

    def of(self, kind: type[Kind]) -> Kind:
        """Return the first objective of class ``kind``."""
        found: Kind = self.find(kind)[1]
        return found

    def has(self, kind: type) -> bool:
        """Return whether there is an objective of class ``kind``."""
        return any(isinstance(each, kind) for each in self.named.values())

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def forward(
        self,
        passes: dict[str, Tensor],
        batch: dict[str, Tensor],
        readers: Mapping[str, Sequence[str]],
    ) -> dict[str, Outputs]:
        """Run every objective on the passes it reads; return the outputs by name.

        Args:
            passes: the tokens of every pass by name.
            batch: the batch.
            readers: by pass, the objectives that read it.
        """
        return {
            name: objective({key: passes[key] for key in passes if name in readers[key]}, batch)
            for name, objective in self.named.items()
        }

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Return whether Composer's FSDP2 shards ``module``: yes for decoder blocks."""
        return isinstance(module, Block)


class StepOutputs(dict[str, Outputs]):
    """The result of ``model(batch, progress=…)``: the outputs of each objective by name.

    Attributes:
        loss: the weighted total.
        terms: ``total``, the loss of each objective by name, and ``metric/<name>`` scalars.
    """

    def __init__(self, outputs: Mapping[str, Outputs], terms: dict[str, Tensor]) -> None:
        super().__init__(outputs)
        self.terms = terms

    @property
    def loss(self) -> Tensor:
        """The weighted total, for ``backward``."""
        return self.terms["total"]


# DDP and FSDP search a forward's return value for tensors
register_pytree_node(
    StepOutputs,
    lambda outputs: ([dict(outputs), outputs.terms], None),
    lambda parts, _: StepOutputs(*parts),
)


class LossTerm(MeanMetric):
    """The mean over samples of the loss's ``term``."""

    def __init__(self, term: str) -> None:
        super().__init__()
        self.term = term


class PixelObjective(Objective):
    """An objective whose ``forward`` returns ``predicted`` and ``target``, each (B, N−K, F).

    They have F values for each patch of ``view/hidden``, in the units of the loss. The evaluation
    ``reconstructions`` only needs these.

    Args:
        encoder: its patches are predicted.
        norm_pix: whether pixels are normalised within each patch.
    """

    def __init__(self, encoder: Encoder, *, norm_pix: bool = False) -> None:
        super().__init__()
        self.patch_size, self.norm_pix = encoder.patch_size, norm_pix
        self.num_prefix = encoder.num_prefix_tokens

    def target(self, batch: Batch) -> Tensor:
        """Return the hidden patches in the units of the loss."""
        patches = patchify(batch["view/pixels"][:, 0], self.patch_size)
        target = gather_tokens(patches, batch[HIDDEN])
        if not self.norm_pix:
            return target
        mean = target.mean(-1, keepdim=True)
        variance = target.var(-1, keepdim=True)  # unbiased, as published
        return (target - mean) / (variance + 1e-6).sqrt()

    def painted(self, outputs: Outputs, true: Tensor) -> Tensor:
        """Return the prediction in pixels, with each true patch's mean and deviation."""
        predicted = outputs["predicted"].float()
        if self.norm_pix:
            predicted = predicted * true.std(-1, keepdim=True) + true.mean(-1, keepdim=True)
        return predicted
