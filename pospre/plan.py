"""``python -m pospre.plan RECIPE [key=value …] --gpus N --gpu KIND``: predict the cost of a run."""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from pospre.arguments import declared
from pospre.command_line import LocalPath, add_trust, recipe_parser
from pospre.docstrings import meanings
from pospre.errors import UserError, run_command
from pospre.output import check_output, write_output
from pospre.planning.gpus import (
    GIB,
    GIGA,
    GPUS,
    TERA,
    Assumptions,
    Machine,
    gpu_named,
    option,
)
from pospre.planning.text import as_json, render
from pospre.recipe.recipe import load_recipe

_NODE = 8  # GPUs of a node, unless given
_TABLE = "\n".join(
    f"  {name:<9}{gpu.name:<23}{gpu.bf16 / TERA:>6g} TFLOP/s bf16, {gpu.fp32 / TERA:>4g} fp32, "
    f"{gpu.memory / GIB:>5g} GiB, {gpu.memory_bandwidth / GIGA:>4g} GB/s, link {gpu.link / GIGA:g}"
    for name, gpu in GPUS.items()
)
_EPILOG = f"""\
examples:
  python -m pospre.plan yamls/pretrain/mae_vitb16.yaml --gpus 8 --gpu a100-80
  python -m pospre.plan yamls/pretrain/dinov2_vitl14.yaml --gpus 64 --gpu h200 --nodes 8 \\
      --images 14197122 --price-per-gpu-hour 3 --output plan.json
  python -m pospre.plan yamls/pretrain/ijepa_vith14.yaml encoder.image_size=448 --gpus 16 --gpu h100

Needs no GPU and no data. It builds the recipe's model over tensors without memory. It counts
parameters, FLOPs of every pass, bytes and FLOPs of every operator of a step, and the memory in use
at each moment. With trainer.compile other than false, a model of what torch.compile fuses makes
fewer kernels of the operators. A kernel takes at least its bytes over the GPU's bandwidth, or its
FLOPs over the peak. A step takes the sum of these over --efficiency. From these counts and the
assumptions, which are printed and are options, it predicts:
  - what fits on a GPU under DDP, FSDP2 and HSDP (sharded within a node, a replica on each), with
    and without activation checkpointing, and at which microbatch;
  - the time of a step, days, GPU hours and cost;
  - the images/s that the loader of a node must deliver.
The best setting is printed as keys to add to the command.

GPUs (the vendor's dense figures; link: GB/s to the others of a node, one way):
{_TABLE}

exit codes: 0 done; 2 a mistake in the recipe or an option, or nothing fits; it says what would.
"""


def _parser() -> argparse.ArgumentParser:
    description = "Predict what a recipe needs: GPU memory, time, cost, cores and bandwidth."
    parser = recipe_parser("pospre.plan", description, _EPILOG)
    add_trust(parser)
    add = parser.add_argument
    add("--gpus", type=int, required=True, help="number of GPUs on all nodes together")
    add("--gpu", required=True, metavar="KIND", help=f"one of {', '.join(GPUS)}")
    add("--nodes", type=int, help=f"number of nodes (default: {_NODE} GPUs each)")
    add("--output", action=LocalPath, metavar="FILE", help="where to write JSON")
    assumed = parser.add_argument_group("assumptions")
    for name, meaning in meanings(Assumptions).items():
        default = getattr(Assumptions, name)
        shown = "" if default is None else f" ({default})"
        assumed.add_argument(
            option(name),
            type=int if name == "images" else float,
            default=default,
            metavar="N",
            help=f"{meaning}{shown}".replace("%", "%%"),
        )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    given = _parser().parse_intermixed_args(argv)
    assumed = Assumptions(**declared(given, Assumptions))
    gpu, nodes = gpu_named(given.gpu), _nodes(given.gpus, given.nodes)
    check_output("--output", given.output)
    recipe = load_recipe(given.recipe, given.overrides)
    from pospre.planning.estimate import plan
    from pospre.training.data import check_addresses
    from pospre.training.reference import with_encoders
    from pospre.training.resolve import trusted_part

    check_addresses(recipe, "encoder.weights", "reference.weights")
    recipe, untrusted = trusted_part(with_encoders(recipe))
    if untrusted and not recipe.algorithms:
        raise untrusted[0]
    for error in untrusted:
        print(f"not counted: {error}", file=sys.stderr)
    result = plan(recipe, Machine(gpu, given.gpus, nodes), assumed)
    print(render(result), end="")
    if given.output is not None:
        write_output(given.output, json.dumps(as_json(result), indent=1) + "\n")
    return 0


def _nodes(gpus: int, nodes: int | None) -> int:
    """Return the number of nodes, checked against the number of GPUs."""
    for name, value in (("gpus", gpus), ("nodes", nodes)):
        if value is not None and value < 1:
            raise UserError(f"--{name} is {value}; give a number above 0.")
    count = math.ceil(gpus / _NODE) if nodes is None else nodes
    if gpus % count:
        raise UserError(
            f"--gpus {gpus} are not evenly spread over {count} nodes; give --nodes so that every "
            "node has as many."
        )
    return count


if __name__ == "__main__":
    sys.exit(run_command(main))
