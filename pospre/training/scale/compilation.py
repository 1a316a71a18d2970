"""Compiles the training step, as one graph or block by block, and reports how that goes.

Evaluations during training are not compiled: each would need other shapes.
"""

import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Literal

import torch
from composer.core import Callback, State
from composer.devices import Device
from composer.loggers import Logger
from composer.utils import dist
from torch import nn
from torch._dynamo.utils import counters, graph_break_reasons
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch.utils._triton import has_triton
from tqdm import tqdm

from pospre.collectives import print_once
from pospre.model.model import PretrainModel
from pospre.nn.block import Block
from pospre.recipe.sections import Trainer
from pospre.scratch import user_cache
from pospre.training.scale.blocks import blocks_of

Parts = Literal["step", "blocks"]
CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable of the folder with compiled code."""
_DYNAMO = logging.getLogger("torch._dynamo.convert_frame")


def choose_parts(options: Trainer, device: Device) -> Parts | None:
    """Return the parts that ``trainer.compile`` compiles on a device; None: nothing.

    A machine without a compiler trains without it, and prints a note.
    """
    if options.compile is False or (options.compile == "auto" and device.name == "cpu"):
        return None
    lacking = lacking_compiler(device)
    if lacking is not None:
        print_once(f"trainer.compile = {options.compile}: nothing is compiled, because {lacking}")
        return None
    if options.compile != "auto":
        return "step" if options.compile is True else "blocks"
    # FSDP2's hooks are around blocks; torch 2.7 does not split graphs for DDP that recompute blocks
    return "blocks" if options.fsdp is not None or options.activation_checkpointing else "step"


def lacking_compiler(device: Device) -> str | None:
    """Return what is missing to compile for a device, and the remedy; None: nothing."""
    if device.name == "cpu":
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler (apt-get install g++)"
        return None
    if not has_triton():
        return "there is no Triton for this GPU (pip install triton; compute capability 7 or more)"
    if not any(map(shutil.which, filter(None, [os.environ.get("CC"), "gcc", "clang"]))):
        return "there is no C compiler, which Triton needs (apt-get install gcc)"
    return None


def compile_model(model: PretrainModel, parts: Parts, device: Device, **options: Any) -> None:
    """Compile parts of a model's training step, with fixed shapes and ``torch.compile``'s options.

    ``step`` makes passes, objectives and losses one graph; ``blocks`` compiles each block, each
    objective and the pixel augmentation separately. Equal parts share compiled code. The model is
    not yet wrapped by DDP or FSDP2, nor changed by ``recompute_blocks``.
    """

    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        return _in_training(model, function, **options)

    if parts == "step":
        model.run_step = compiled(model.run_step)  # type: ignore[method-assign]
        model.is_one_graph = True
        return
    for block in blocks_of(model):
        block.forward = compiled(block.forward)
    objectives: list[Any] = [*model.objectives.named.values()]
    for objective in objectives:
        objective.loss = compiled(objective.loss)
        if not any(isinstance(module, Block) for module in objective.modules()):
            objective.forward = compiled(objective.forward)
    if device.name != "cpu":  # on CPUs, torch 2.7's C++ code for colours does not compile
        augment: nn.Module = model.augment
        augment.forward = compiled(augment.forward)


def _in_training(
    model: PretrainModel, function: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
    """Return a function that is only compiled while the model is in training mode."""
    compiled = torch.compile(function, dynamic=False, **options)

    @wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        return (compiled if model.training else function)(*arguments, **named)

    return run


def open_cache() -> str:
    """Choose the folder that keeps compiled code between starts, and return it.

    It is ``TORCHINDUCTOR_CACHE_DIR``, or else ``pospre/compiled`` in the user's cache. If it cannot
    be written, a temporary folder is used, with a note.
    """
    folder = Path(os.environ.get(CACHE) or user_cache() / "compiled")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        print_once(
            f"the compiled step is not cached for the next start: {folder} cannot be written "
            f"({error.strerror}); set {CACHE} to another folder"
        )
        folder = Path(tempfile.mkdtemp(prefix="pospre-compiled-"))
    os.environ[CACHE] = str(folder)
    return str(folder)


class Compiling(Callback):
    """Reports how long the first step compiles, graph breaks, and when torch stops compiling."""

    def __init__(self, parts: str, cache: str) -> None:
        self.parts, self.cache = parts, cache
        self.began: float | None = None
        self.reported = len(graph_break_reasons)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Start listening to torch's messages about too many compilations."""
        _DYNAMO.addFilter(_shorten)

    def batch_start(self, state: State, logger: Logger) -> None:
        """Announce before the first step that it takes longer."""
        if self.began is None:
            self.began = time.monotonic()
            _say(f"compiling the {self.parts}: the first step takes longer, up to a few minutes")

    def batch_end(self, state: State, logger: Logger) -> None:
        """Report the duration of the first step, and after each step new graph breaks."""
        if self.began is not None and self.began > 0:
            seconds, self.began = time.monotonic() - self.began, 0.0
            graphs = counters["stats"]["unique_graphs"]
            _say(
                f"the first step took {seconds:.1f} s, with {graphs} compiled graph"
                f"{'s' * (graphs != 1)}; they are cached in {self.cache}"
            )
        for line in dict.fromkeys(map(_describe, graph_break_reasons[self.reported :])):
            _say(f"warning: the compiled graph breaks {line}")
        self.reported = len(graph_break_reasons)

    def close(self, state: State, logger: Logger) -> None:
        """Restore torch's log."""
        _DYNAMO.removeFilter(_shorten)


def _describe(graph_break: object) -> str:
    """Return where a graph break is, and torch's reason in a line."""
    stack = getattr(graph_break, "user_stack", [])
    reason = str(getattr(graph_break, "reason", graph_break))
    where = f"at {Path(stack[-1].filename)}:{stack[-1].lineno}: " if stack else ""
    return where + " ".join(reason.split())[:200]


def _shorten(record: logging.LogRecord) -> bool:
    """Shorten torch's message that a function is no longer compiled; pass on all others."""
    if not str(record.msg).startswith("torch._dynamo hit config."):
        return True
    kind, limit, function, reason, *_ = (str(each) for each in record.args or ())
    _say(
        f"warning: {function} was compiled {limit} times ({kind}) and runs uncompiled from here "
        f"on; the last change: {' '.join(reason.split())[:200]}. trainer.compile=false avoids this"
    )
    return False


def _say(text: str) -> None:
    """Write a line on rank 0, above a progress bar."""
    if dist.get_global_rank() == 0:
        tqdm.write(text, file=sys.stderr)
