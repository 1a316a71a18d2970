"""Objectives, a model's set of them, and the objective that predicts hidden pixels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torchmetrics import MeanMetric

from pospre.batch import HIDDEN, Batch
from pospre.model.passes import EncoderPass
from pospre.nn.block import Block
from pospre.nn.encoder_interface import PatchEncoder, patchify
from pospre.nn.masking import gather_tokens

Outputs = dict[str, Tensor]


class Sampled(NamedTuple):
    """Tokens of R views, to which heads are fitted before the first step.

    Attributes:
        classes: (R, D) the first token of each view.
        patches: (M, D) some patches of each view; later views have other ones.
        places: (M,) their places in the grid, row-major.
        grid: (rows, columns) of it.
    """

    classes: Tensor
    patches: Tensor
    places: Tensor
    grid: tuple[int, int]


class Objective(nn.Module, ABC):
    """One pretext task: a head over encoder tokens and its loss.

    It owns its parameters and uses them only in ``forward``, so that FSDP can shard them. It never
    holds the encoder. ``loss`` and ``metrics`` are pure functions of the outputs.

    Attributes:
        weight: factor of this loss in the total.
    """

    weight: float = 1.0

    @abstractmethod
    def forward(self, passes: dict[str, Tensor], batch: dict[str, Tensor]) -> Outputs:
        """Predict from the tokens of the encoder passes, given by pass name."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: dict[str, Tensor]) -> Tensor:
        """Return the scalar loss of ``forward``'s outputs."""

    def metrics(self, outputs: Outputs, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return detached scalars to log; default: none."""
        return {}

    def calibrate(self, sampled: "Sampled") -> None:
        """Fit the head to tokens of the start's views; see ``Uses.calibrates``."""
        raise NotImplementedError

    def after_step(self) -> None:
        """Update statistics of the batches, such as a centre, once per optimiser step.

        ``forward`` runs for every microbatch of a step: it only gathers what this uses. Default:
        nothing.
        """

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return its (student, teacher) modules for momentum updates; default: none.

        The teacher is the ``module`` of a ``pospre.model.teacher.Frozen``.
        """
        return []


class ObjectiveSet(nn.Module):
    """The objectives of a model by the names of their methods.

    A module with its own forward, because FSDP2 refuses a bare container.
    """

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()

    def __getitem__(self, name: str) -> Objective:
        objective = self.named[name]
        assert isinstance(objective, Objective)
        return objective

    def of(self, kind: type) -> Any:
        """Return the first objective of class ``kind``."""
        return next(each for each in self.named.values() if isinstance(each, kind))

    def __contains__(self, name: str) -> bool:
        return name in self.named

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def forward(
        self,
        passes: dict[str, Tensor],
        batch: dict[str, Tensor],
        declared: Mapping[str, EncoderPass],
    ) -> dict[str, Outputs]:
        """Run every objective on the passes it reads; return the outputs by name.

        Args:
            passes: the tokens of every pass by name.
            batch: the batch.
            declared: the passes by name, with their readers.
        """
        return {
            name: objective(
                {key: passes[key] for key in passes if name in declared[key].readers}, batch
            )
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

    def __init__(self, encoder: PatchEncoder, *, norm_pix: bool = False) -> None:
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
