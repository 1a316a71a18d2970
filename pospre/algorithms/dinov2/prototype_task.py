"""The base of objectives that match a teacher's prototypes: heads, teachers, temperature."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveFloat, PositiveInt
from torch import Tensor, nn

from pospre.algorithms.dinov2.losses import Targets
from pospre.model.calibration import centre
from pospre.model.objective import Objective, Sampled
from pospre.model.progress import Progress
from pospre.model.teacher import Frozen
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.initialisation import init_trunc_normal
from pospre.ranges import PositiveDepth, Share
from pospre.schedules import linear


class Prototypes(nn.Module):
    """A linear map without bias whose rows have length 1 (weight normalisation with g = 1).

    Args:
        dim: width of the input.
        num_prototypes: K.
        train_norm: learn the rows' lengths g too, from 1, as DINOv2's code does.
    """

    def __init__(self, dim: int, num_prototypes: int, *, train_norm: bool = False) -> None:
        super().__init__()
        bound = dim**-0.5  # PyTorch's own initialisation of a Linear
        self.weight = nn.Parameter(torch.empty(num_prototypes, dim).uniform_(-bound, bound))
        self.scale = nn.Parameter(torch.ones(num_prototypes, 1)) if train_norm else None

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (..., K) of features (..., dim)."""
        weight = F.normalize(self.weight, dim=1)
        return F.linear(features, weight if self.scale is None else weight * self.scale)


class PrototypeHead(nn.Module):
    """MLP with GELU, L2 normalisation, prototypes; shared by class and patch tokens.

    Args:
        dim: width of the tokens.
        num_prototypes: K, the number of logits.
        hidden: width of the hidden layers.
        bottleneck: width in which cosines are taken.
        layers: number of layers of the MLP; 1 is a single Linear.
        train_norm: see ``Prototypes``.
    """

    def __init__(
        self,
        dim: int,
        num_prototypes: int,
        *,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
        train_norm: bool = False,
    ) -> None:
        super().__init__()
        widths = [dim, *[hidden] * (layers - 1), bottleneck]
        parts: list[nn.Module] = []
        for before, after in pairwise(widths):
            parts += [nn.Linear(before, after), nn.GELU()]
        self.mlp = nn.Sequential(*parts[:-1])
        init_trunc_normal(self.mlp)
        self.last = Prototypes(bottleneck, num_prototypes, train_norm=train_norm)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (..., K) of tokens (..., D)."""
        # autocast would let a norm of half precision through, where 1e-12 is zero
        return self.last(F.normalize(self.mlp(tokens).float(), dim=-1, eps=1e-12))


@dataclass(kw_only=True, eq=False)
class PrototypeOptions:
    """The heads and the temperatures."""

    num_prototypes: Annotated[int, Field(ge=2)] = 65536
    """K, the number of prototypes."""
    head_hidden: PositiveInt = 2048
    """Width of the head's hidden layers."""
    head_bottleneck: PositiveInt = 256
    """Width in which cosines with the prototypes are taken."""
    head_layers: PositiveDepth = 3
    """Number of layers of the head's MLP."""
    train_norm: bool = False
    """Learn the length of each prototype, as the published code does."""
    separate_heads: bool = False
    """A second head for patches; published for L/14 and g/14."""
    patch_head_bottleneck: PositiveInt | None = None
    """Bottleneck of the second head; None: as the first (L/14: 256, and 384 of the first)."""
    student_temperature: PositiveFloat = 0.1
    """Temperature of the student's softmax."""
    teacher_temperature_start: PositiveFloat = 0.04
    """Temperature of the teacher's softmax at the first step."""
    teacher_temperature_end: PositiveFloat = 0.07
    """Temperature after the warm-up, which is linear per step."""
    teacher_warmup: Share = 0.3
    """Share of the training that the warm-up takes (published: 30 of 100 epochs)."""

    fit_heads: bool = True
    """Fit new heads to ``encoder.weights`` before the first step: their first layer standardises
    tokens, and their bottleneck has mean 0. Otherwise all images begin alike, and may stay so.
    """

    @property
    def last_layers(self) -> tuple[str, ...]:
        """Names of the prototypes within the objective."""
        return ("head.last", "patch_head.last") if self.separate_heads else ("head.last",)

    def temperature(self, progress: Progress) -> float:
        """Return the teacher's temperature, constant after the last step of the warm-up."""
        one = 1 / progress.num_steps if progress.num_steps else 0.0
        last = self.teacher_warmup - one
        done = progress.step / last if last > 0 else 1.0
        return linear(self.teacher_temperature_start, self.teacher_temperature_end, done)


class PrototypeTask(Objective):
    """A head over K prototypes whose teacher follows it by momentum.

    Args:
        encoder: the encoder whose tokens it reads.
        options: the head's size, and the temperatures.
        weight: factor of the loss in the total.
    """

    def __init__(self, encoder: PatchEncoder, options: PrototypeOptions, weight: float) -> None:
        super().__init__()
        self.weight = weight
        self.num_prefix = encoder.num_prefix_tokens
        self.head = prototype_head(encoder, options, options.head_bottleneck)
        self.teacher_head = Frozen(self.head)
        start = torch.tensor(options.teacher_temperature_start)
        self.temperature = nn.Buffer(start, persistent=False)

    def calibrate(self, sampled: Sampled) -> None:
        """Fit the head to class tokens, which it shares with the patches."""
        centre(self.head.mlp, sampled.classes)

    def after_step(self) -> None:
        """Move the centres of the targets."""
        for part in self.children():
            if isinstance(part, Targets):
                part.after_step()

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the head with its teacher."""
        return [(self.head, self.teacher_head.module)]

    def patches(self, tokens_RTD: Tensor) -> Tensor:
        """Return the patches of all crops in a row: (R·N, D)."""
        return tokens_RTD[:, self.num_prefix :].flatten(0, 1)


class TwoPrototypeTasks(PrototypeTask):
    """Class tokens and patches, over the prototypes of one head or with a head for each."""

    def __init__(self, encoder: PatchEncoder, options: PrototypeOptions, weight: float) -> None:
        super().__init__(encoder, options, weight)
        self.patch_head: PrototypeHead | None = None
        self.teacher_patch_head: Frozen | None = None
        if options.separate_heads:
            bottleneck = options.patch_head_bottleneck or options.head_bottleneck
            self.patch_head = prototype_head(encoder, options, bottleneck)
            self.teacher_patch_head = Frozen(self.patch_head)

    def mirrored(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the heads with their teachers."""
        pairs = super().mirrored()
        if self.patch_head is not None and self.teacher_patch_head is not None:
            pairs.append((self.patch_head, self.teacher_patch_head.module))
        return pairs

    def calibrate(self, sampled: Sampled) -> None:
        """Fit the head to class tokens, and a second one to patches."""
        super().calibrate(sampled)
        if self.patch_head is not None:
            centre(self.patch_head.mlp, sampled.patches)

    def logits(self, classes_BSD: Tensor, patches_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's logits of class tokens (B, S, K) and of patches (S, K)."""
        return _logits(self.head, self.patch_head, classes_BSD, patches_SD)

    def teacher_logits(self, classes_BSD: Tensor, patches_SD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's."""
        return _logits(self.teacher_head, self.teacher_patch_head, classes_BSD, patches_SD)


def _logits(
    head: nn.Module, patch_head: nn.Module | None, classes_BSD: Tensor, patches_SD: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the logits of both; a shared head runs once."""
    shape = classes_BSD.shape[:2]
    if patch_head is not None:
        return head(classes_BSD), patch_head(patches_SD)
    both = head(torch.cat([classes_BSD.flatten(0, 1), patches_SD]))
    classes, patches = both.tensor_split([shape.numel()])
    return classes.unflatten(0, shape), patches


def prototype_head(
    encoder: PatchEncoder, options: PrototypeOptions, bottleneck: int
) -> PrototypeHead:
    """Return a new head of the size in the options, with its own ``bottleneck``."""
    return PrototypeHead(
        encoder.embed_dim,
        options.num_prototypes,
        hidden=options.head_hidden,
        bottleneck=bottleneck,
        layers=options.head_layers,
        train_norm=options.train_norm,
    )
