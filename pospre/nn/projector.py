"""The two-layer head with batch norm of BYOL and LUT, used as projector and as predictor."""

import torch
from torch import Tensor, nn


class Projector(nn.Sequential):
    """Linear, batch norm, ReLU, Linear; no biases and no norm at the end.

    On several GPUs the statistics are of the batch over all of them. torch has no such batch norm
    for CPUs: with gloo each rank normalises by its own share of the batch.

    Args:
        in_dim: width of the input.
        hidden_dim: width in between.
        out_dim: width of the output.
    """

    def __init__(self, in_dim: int, hidden_dim: int, out_dim: int) -> None:
        norm = nn.SyncBatchNorm if _on_several_gpus() else nn.BatchNorm1d
        super().__init__(
            nn.Linear(in_dim, hidden_dim, bias=False),
            norm(hidden_dim),
            nn.ReLU(inplace=True),
            nn.Linear(hidden_dim, out_dim, bias=False),
        )

    def forward(self, rows: Tensor) -> Tensor:
        """Map (…, in_dim) to (…, out_dim); the statistics are over all but the last dimension."""
        return super().forward(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])


def _on_several_gpus() -> bool:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1 and "nccl" in distributed.get_backend_config()
