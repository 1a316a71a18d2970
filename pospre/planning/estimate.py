"""From a recipe and GPUs to a plan: what is counted, what fits, its time and its data rate."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

from pospre.data.stores.subset import subset
from pospre.errors import UserError
from pospre.planning.counts import Counts, count
from pospre.planning.gpus import GIB, GPUS, IMAGENET, Assumptions, Machine
from pospre.planning.kernels import floor_seconds
from pospre.planning.layouts import Held, Layout, StepTime, layouts
from pospre.recipe.recipe import Recipe
from pospre.schedules import duration_steps
from pospre.training.data import check_addresses, open_data, rank_batch
from pospre.training.precision import with_precision
from pospre.training.scale.microbatch import loss_change

_NEAR = 1.03  # step times that differ by less count as equal
_MOST_GPUS = 4096


@dataclass(frozen=True)
class Choice:
    """One setting on one GPU."""

    layout: Layout
    checkpointing: bool  # whether blocks compute their activations again in the backward
    microbatch: int  # samples
    held: Held
    time: StepTime

    def keys(self, device_batch: int) -> list[str]:
        """Return the setting as overrides of the recipe."""
        whole, layout = self.microbatch == device_batch, self.layout
        sharding = "trainer.fsdp=null"
        if layout.shards > 1:
            hybrid = f"trainer.fsdp.shard_degree={layout.shards}"
            sharding = hybrid if layout.replicas > 1 else "trainer.fsdp={}"
        return [
            sharding,
            f"trainer.microbatch_size={'null' if whole else self.microbatch}",
            f"trainer.activation_checkpointing={str(self.checkpointing).lower()}",
        ]


@dataclass(frozen=True)
class StageCost:
    """One stage, in the best setting."""

    words: str
    steps: int
    trained: int  # parameters
    flops: float  # per image
    time: StepTime


@dataclass(frozen=True)
class Plan:
    """The cost of a recipe on some GPUs; with stages, of the most expensive one."""

    recipe: Recipe
    counts: Counts
    machine: Machine
    assumed: Assumptions
    images: tuple[int, str]  # of the data set, and where the number is from
    steps: int  # of the whole run
    device_batch: int  # samples of a step on one GPU
    choices: list[Choice]  # every layout, with and without checkpointing, at every microbatch
    best: Choice  # the fastest that fits
    stages: list[StageCost] = field(default_factory=list)  # of a recipe with stages

    @property
    def share(self) -> float:
        """The mean time of a step over all stages, as a share of the one that is planned."""
        if not self.stages:
            return 1.0
        return sum(s.steps * s.time.total for s in self.stages) / (
            self.steps * self.best.time.total
        )

    def fits(self, choice: Choice) -> bool:
        """Return whether a setting fits on the GPU."""
        return choice.held.total <= self.machine.gpu.memory

    def images_per_s(self, choice: Choice) -> float:
        """Return the images/s of all GPUs."""
        return self.recipe.data.batch_size / choice.time.total

    def days(self, choice: Choice) -> float:
        """Return the length of the run."""
        return self.steps * choice.time.total * self.share / 86400

    def gpu_hours(self, choice: Choice) -> float:
        """Return the hours of all GPUs together."""
        return 24 * self.days(choice) * self.machine.gpus

    def warning(self) -> str | None:
        """Return how the best setting's microbatches change the losses; None: not at all."""
        return loss_change(self.counts.coupled, self.best.microbatch, self.device_batch)

    def feed(self) -> dict[str, float]:
        """Return what the loader of a node must deliver: rates, cores, bytes/s."""
        rate = self.images_per_s(self.best) / self.machine.nodes
        one = self.assumed.decodes(self.counts.pixels)
        return {
            "images_per_s": rate,
            "decode_rate": one,
            "cores": rate / one,
            "bytes_per_s": 1e3 * rate * self.assumed.image_kb,
        }


def plan(recipe: Recipe, machine: Machine, assumed: Assumptions) -> Plan:
    """Return the plan of a recipe on some GPUs; a ``UserError`` says what would fit if this not."""
    if recipe.trainer.precision == "auto":
        recipe = with_precision(recipe, "amp_bf16")  # what all GPUs of the table compute in
    device_batch = rank_batch(recipe, machine.gpus)
    images, batch = _images(recipe, assumed), recipe.data.batch_size
    per_epoch = max(1, images[0] // batch)
    counts = count(recipe, per_epoch)
    choices = list(_choices(counts, machine, assumed, device_batch))
    fitting = [choice for choice in choices if choice.held.total <= machine.gpu.memory]
    if not fitting:
        raise UserError(_nothing_fits(recipe, counts, machine, assumed, choices))
    fastest = min(choice.time.total for choice in fitting)
    best = next(choice for choice in fitting if choice.time.total <= _NEAR * fastest)
    steps = duration_steps(recipe.trainer.max_duration, steps_per_epoch=per_epoch, batch_size=batch)
    costs: list[StageCost] = []
    for number in range(len(recipe.stages)):
        there = counts if number == counts.stage else count(recipe, per_epoch, number)
        costs.append(_stage_cost(there, number, best, machine, assumed, device_batch))
    return Plan(recipe, counts, machine, assumed, images, steps, device_batch, choices, best, costs)


def _stage_cost(
    counts: Counts,
    number: int,
    best: Choice,
    machine: Machine,
    assumed: Assumptions,
    device_batch: int,
) -> StageCost:
    """Return the cost of a stage in the best setting of the most expensive one."""
    stages, step = counts.stages, counts.steps[best.checkpointing]
    assert stages is not None
    time = best.layout.time(
        machine,
        counts.parameters,
        assumed,
        work=floor_seconds(step.work(best.microbatch), machine.gpu),
        update=floor_seconds(step.update, machine.gpu),
        microbatches=device_batch // best.microbatch,
    )
    length = stages.end(number) - stages.starts[number]
    words, trained = stages.heading(number), counts.parameters.trained
    return StageCost(words, length, trained, step.flops, time)


def _choices(
    counts: Counts, machine: Machine, assumed: Assumptions, device_batch: int
) -> Iterator[Choice]:
    """Yield every setting: simple layouts first, larger microbatches before smaller ones."""
    sizes = [size for size in range(device_batch, 0, -1) if device_batch % size == 0]
    sizes = [size for size in sizes if size > 1] or sizes
    for checkpointing, step in counts.steps.items():
        work = {size: floor_seconds(step.work(size), machine.gpu) for size in sizes}
        update = floor_seconds(step.update, machine.gpu)
        for layout, size in product(layouts(machine.gpus, machine.nodes), sizes):
            held = layout.held(
                counts, step.memory, assumed, microbatch=size, device_batch=device_batch
            )
            time = layout.time(
                machine,
                counts.parameters,
                assumed,
                work=work[size],
                update=update,
                microbatches=device_batch // size,
            )
            yield Choice(layout, checkpointing, size, held, time)


def _images(recipe: Recipe, assumed: Assumptions) -> tuple[int, str]:
    """Return the number of images, and the source of this number."""
    if assumed.images is not None:
        return assumed.images, "--images"
    try:
        check_addresses(recipe)
        chosen = recipe.data.label_fraction, recipe.data.labels, recipe.seed
        return len(subset(open_data(recipe), *chosen)), f"data.path = {recipe.data.path}"
    except UserError:
        return IMAGENET, f"assumed, ImageNet-1k's: data.path = {recipe.data.path} is not here"


def _nothing_fits(
    recipe: Recipe,
    counts: Counts,
    machine: Machine,
    assumed: Assumptions,
    choices: list[Choice],
) -> str:
    """Return by how much it does not fit, and what would be enough."""
    least = min(choices, key=lambda choice: choice.held.total)
    batch = recipe.data.batch_size

    def is_enough(other: Machine) -> bool:
        choices = _choices(counts, other, assumed, batch // other.gpus)
        return any(choice.held.total <= other.gpu.memory for choice in choices)

    names = [name for name, gpu in GPUS.items() if is_enough(replace(machine, gpu=gpu))]
    ways = [f"--gpu {', '.join(names)}"] if names else []
    more = machine.gpus * 2
    while more <= _MOST_GPUS and batch % more == 0:
        if is_enough(Machine(machine.gpu, more, math.ceil(more / machine.per_node))):
            ways.append(f"--gpus {more}")
            break
        more *= 2
    ways += ["a smaller encoder.name, encoder.image_size or view"]
    return (
        f"{recipe.run_name} fits on no {machine.gpu.name}: with {least.layout.name}, a microbatch "
        f"of {least.microbatch} and activation checkpointing a GPU needs "
        f"{least.held.total / GIB:.1f} GiB, and has {machine.gpu.memory / GIB:.1f}. What would "
        f"fit: {'; '.join(ways)}."
    )
