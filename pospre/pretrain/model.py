"""The one model that every host and every position algorithm attaches to."""

from dataclasses import dataclass
from functools import partial

import torch
from composer.models import ComposerModel
from torch import Tensor, nn

from pospre.batch import Batch, flip_key, image_key
from pospre.errors import UserError
from pospre.nn.encoder import Encoder
from pospre.pretrain.augment import IMAGENET_MEAN, IMAGENET_STD, DeviceAugment
from pospre.pretrain.objective import Objective, ObjectiveSet, Outputs


@dataclass(frozen=True)
class EncoderPass:
    """One run of the encoder over the batch.

    Attributes:
        keep: batch key of the patches to encode (B, K), or None for all of them.
        positions: name of the position module that edits what is added, or None.
        grad: whether gradients flow through this pass.
    """

    keep: str | None = None
    positions: str | None = None
    grad: bool = True


class PositionSet(nn.Module):
    """The position modules of a model by name; a module with a forward, as FSDP2 wants."""

    def __init__(self) -> None:
        super().__init__()
        self.named = nn.ModuleDict()

    def forward(self, name: str, position_BKD: Tensor, batch: Batch) -> Tensor:
        """Let the module ``name`` edit the positions (B, K, D) of a pass."""
        return self.named[name](position_BKD, batch)


class PretrainModel(ComposerModel):
    """An encoder, the passes declared over it, and the objectives that read their tokens.

    Algorithms attach to it before the optimiser is made: they claim the batch keys they write,
    declare passes, and add objectives and position modules.

    Args:
        encoder: what is pre-trained and exported.
        seed: the run's seed; every mask is a function of it.
        mean: of the pixel normalisation, RGB in [0, 1].
        std: of the pixel normalisation.
    """

    def __init__(
        self,
        encoder: Encoder,
        *,
        seed: int,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.augment = DeviceAugment(mean, std)
        self.positions = PositionSet()
        self.objectives = ObjectiveSet()
        self.passes: dict[str, EncoderPass] = {}
        self.writers: dict[str, str] = {}
        self.seed = seed

    def claim(self, key: str, writer: str) -> None:
        """Register ``writer`` as the only algorithm that writes the batch key ``key``.

        Raises:
            UserError: another algorithm already writes it.
        """
        owner = self.writers.setdefault(key, writer)
        if owner != writer:
            raise UserError(
                f"algorithms: '{owner}' and '{writer}' both write the batch key '{key}'. "
                "Use one of them, or attach the host first."
            )

    def add_pass(self, name: str, encoder_pass: EncoderPass) -> None:
        """Declare an encoder pass, or give a declared one the position module it lacks.

        Raises:
            UserError: two algorithms edit the positions of the same pass.
        """
        before = self.passes.get(name, encoder_pass)
        if before.positions not in (None, encoder_pass.positions):
            raise UserError(
                f"algorithms: '{before.positions}' and '{encoder_pass.positions}' both edit the "
                f"positions of the pass '{name}'. Use one of them."
            )
        self.passes[name] = encoder_pass

    def add_objective(self, name: str, objective: Objective) -> None:
        """Add an objective; ``name`` becomes its loss term."""
        self.objectives.add(name, objective)

    def images(self, batch: Batch, group: str = "view") -> Tensor:
        """Return the group's flipped, normalised views: float32 (B, V, 3, H, W)."""
        return self.augment(batch[image_key(group)], batch[flip_key(group)])

    def encode(self, name: str, images_B3HW: Tensor, batch: Batch) -> Tensor:
        """Run the declared pass ``name``: (B, 1+K, D) tokens."""
        declared = self.passes[name]
        keep = None if declared.keep is None else batch[declared.keep]
        edit = None
        if declared.positions is not None:
            edit = partial(self._edit_positions, declared.positions, batch)
        if declared.grad:
            return self.encoder(images_B3HW, keep, edit)
        with torch.no_grad():
            return self.encoder(images_B3HW, keep, edit)

    def _edit_positions(self, name: str, batch: Batch, position_BKD: Tensor) -> Tensor:
        return self.positions(name, position_BKD, batch)

    def forward(self, batch: Batch) -> dict[str, Outputs]:
        """Run the passes, then the objectives.

        Args:
            batch: see ``pospre.batch``; the algorithms have written their masks into it.

        Returns:
            The outputs of each objective by name.
        """
        pixels = self.images(batch)
        batch = {**batch, "view/pixels": pixels}
        # autocast keeps the weights it casts: cast without gradient first, they would never learn
        order = sorted(self.passes, key=lambda name: not self.passes[name].grad)
        passes = {name: self.encode(name, pixels[:, 0], batch) for name in order}
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
