"""The momentum teacher: copies that follow the trained modules, without gradients."""

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pospre.errors import UserError

Shape = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True)
class Momentum:
    """The momentum schedule of a teacher: the share kept at each step.

    Attributes:
        start: at the first step, in [0, 1).
        end: limit at the last step, in [start, 1].
        shape: ``cosine`` (BYOL, LUT, DINOv2), ``linear`` (I-JEPA) or ``constant``.
    """

    start: float
    end: float = 1.0
    shape: Shape = "cosine"

    @classmethod
    def given(cls, start: float | None, end: float, shape: Shape = "cosine") -> "Momentum | None":
        """Return an algorithm's options as a schedule; None if ``start`` is None."""
        return None if start is None else cls(start, end, shape)

    def at(self, progress: float) -> float:
        """Return the momentum after the step that began at ``progress`` in [0, 1)."""
        if self.shape == "constant":
            return self.start
        share = progress if self.shape == "linear" else (1 - math.cos(math.pi * progress)) / 2
        return self.start + (self.end - self.start) * share

    def check(self, owner: str) -> None:
        """Raise ``UserError`` naming the algorithm ``owner`` if momenta are out of range."""
        if not 0 <= self.start < 1 or not self.start <= self.end <= 1:
            raise UserError(
                f"{owner}: the teacher's momentum goes from {self.start} to {self.end}, but must "
                "satisfy 0 <= start < 1 and start <= end <= 1. 0.996 to 1 is usual."
            )


class Frozen(nn.Module):
    """A copy of a module that stays in evaluation mode and gets no gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Frozen":
        """Stay in evaluation mode: no drop path; batch norms use running statistics."""
        return super().train(False)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the copy without gradient."""
        with torch.no_grad():
            return self.module(*arguments, **options)

    def fsdp_wrap_fn(self, module: nn.Module) -> bool:
        """Return whether Composer's FSDP2 shards ``module``, as in the original."""
        original = getattr(self.module, "fsdp_wrap_fn", None)
        return original is not None and original(module)


class TeacherManager:
    """The (student, teacher) pairs of a model and their common momentum.

    Attributes:
        momentum: of all teachers of a model; None: no teacher.
        owner: the method that it belongs to.
        pairs: (student, teacher) modules of the same structure.
    """

    def __init__(self, owner: str | None = None, momentum: Momentum | None = None) -> None:
        self.owner, self.momentum = owner, momentum
        self.pairs: list[tuple[nn.Module, nn.Module]] = []
        self._made: dict[int, int] = {}  # versions of teachers that only have copied weights

    def copy(self, student: nn.Module) -> Frozen:
        """Return a new teacher that follows ``student``."""
        teacher = Frozen(student)
        self.mirror(student, teacher.module)
        return teacher

    def mirror(self, student: nn.Module, teacher: nn.Module) -> None:
        """Make ``teacher``, a module of the same structure, follow ``student`` from now on."""
        self.pairs.append((student, teacher))
        self._made[id(teacher)] = _version(teacher)
        teacher.register_load_state_dict_post_hook(partial(_note_loaded, self._made))

    def update(self, progress: float) -> None:
        """Update the teachers from the trained weights, after the step begun at ``progress``."""
        if self.momentum is not None:
            self._made.clear()
            follow(self.pairs, self.momentum.at(progress))

    def catch_up(self) -> bool:
        """Copy weights that the students got since; return whether there were any.

        Teachers that were loaded, changed or updated keep their weights, and so do sharded ones:
        within a forward they cannot be read.

        Raises:
            UserError: the students have other tensors than their teachers.
        """
        behind = [
            (student, teacher)
            for student, teacher in self.pairs
            if not any(isinstance(part, FSDPModule) for part in student.modules())
            and not all(own.equal(copied) for own, copied in _paired([(student, teacher)]))
            and self._made.get(id(teacher)) == _version(teacher)
        ]
        follow(behind, 0.0)
        return bool(behind)


def _note_loaded(made: dict[int, int], teacher: nn.Module, keys: Any) -> None:
    made.pop(id(teacher), None)


def _version(module: nn.Module) -> int:
    """Return a number that rises when a tensor is changed in place."""
    return sum(each._version for each in _weights(module))


@torch.no_grad()
def follow(pairs: list[tuple[nn.Module, nn.Module]], momentum: float) -> None:
    """Update every teacher: parameters and floating buffers are averaged, others copied.

    Args:
        pairs: (student, teacher) modules of the same structure and sharding.
        momentum: share of the teacher that is kept.
    """
    teachers: list[Tensor] = []
    students: list[Tensor] = []
    for value, theirs in _paired(pairs):
        mine = local(theirs)
        if mine.is_floating_point():
            teachers.append(mine)
            students.append(local(value).to(mine.dtype))
        else:
            mine.copy_(local(value))
    if teachers:
        torch._foreach_lerp_(teachers, students, 1 - momentum)


def _paired(pairs: list[tuple[nn.Module, nn.Module]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the tensors of all students and their teachers."""
    for student, teacher in pairs:
        own, theirs = _weights(student), _weights(teacher)
        if len(own) != len(theirs):
            raise UserError(
                f"{type(student).__name__} has {len(own)} tensors, but its teacher, copied before, "
                f"{len(theirs)}. Change the encoder, such as by LoRA, before the model is "
                "made: pospre.PretrainModel(encoder, algorithms, seed=…)."
            )
        yield from zip(own, theirs, strict=True)


def _weights(module: nn.Module) -> list[Tensor]:
    """Return the tensors of ``state_dict``, without its hooks and names, which are slow."""
    parts = [*module.modules()]
    if any(isinstance(part, FSDPModule) for part in parts):  # its hooks reshard all of them
        return [*module.state_dict(keep_vars=True).values()]
    tensors: list[Tensor | None] = []
    for part in parts:
        hidden = part._non_persistent_buffers_set
        tensors += part._parameters.values()
        tensors += [buffer for name, buffer in part._buffers.items() if name not in hidden]
    return [tensor for tensor in tensors if tensor is not None]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; others are whole."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
