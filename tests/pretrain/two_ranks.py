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

from pospre.pretrain.algorithm import PretrainAlgorithm, Progress
from pospre.pretrain.model import PretrainModel
from tests.algorithms.cases import Case, written

LEARNING_RATE = 0.1


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
    return "dinov2" in case.names


def finish(model: PretrainModel, attached: list[PretrainAlgorithm]) -> None:
    """Let the teacher follow, as the end of a step does."""
    for algorithm in attached:
        algorithm.after_step(model, Progress(0.5, 0.5))


def compare(case: Case) -> None:
    alone, attached = case.build()
    parts = halves(case)
    # losses that couple samples through collectives see the batch of both ranks
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
    # gloo has no averaging reduction: FSDP2's gradients are sums there, and means on NCCL
    torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE / 2).step()
    finish(sharded, attached)
    torch.testing.assert_close(loss / 2, expected, rtol=1e-5, atol=1e-6)
    weights = dict(alone.named_parameters())
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        torch.testing.assert_close(
            parameter.full_tensor(),
            weights[name],
            rtol=1e-4,
            atol=1e-6,
        )
    print(f"{case.title}: loss {float(loss / 2):.6f} on two ranks equals {float(expected):.6f}")


if __name__ == "__main__":
    dist.initialize_dist("cpu", timeout=60)
    for names in sys.argv[1:]:
        # KoLeo looks at the samples of one rank, as published
        compare(Case(tuple(names.split("+")), options={"dinov2": {"koleo_weight": 0.0}}))
