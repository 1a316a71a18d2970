"""Run by ``composer -n 2``: one FSDP2 step beside the same step unwrapped, on gloo.

Every rank trains on its half of the batch; the mean of the losses, and the weights after the step,
must be those of one process that saw the whole batch.
"""

import sys

import torch
from composer.core import Precision
from composer.distributed.prepare_distributed import parallelize_composer_model
from composer.utils import dist
from composer.utils.parallelism import FSDP2Config
from torch.distributed.tensor import DTensor

from pospre.model.algorithm import PretrainAlgorithm, Progress
from pospre.model.model import PretrainModel
from pospre.training.clipping import mean_of_ones
from tests.algorithms.cases import Case, Options, written

LEARNING_RATE = 0.1
# KoLeo's nearest neighbours are those in the rank's own samples, as published; the other losses of
# dinov2 see both ranks'. So neither the whole batch nor its halves can be the measure of both: the
# others are compared without KoLeo, on the whole batch, and KoLeo without them, on the halves.
WITHOUT_KOLEO: Options = {"dinov2": {"koleo_weight": 0.0}}
KOLEO = Case(
    ("dinov2",),
    options={"dinov2": {"koleo_weight": 1.0, "dino_weight": 0.0, "ibot_weight": 0.0}},
)


def backward(
    model: PretrainModel, attached: list[PretrainAlgorithm], batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    inputs = written(model, attached, batch)
    loss = model.loss(model(inputs), inputs)["total"]
    loss.backward()
    return loss.detach()


def halves(case: Case) -> list[dict[str, torch.Tensor]]:
    return [{k: v[2 * r : 2 * r + 2] for k, v in case.batch().items()} for r in range(2)]


def coupled(case: Case) -> bool:
    """Whether its losses couple the samples of both ranks, through collectives."""
    return "dinov2" in case.names and case is not KOLEO


def finish(model: PretrainModel, attached: list[PretrainAlgorithm]) -> None:
    """Let the teacher follow, as the end of a step does."""
    for algorithm in attached:
        algorithm.after_step(model, Progress(0.5, 0.5))


def compare(case: Case, title: str) -> None:
    alone, attached = case.build()
    parts = halves(case)
    seen, rate = ([case.batch()], LEARNING_RATE) if coupled(case) else (parts, LEARNING_RATE / 2)
    expected = torch.stack([backward(alone, attached, part) for part in seen]).mean()
    torch.optim.SGD(alone.parameters(), lr=rate).step()  # the mean of the gradients
    finish(alone, attached)

    sharded, attached = case.build()
    config = FSDP2Config(device_mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    parallelize_composer_model(sharded, None, config, Precision.FP32)
    rank = dist.get_global_rank()
    loss = backward(sharded, attached, parts[rank])
    torch.distributed.all_reduce(loss)
    # with gloo FSDP2's gradients may be sums
    torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE / mean_of_ones()).step()
    finish(sharded, attached)
    torch.testing.assert_close(loss / 2, expected, rtol=1e-5, atol=1e-6)
    weights = dict(alone.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        # measured: the same bits, but with dinov2, where one process sums over the whole batch what
        # two ranks sum over halves and add; there 6e-7 of a tensor's largest weight at most
        torch.testing.assert_close(parameter.full_tensor(), weights[name], rtol=1e-5, atol=1e-6)
    print(f"{title}: loss {float(loss / 2):.6f} on two ranks equals {float(expected):.6f}")


if __name__ == "__main__":
    dist.initialize_dist("cpu", timeout=60)
    for names in sys.argv[1:]:
        compare(Case(tuple(names.split("+")), options=WITHOUT_KOLEO), names)
    compare(KOLEO, "KoLeo alone")
