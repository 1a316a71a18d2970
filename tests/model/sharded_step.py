"""Run by ``composer -n 2`` or ``-n 4``: a step on all ranks beside the same step of one process.

Every rank trains on its share of the batch; the mean of the losses, and the weights after the step,
must be those of one process that saw the whole batch. On two ranks the model is sharded by FSDP2,
and wrapped by DDP; on four it is in two copies of two shards.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import torch
from composer.core import Precision
from composer.distributed.prepare_distributed import parallelize_composer_model
from composer.utils import dist, get_device
from composer.utils.parallelism import FSDP2Config
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pospre.model.algorithm import Progress
from pospre.model.model import PretrainModel
from pospre.training.scale.blocks import recompute_blocks
from pospre.training.scale.compilation import Parts, compile_model
from pospre.training.scale.fsdp import gradient_of_ones, patch_fsdp_for_gloo
from tests.algorithms.cases import Case, Options, written
from tests.algorithms.test_schemes import case_of

LEARNING_RATE = 0.1
# KoLeo's nearest neighbours are those in the rank's own samples, as published; the other losses of
# dinov2 see all ranks'. So neither the whole batch nor its shares can be the measure of both: the
# others are compared without KoLeo, on the whole batch, and KoLeo without them, on the shares.
# So with DropPos's weights, which are normalised over the rank's own samples, beside batch norm.
WITHOUT_KOLEO: Options = {"dinov2": {"koleo_weight": 0.0}}
BESIDE_BATCH_NORM: Options = {"droppos": {"temperature": None}}
CENTERING: Options = {"dinov2": {"koleo_weight": 0.0, "centering": "centering"}}
# each block is told angles, which come from parameters outside of it
TURNED = Case(("simmim",), encoder={"positions": "rotary_mixed"}).of_one_block()
KOLEO = Case(
    ("dinov2",), options={"dinov2": {"koleo_weight": 1.0, "dino_weight": 0.0, "ibot_weight": 0.0}}
)


def named(title: str) -> Case:
    """Return the case of algorithms, ``a+b``; or that of one over a scheme, ``a@scheme``.

    An algorithm alone has one block: how several are sharded, the others show.
    """
    name, _, scheme = title.partition("@")
    case = case_of(name, scheme) if scheme else Case(tuple(name.split("+")))
    case = case if len(case.names) > 1 or scheme else case.of_one_block()
    alone = BESIDE_BATCH_NORM if "lut" in case.names else WITHOUT_KOLEO
    return replace(case, options={**case.options, **alone})


def backward(model: nn.Module, bare: PretrainModel, batch: dict[str, Tensor]) -> Tensor:
    inputs = written(bare, batch)
    loss = bare.loss(model(inputs), inputs)["total"]
    loss.backward()
    return loss.detach()


def shares(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """Return the batch, and the two samples of each rank."""
    ranks = range(dist.get_world_size())
    batch = case.batch(2 * len(ranks))
    return batch, [{k: v[2 * r : 2 * r + 2] for k, v in batch.items()} for r in ranks]


def coupled(case: Case) -> bool:
    """Whether its losses couple the samples of all ranks, through collectives."""
    return bool({"dinov2", "lejepa", "loca", "lut"} & {*case.names}) and case is not KOLEO


class Step(NamedTuple):
    """A step of one process: its loss, the weights after it, and the samples of each rank."""

    loss: Tensor
    weights: dict[str, nn.Parameter]
    rows: list[dict[str, Tensor]]


def alone(case: Case) -> Step:
    """Return the step of one process that sees the whole batch."""
    model = case.build()
    batch, rows = shares(case)
    parts, rate = ([batch], LEARNING_RATE) if coupled(case) else (rows, LEARNING_RATE / len(rows))
    with patch(
        "torch.distributed.is_initialized", return_value=False
    ):  # a sum over ranks is another
        loss = torch.stack([backward(model, model, part) for part in parts]).mean()
    torch.optim.SGD(model.parameters(), lr=rate).step()  # the mean of the gradients
    model.after_step(Progress(0.5, 0.5))
    return Step(loss, dict(model.named_parameters()), rows)


def compare(
    case: Case, title: str, shapes: Sequence[tuple[int, ...] | None], *, compiled: bool = False
) -> None:
    """Compare a step on meshes of ranks of these shapes, None for DDP, with that of one process."""
    step = alone(case)
    for shape in shapes:
        compare_on(shape, case, title, step, compiled=compiled)


def compare_on(
    shape: tuple[int, ...] | None, case: Case, title: str, step: Step, *, compiled: bool
) -> None:
    """Compare a step on one mesh.

    With ``compiled`` it is compiled: as a whole under DDP; else blocks and objectives alone, and
    blocks are computed again in the backward pass.
    """
    expected, weights, rows = step
    world = dist.get_world_size()
    spread = case.build()
    wrapped: nn.Module = spread
    if compiled:
        parts: Parts = "step" if shape is None else "blocks"
        compile_model(spread, parts, get_device("cpu"), backend="aot_eager", fullgraph=True)
        if shape is not None:
            recompute_blocks(spread, offload=False)
    divisor = 1.0
    if shape is None:
        wrapped = DistributedDataParallel(spread)
    else:
        names = ("copies", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        config, divisor = FSDP2Config(device_mesh=mesh), gradient_of_ones(mesh)
        parallelize_composer_model(spread, None, config, Precision.FP32)
    loss = backward(wrapped, spread, rows[dist.get_global_rank()])
    torch.distributed.all_reduce(loss)
    torch.optim.SGD(spread.parameters(), lr=LEARNING_RATE / divisor).step()
    spread.after_step(Progress(0.5, 0.5))
    torch.testing.assert_close(loss / world, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in spread.named_parameters():
        assert isinstance(parameter, DTensor) == (shape is not None), f"{name} is not sharded"
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        # measured: the same bits, but with dinov2, where one process sums over the whole batch what
        # the ranks sum over shares and add; there 6e-7 of a tensor's largest weight at most
        scale = max(1.0, float(weights[name].detach().abs().max()))
        torch.testing.assert_close(whole, weights[name], rtol=1e-5, atol=1e-6 * scale)
    how = "DDP" if shape is None else "x".join(map(str, shape))
    print(f"{title} on {how}: loss {float(loss / world):.6f} equals {float(expected):.6f}")


if __name__ == "__main__":
    dist.initialize_dist("cpu", timeout=60)
    patch_fsdp_for_gloo()
    shapes: list[tuple[int, ...] | None] = [(2,), None] if dist.get_world_size() == 2 else [(2, 2)]
    for title in sys.argv[1:]:
        compare(named(title), title, shapes[:1] if "@" in title else shapes)
    if dist.get_world_size() == 2:
        compare(Case(("dinov2",), options=CENTERING), "centering", shapes)
        compare(KOLEO, "KoLeo alone", shapes)
        compare(TURNED, "compiled", shapes, compiled=True)
