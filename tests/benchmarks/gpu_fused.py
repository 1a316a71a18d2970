"""What the compiled step of a method moves on a GPU that is not there: graphs, kernels, bytes.

The step is traced on the CPU as ``trainer.compile`` compiles it, over memory that nothing touches.
Its graphs then move to an H100 that torch is told of, and Inductor lowers and fuses them; no code
is written or run. Autocast casts by the CPU's rules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import ir
from torch._inductor.compile_fx import (
    _recursive_joint_graph_passes,
    _recursive_post_grad_passes,
    record_original_output_strides,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import BaseSchedulerNode, NopKernelSchedulerNode
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import tree_leaves, tree_map

from pospre.batch import Batch, image_key, without_images
from pospre.model.model import PretrainModel
from pospre.planning.kernels import Kernel, operator_flops
from pospre.planning.step_costs import with_imagenet_classes
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from pospre.training.resolve import resolve

_CUDA = torch.device("cuda:0")
_H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=80 * 2**30,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
    gcnArchName=None,
)


class Fused(NamedTuple):
    """The compiled forward with losses and backward."""

    graphs: int  # that torch.compile makes of the forward
    breaks: int  # of the graph
    symbolic: int  # sizes that are no numbers among what goes into the graphs
    kernels: list[Kernel]  # of all graphs, in their order


def fused(recipe: Recipe, samples: int) -> Fused:
    """Return what the compiled step over so many samples is made of."""
    recipe = with_imagenet_classes(resolve(recipe))
    with torch.device("meta"):
        model = build_model(recipe)
    model.to_empty(device="cpu").train()
    batch = without_images(samples, {name: group.count for name, group in model.views.items()})
    for name, group in model.views.items():
        shape = (samples, group.count, model.encoder.channels, *group.shape)
        batch[image_key(name)] = torch.empty(shape, dtype=torch.uint8)
    model.draw(batch)
    graphs = _trace(model, batch)
    found = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    inputs = (node for graph, _ in graphs for node in graph.graph.find_nodes(op="placeholder"))
    symbolic = sum(isinstance(node.meta["val"], torch.SymInt) for node in inputs)
    return Fused(*found, symbolic, [one for graph in graphs for one in _lowered(*graph)])


def _trace(model: PretrainModel, batch: Batch) -> list[tuple[fx.GraphModule, bool]]:
    """Return the graphs of a step in bf16, and whether each is of the backward."""
    graphs: list[tuple[fx.GraphModule, bool]] = []

    def keep(graph: fx.GraphModule, _: Sequence[Any], *, backward: bool) -> Callable[..., Any]:
        graphs.append((graph, backward))
        return _untouched(graph)

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        _recursive_joint_graph_passes(joint)
        return min_cut_rematerialization_partition(joint, inputs, **options, compiler="inductor")

    backend = aot_autograd(
        fw_compiler=partial(keep, backward=False),
        bw_compiler=partial(keep, backward=True),
        decompositions=select_decomp_table(),
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(model.run_step, backend=backend, dynamic=False)
    with torch.autocast("cpu", torch.bfloat16):
        _, terms = step(batch)
    terms["total"].backward()
    return graphs


def _untouched(graph: fx.GraphModule) -> Callable[..., Any]:
    """Return a function that gives what a graph would, without computing it."""
    (output,) = graph.graph.find_nodes(op="output")
    values = [node.meta["val"] if isinstance(node, fx.Node) else node for node in output.args[0]]
    shapes = [
        (one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else one for one in values
    ]

    def run(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return [
            torch.empty_strided(*one[:2], dtype=one[2]) if isinstance(one, tuple) else one
            for one in shapes
        ]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _lowered(graph: fx.GraphModule, backward: bool) -> list[Kernel]:
    """Return the kernels that Inductor makes of a graph on the H100."""
    view_to_reshape(graph)
    values = (node.meta.get("val") for node in graph.graph.nodes)
    mode = next(one.fake_mode for one in values if isinstance(one, Tensor))  # type: ignore
    with V.set_fake_mode(mode):
        _recursive_post_grad_passes(graph, is_inference=False)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    inputs = _move(graph, mode)
    record_original_output_strides(graph)
    with _on_h100(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), torch.no_grad():
        lowering = GraphLowering(
            graph, example_inputs=inputs, shape_env=mode.shape_env, is_backward=backward
        )
        with V.set_graph_handler(lowering):
            lowering.run(*inputs)
            lowering._update_scheduler()
            return [_kernel(node) for node in lowering.scheduler.nodes if _launches(node)]


def _move(graph: fx.GraphModule, mode: FakeTensorMode) -> list[Any]:
    """Move a graph of the CPU to the GPU; return what goes into it."""

    def moved(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        return torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=_CUDA)

    inputs = []
    with mode:
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                node.meta["val"] = moved(node.meta["val"])
                inputs.append(node.meta["val"])
            elif node.op == "get_attr":
                node.meta["val"] = moved(getattr(graph, node.target))
            elif node.op == "call_function":
                asked = node.args, node.kwargs
                node.args, node.kwargs = tree_map(
                    lambda one: _CUDA if isinstance(one, torch.device) else one, asked
                )
                arguments, named = _values(node)
                node.meta["val"] = node.target(*arguments, **named)
    graph.recompile()
    return inputs


def _values(node: fx.Node) -> Any:
    return fx.node.map_arg((node.args, node.kwargs), lambda one: one.meta["val"])


@contextmanager
def _on_h100() -> Iterator[None]:
    """Make torch believe that there is an H100."""
    with ExitStack() as patches:
        for owner in (torch.cuda, CudaInterface, CudaInterface.Worker):
            patches.enter_context(patch.object(owner, "get_device_properties", lambda *_: _H100))
        capability = _H100.major, _H100.minor
        patches.enter_context(patch("torch.cuda.get_device_capability", lambda *_: capability))
        patches.enter_context(patch("torch.cuda.current_device", lambda: 0))
        patches.enter_context(patch("torch._inductor.scheduler.has_triton", lambda: True))
        yield


def _launches(node: BaseSchedulerNode) -> bool:
    """Return whether a node is a kernel, and no piece of what another one returns."""
    return not isinstance(node, NopKernelSchedulerNode) and not isinstance(
        node.node, ir.MultiOutput
    )


def _kernel(node: BaseSchedulerNode) -> Kernel:
    """Return the bytes of a kernel; the FLOPs of a product or of attention."""
    moved = int(node.get_read_write_buffers_sizes())
    if not isinstance(node.node, ir.ExternKernel):
        return Kernel(moved, 0, False)
    for origin in node.node.get_origins():
        if isinstance(origin.target, torch._ops.OpOverload):
            arguments, named = _values(origin)
            made = origin.meta["val"]
            flops = operator_flops(origin.target.overloadpacket, arguments, named, made)
            if flops:
                return Kernel(moved, flops, tree_leaves(made)[0].dtype == torch.float32)
    return Kernel(moved, 0, False)
