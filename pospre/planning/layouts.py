"""Ways to spread a training step over GPUs: memory on each, traffic between them, and time.

The one model of speed: the least time of the step's kernels (``kernels.floor_seconds``) over the
share of that pace that training reaches (``Assumptions.efficiency``).
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from composer.distributed.fsdp2_utils import generate_composer_model_policy

from pospre.model.model import PretrainModel
from pospre.planning.gpus import GIGA, Assumptions, Machine
from pospre.planning.kernels import Kernel, floor_seconds

_BYTES = 4  # parameters, gradients and what ranks exchange are fp32
_BUS_SHARE = 0.75  # of a link, that collectives reach
_DECODE_S = 0.82e-3  # of an image, and of each pixel of its views: README, Loader
_PIXEL_S = 4.4e-9


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        trained: that take a gradient.
        frozen: of teachers, and fixed tables.
        unit: trained and frozen ones that FSDP2 gathers at once, at most: the blocks in use, and
            what they stand in.
        unit_trained: the trained ones among them.
    """

    trained: int
    frozen: int
    unit: int
    unit_trained: int


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step on one GPU beside weights and optimiser, by the size of the microbatch.

    Attributes:
        moments: by bytes of gradients that exist, (bytes of activations and buffers for any
            microbatch, bytes that each sample adds).
    """

    moments: dict[int, tuple[float, float]]

    @classmethod
    def from_sizes(cls, tracked: dict[int, dict[int, int]]) -> "StepMemory":
        """Return the line through the memory at two sizes of the microbatch.

        The gradients come in the same order, so each moment of one size has its match in the other.
        """
        (small, low), (large, high) = sorted(tracked.items())
        assert low.keys() == high.keys()
        moments = {}
        for grads in low:
            each = (high[grads] - low[grads]) / (large - small)
            moments[grads] = (low[grads] - each * small, each)
        return cls(moments)

    def working(self, microbatch: int, grad_share: float, *, accumulates: bool) -> float:
        """Return the most bytes of activations, buffers and gradients together.

        Args:
            microbatch: samples.
            grad_share: of the gradients that this GPU holds.
            accumulates: whether gradients of earlier microbatches exist from the beginning.
        """
        full = max(self.moments)
        return max(
            fixed + each * microbatch + grad_share * (full if accumulates else grads)
            for grads, (fixed, each) in self.moments.items()
        )


class Held(NamedTuple):
    """Bytes on one GPU, by what they are."""

    weights: float
    teacher: float
    gradients: float
    optimizer: float
    batch: float
    working: float
    exchange: float
    reserve: float

    @property
    def total(self) -> float:
        """Return their sum."""
        return sum(self)


@dataclass(frozen=True)
class Layout:
    """One way.

    Attributes:
        name: in messages.
        shards: GPUs over which weights, gradients and optimiser are split; 1: each holds all.
        replicas: groups of such GPUs.
    """

    name: str
    shards: int
    replicas: int

    def held(
        self,
        parameters: Parameters,
        step: StepMemory,
        optimizer_bytes: float,
        *,
        microbatch: int,
        accumulates: bool,
        batch_bytes: float,
        fragmentation: float,
        reserve: float,
    ) -> Held:
        """Return the bytes on one GPU at the moment when they are most.

        Args:
            parameters: of the model.
            step: what a step needs beside them.
            optimizer_bytes: of the optimiser's state, unsharded.
            microbatch: samples in it.
            accumulates: whether a step has several microbatches.
            batch_bytes: of a step's images on one GPU.
            fragmentation: share of activations and buffers that the allocator loses.
            reserve: bytes beside torch's tensors.
        """
        gradients = parameters.trained * _BYTES / self.shards
        # where nothing accumulates, gradients come as activations go: less than their sum
        both = step.working(microbatch, 1 / self.shards, accumulates=accumulates)
        exchange = self._exchange(parameters)
        lost = fragmentation * (both + exchange)
        return Held(
            weights=parameters.trained * _BYTES / self.shards,
            teacher=parameters.frozen * _BYTES / self.shards,
            gradients=gradients,
            optimizer=optimizer_bytes / self.shards,
            batch=batch_bytes,
            working=both - gradients,
            exchange=exchange,
            reserve=reserve + lost,
        )

    def _exchange(self, parameters: Parameters) -> float:
        """Return the bytes that are being exchanged."""
        if self.shards > 1:
            # gathered: those in use, and those that come next; their gradients, whole, likewise
            return 2 * (parameters.unit + parameters.unit_trained) * _BYTES
        # DDP's buckets are a second copy of the gradients
        return parameters.trained * _BYTES if self.replicas > 1 else 0.0

    def traffic(self, parameters: Parameters, microbatches: int) -> tuple[float, float]:
        """Return the bytes that a GPU sends in a step: (among its shards, between replicas).

        Sharded weights are gathered for forward and backward of every microbatch, a teacher's for
        the forward; gradients are scattered after each. What replicas hold is summed once.
        """
        trained, frozen = (
            count * _BYTES * (self.shards - 1) / self.shards
            for count in (parameters.trained, parameters.frozen)
        )
        among = microbatches * (3 * trained + frozen)
        own = parameters.trained * _BYTES / self.shards
        return among, 2 * own * (self.replicas - 1) / self.replicas


def layouts(gpus: int, nodes: int) -> list[Layout]:
    """Return the possible layouts on this number of GPUs, the simplest first."""
    if gpus == 1:
        return [Layout("one GPU", 1, 1)]
    ways = [Layout("DDP", 1, gpus), Layout("FSDP2", gpus, 1)]
    if nodes > 1 and gpus > nodes:
        ways.insert(1, Layout("HSDP", gpus // nodes, nodes))
    return ways


def count_parameters(model: PretrainModel) -> Parameters:
    """Return the numbers of parameters, including those that FSDP2 gathers at once."""
    units = generate_composer_model_policy(model)._run_policy(model, set(), {})
    names = [name for name, module in model.named_modules() if module in units]
    own = {name: Counter[bool]() for name in names}  # those in no smaller unit, by requires_grad
    for name, one in model.named_parameters():
        around = [unit for unit in names if name.startswith(f"{unit}.")]
        if around:
            own[max(around, key=len)][one.requires_grad] += one.numel()
    # a unit stands in those whose names its own begins with
    gathered = [
        sum((own[outer] for outer in names if f"{unit}.".startswith(f"{outer}.")), Counter[bool]())
        for unit in names
    ]
    every = list(model.parameters())
    trained = sum(one.numel() for one in every if one.requires_grad)
    return Parameters(
        trained=trained,
        frozen=sum(one.numel() for one in every) - trained,
        unit=max(counts.total() for counts in gathered),
        unit_trained=max(counts[True] for counts in gathered),
    )


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
    """Return the bytes/s between a shard's replicas on other nodes; each has its own port."""
    if assumed.bandwidth is not None:
        return assumed.bandwidth * GIGA
    return _BUS_SHARE * assumed.network * GIGA


def decode_rate(assumed: Assumptions, pixels: int) -> float:
    """Return the images/s that a core loads if the views have this many pixels together."""
    return assumed.decode_rate or 1 / (_DECODE_S + _PIXEL_S * pixels)
