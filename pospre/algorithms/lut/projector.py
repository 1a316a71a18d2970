"""The two-layer head with batch norm of BYOL and LUT, used as projector and as predictor."""

from torch import Tensor, nn


class RankBatchNorm(nn.SyncBatchNorm):
    """Batch norm whose statistics are those of all GPUs' rows.

    torch can gather them from GPUs only: on CPUs every rank normalises by its own rows.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise (rows, D)."""
        if input.device.type == "cpu":
            return super(nn.SyncBatchNorm, self).forward(input)  # the plain one
        return super().forward(input)


class Projector(nn.Sequential):
    """Linear, batch norm, ReLU, Linear; no biases and no norm at the end.

    Args:
        in_dim: width of the input.
        hidden_dim: width in between.
        out_dim: width of the output.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__(
            nn.Linear(in_dim, hidden_dim, bias=False),
            RankBatchNorm(hidden_dim),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_dim, out_dim, bias=False),
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in_dim) to (…, out_dim); the statistics are over all but the last dimension."""
        return super().forward(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])
