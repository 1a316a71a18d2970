"""Distribution of a model over ranks: FSDP2 with one or several copies, and mean gradients."""

from types import SimpleNamespace

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import FSDP2Config, dist
from torch import distributed, nn
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor

from pospre.errors import UserError
from pospre.recipe.sections import Fsdp


class Sharding(FSDP2Config):
    """FSDP2 with several copies of the sharded model, each on its own ranks (hybrid sharding).

    Composer 0.32.1 makes the mesh of ranks from two degrees and replaces any other, but its
    ``FSDP2Config`` fixes them to one copy.
    """

    num_copies: int | None = None

    @property
    def data_parallel_replicate_degree(self) -> int | None:
        """Return the number of copies; None: one, on a one-dimensional mesh."""
        return self.num_copies


def num_copies(options: Fsdp) -> int:
    """Return the number of copies of the model over all ranks; ``shard_degree`` divides them."""
    world = dist.get_world_size()
    degree = options.shard_degree or world
    if world % degree:
        able = [str(number) for number in range(1, world + 1) if world % number == 0]
        raise UserError(
            f"trainer.fsdp.shard_degree = {degree} does not divide the number of ranks, {world}; "
            f"use one of {', '.join(able)}, or null: all ranks share one copy"
        )
    return world // degree


def build_sharding(options: Fsdp | None) -> Sharding | None:
    """Return FSDP2's configuration for the number of ranks; None without FSDP2, and on one rank."""
    if options is None or dist.get_world_size() == 1:
        return None
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        patch_fsdp_for_gloo()
    config = Sharding(
        state_dict_type="full",
        reshard_after_forward=options.reshard_after_forward,
        mixed_precision=options.mixed_precision,
    )
    copies = num_copies(options)
    config.num_copies = None if copies == 1 else copies
    return config


class MeanOverRanks(Algorithm):
    """Divides FSDP2's gradients by the number of ranks if gloo returned their sum.

    AdamW is hardly affected by a sum, but clipping is. NCCL averages.
    """

    divisor: float = 1.0

    def match(self, event: Event, state: State) -> bool:
        """Run once at the start, and when a step's gradients are available, before clipping."""
        return event in (Event.FIT_START, Event.AFTER_TRAIN_BATCH)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Turn every sum into a mean."""
        if event == Event.FIT_START:
            self.divisor = gradient_of_ones(state.fsdp_config.device_mesh)
        elif self.divisor != 1:
            for parameter in state.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(self.divisor)


def patch_fsdp_for_gloo() -> None:
    """Fix what keeps torch 2.7's FSDP2 from working on CPUs, where it is tested.

    It requests means over ranks. gloo's reduce-scatter silently returns the sum, and its
    all-reduce, which several copies need, refuses. So it must request sums. It also checks that the
    all-reduce has an event, but CPU streams record none.
    """
    _fsdp_collectives.ReduceOp = SimpleNamespace(AVG=ReduceOp.SUM, SUM=ReduceOp.SUM)  # type: ignore
    torch.cpu.Stream.record_event = lambda self: torch.cpu.Event()  # type: ignore


def gradient_of_ones(mesh: DeviceMesh) -> float:
    """Return FSDP2's result for a gradient that is 1 on every rank of gloo's ``mesh``."""
    layer = nn.Linear(1, 1, bias=False)
    fully_shard(layer, mesh=mesh)
    layer(torch.ones(1, 1)).sum().backward()
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    return gradient.full_tensor().item()
