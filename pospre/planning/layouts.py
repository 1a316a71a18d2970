"""Ways to spread a step over GPUs: what each GPU then holds, sends and waits for."""

from dataclasses import dataclass
from typing import NamedTuple

from pospre.planning.counts import Counts, Parameters
from pospre.planning.gpus import GIB, GIGA, Assumptions, Machine
from pospre.planning.step_costs import StepMemory

_BYTES = 4  # parameters, gradients and what ranks exchange are fp32
_BUS_SHARE = 0.75  # of a link, that collectives reach


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


class StepTime(NamedTuple):
    """Seconds of a step on every GPU."""

    compute: float  # forward and backward
    update: float  # optimiser and teacher
    communication: float  # between GPUs
    exposed: float  # the part of it that no computing hides

    @property
    def total(self) -> float:
        """Return the seconds of a step."""
        return self.compute + self.update + self.exposed


@dataclass(frozen=True)
class Layout:
    """A way to spread a step over GPUs."""

    name: str
    shards: int  # GPUs over which weights, gradients and optimiser are split; 1: each holds all
    replicas: int  # groups of such GPUs

    def held(
        self,
        counts: Counts,
        memory: StepMemory,
        assumed: Assumptions,
        *,
        microbatch: int,
        device_batch: int,
    ) -> Held:
        """Return the bytes on one GPU at the moment when they are most."""
        parameters = counts.parameters
        weights, teacher = (
            number * _BYTES / self.shards for number in (parameters.trained, parameters.frozen)
        )
        # where nothing accumulates, gradients come as activations go: less than their sum
        accumulates = microbatch < device_batch
        both = memory.working(microbatch, 1 / self.shards, accumulates=accumulates)
        exchange = 0.0
        if self.shards > 1:
            # gathered: those in use and those that come next, and as many whole gradients
            exchange = 2 * (parameters.unit + parameters.unit_trained) * _BYTES
        elif self.replicas > 1:  # DDP's buckets are a second copy of the gradients
            exchange = parameters.trained * _BYTES
        return Held(
            weights=weights,
            teacher=teacher,
            gradients=weights,
            optimizer=counts.optimizer_bytes / self.shards,
            batch=device_batch * counts.sample_bytes,
            working=both - weights,
            exchange=exchange,
            reserve=assumed.reserve_gib * GIB + assumed.fragmentation * (both + exchange),
        )

    def bytes_sent(self, parameters: Parameters, microbatches: int) -> tuple[float, float]:
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

    def time(
        self,
        machine: Machine,
        parameters: Parameters,
        assumed: Assumptions,
        *,
        work: float,
        update: float,
        microbatches: int,
    ) -> StepTime:
        """Return the time of a step from its least seconds.

        These are of forward and backward of a microbatch (``work``) and of optimiser and teacher,
        unsharded (``update``).
        """
        compute = microbatches * work / assumed.efficiency
        among, between = self.bytes_sent(parameters, microbatches)
        whole_nodes = self.shards == machine.per_node
        communication = (among + between * (self.shards == 1)) / bus_bandwidth(
            machine, assumed, whole_nodes=whole_nodes
        )
        if self.shards > 1:
            communication += between / _bandwidth(assumed, assumed.network * GIGA)
        return StepTime(
            compute=compute,
            update=update / assumed.efficiency / self.shards,
            communication=communication,
            exposed=communication - min(assumed.overlap * communication, compute),
        )


def layouts(gpus: int, nodes: int) -> list[Layout]:
    """Return the possible layouts on this number of GPUs, the simplest first."""
    if gpus == 1:
        return [Layout("one GPU", 1, 1)]
    ways = [Layout("DDP", 1, gpus), Layout("FSDP2", gpus, 1)]
    if nodes > 1 and gpus > nodes:
        ways.insert(1, Layout("HSDP", gpus // nodes, nodes))
    return ways


def bus_bandwidth(machine: Machine, assumed: Assumptions, *, whole_nodes: bool) -> float:
    """Return the bytes/s of a collective; ``whole_nodes``: over the GPUs of one node only."""
    if machine.nodes == 1 or whole_nodes:
        return _bandwidth(assumed, machine.gpu.link)
    # a ring enters and leaves a node once, over the ports of all its GPUs together
    ports = machine.per_node * assumed.network * GIGA
    return _bandwidth(assumed, min(machine.gpu.link, ports))


def _bandwidth(assumed: Assumptions, link: float) -> float:
    return _BUS_SHARE * link if assumed.bandwidth is None else assumed.bandwidth * GIGA
