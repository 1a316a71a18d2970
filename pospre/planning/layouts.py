"""Ways to spread a training step over GPUs: the memory on each, and the traffic between them."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

from composer.distributed.fsdp2_utils import generate_composer_model_policy

from pospre.model.model import PretrainModel
from pospre.planning.memory import StepMemory

_BYTES = 4  # parameters, gradients and what ranks exchange are fp32


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
        name: as it is said.
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
        """Return the bytes of what is being exchanged."""
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
    """Return the ways that there are on so many GPUs, plainest first."""
    if gpus == 1:
        return [Layout("one GPU", 1, 1)]
    ways = [Layout("DDP", 1, gpus), Layout("FSDP2", gpus, 1)]
    if nodes > 1 and gpus > nodes:
        ways.insert(1, Layout("HSDP", gpus // nodes, nodes))
    return ways


def count_parameters(model: PretrainModel) -> Parameters:
    """Return how many parameters there are, also in what FSDP2 gathers at once."""
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
