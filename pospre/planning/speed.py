"""How long a step takes on GPUs, and what a loader must give them, from counts and assumptions.

The one model of speed: the least time of the step's kernels (``traffic.floor_seconds``) over the
share of that pace that training reaches (``Assumptions.efficiency``).
"""

from dataclasses import dataclass

from pospre.planning.assumptions import Assumptions
from pospre.planning.gpus import GIGA, Gpu
from pospre.planning.layouts import Layout, Parameters
from pospre.planning.traffic import Kernel, floor_seconds

_BUS_SHARE = 0.75  # of a link, that collectives reach
_DECODE_S = 0.82e-3  # of an image, and of each pixel of its views: README, Loader
_PIXEL_S = 4.4e-9


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, evenly on nodes."""

    gpu: Gpu
    gpus: int
    nodes: int

    @property
    def per_node(self) -> int:
        """Return the GPUs of a node."""
        return self.gpus // self.nodes


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on every GPU.

    Attributes:
        compute: forward and backward.
        update: optimiser and teacher.
        communication: between GPUs.
        exposed: the part of it that no computing hides.
    """

    compute: float
    update: float
    communication: float
    exposed: float

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return self.compute + self.update + self.exposed


def step_time(
    machine: Machine,
    layout: Layout,
    parameters: Parameters,
    assumed: Assumptions,
    *,
    work: list[Kernel],
    update: list[Kernel],
    microbatches: int,
) -> StepTime:
    """Return the time of a step.

    Args:
        machine: the GPUs.
        layout: how the step is spread over them.
        parameters: of the model.
        assumed: what is assumed.
        work: forward and backward of a microbatch, with what activation checkpointing computes
            again.
        update: optimiser and teacher, unsharded.
        microbatches: in a GPU's share.
    """
    compute = microbatches * floor_seconds(work, machine.gpu) / assumed.efficiency
    moving = floor_seconds(update, machine.gpu) / assumed.efficiency
    among, between = layout.traffic(parameters, microbatches)
    communication = (among + between * (layout.shards == 1)) / bus_bandwidth(
        machine, assumed, whole_nodes=layout.shards == machine.per_node
    )
    if layout.shards > 1:
        communication += between / replica_bandwidth(assumed)
    hidden = min(assumed.overlap * communication, compute)
    return StepTime(
        compute=compute,
        update=moving / layout.shards,
        communication=communication,
        exposed=communication - hidden,
    )


def bus_bandwidth(machine: Machine, assumed: Assumptions, *, whole_nodes: bool) -> float:
    """Return the bytes/s of a collective; ``whole_nodes``: over the GPUs of one node only."""
    if assumed.bandwidth is not None:
        return assumed.bandwidth * GIGA
    if machine.nodes == 1 or whole_nodes:
        return _BUS_SHARE * machine.gpu.link
    # a ring enters and leaves a node once, over the ports of all its GPUs together
    return _BUS_SHARE * min(machine.gpu.link, machine.per_node * assumed.network * GIGA)


def replica_bandwidth(assumed: Assumptions) -> float:
    """Return the bytes/s between the replicas of a shard, on other nodes: each has its own port."""
    if assumed.bandwidth is not None:
        return assumed.bandwidth * GIGA
    return _BUS_SHARE * assumed.network * GIGA


def decode_rate(assumed: Assumptions, pixels: int) -> float:
    """Return the images/s that a core loads, whose views have so many pixels together."""
    return assumed.decode_rate or 1 / (_DECODE_S + _PIXEL_S * pixels)
