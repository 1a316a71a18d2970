"""The heads with batch norm of BYOL, LUT and LeJEPA, used as projector and as predictor."""

from itertools import pairwise

import torch
from composer.utils import dist as composer_dist
from torch import Tensor, nn

from pospre.collectives import is_joined, num_ranks, sum_over_ranks
from pospre.errors import UserError


class RankBatchNorm(nn.BatchNorm1d):
    """Batch norm with statistics over the rows of all ranks, which all have the same number.

    Like torch's ``SyncBatchNorm``, which is for GPUs only; DDP refuses it on CPUs. The running
    statistics move once per step: every microbatch starts from those ``before`` the step, and
    ``after_step`` sets the mean of what they end with.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    momentum: float  # none of these is None here

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.before_2D = nn.Buffer(torch.zeros(2, num_features), persistent=False)
        self.ends_2D = nn.Buffer(torch.zeros(2, num_features), persistent=False)
        self.before_tracked = nn.Buffer(torch.tensor(0), persistent=False)
        self.rows = nn.Buffer(torch.zeros(()), persistent=False)

    def begin(self) -> None:
        """Start a microbatch; ``forward`` may run several times in it."""
        begun, tracked = self.rows > 0, self.num_batches_tracked
        self.before_2D.copy_(torch.where(begun, self.before_2D, self._running()))
        self.before_tracked.copy_(torch.where(begun, self.before_tracked, tracked))
        self._set(self.before_2D)
        tracked.copy_(self.before_tracked)

    def end(self, rows: int) -> None:
        """End a microbatch of so many samples."""
        self.rows.add_(rows)
        self.ends_2D.lerp_(self._running(), rows / self.rows)

    def after_step(self) -> None:
        """Set the running statistics, if there were microbatches since the last call."""
        self._set(torch.where(self.rows > 0, self.ends_2D, self._running()))
        self.rows.zero_()

    def _running(self) -> Tensor:
        return torch.stack([self.running_mean, self.running_var])

    def _set(self, running_2D: Tensor) -> None:
        self.running_mean.copy_(running_2D[0])
        self.running_var.copy_(running_2D[1])

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (rows, D)."""
        if not (self.training and is_joined()):
            return super().forward(input)
        with torch.autocast(input.device.type, enabled=False):
            rows, count = input.float(), len(input) * num_ranks()
            mean = sum_over_ranks(rows.sum(0)) / count
            centred = rows - mean
            variance = sum_over_ranks(centred.square().sum(0)) / count
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean.detach(), self.momentum)
            self.running_var.lerp_(variance.detach() * (count / (count - 1)), self.momentum)
            normalised = centred * (variance + self.eps).rsqrt() * self.weight + self.bias
        return normalised.to(input.dtype)


class Projector(nn.Sequential):
    """Linear maps with batch norm and ReLU between them; no norm at the end.

    Args:
        widths: of the input, in between, and of the output.
        bias: whether the last map has a bias; the others have none.
    """

    def __init__(self, *widths: int, bias: bool = False) -> None:
        parts: list[nn.Module] = []
        for before, after in pairwise(widths[:-1]):
            parts += [nn.Linear(before, after, bias=False), RankBatchNorm(after), nn.ReLU()]
        super().__init__(*parts, nn.Linear(widths[-2], widths[-1], bias=bias))

    @property
    def norms(self) -> list[RankBatchNorm]:
        """The batch norms."""
        return [part for part in self if isinstance(part, RankBatchNorm)]

    def forward(self, rows: Tensor) -> Tensor:
        """Map the last dimension; the statistics are over all others."""
        return super().forward(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])


def check_rows(count: int, *, training: bool) -> None:
    """Raise ``UserError`` for a single sample, which batch norm cannot train on."""
    if count == 1 and training and composer_dist.get_world_size() == 1:
        raise UserError(
            "algorithms.lut has batch norm in its heads and cannot train on one sample at a time. "
            "Raise trainer.microbatch_size, or data.batch_size per device; no last microbatch may "
            "be left with one sample."
        )
