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

from pospre.nn.encoder import build_encoder
from pospre.pretrain.algorithm import PretrainAlgorithm, algorithm_class
from pospre.pretrain.model import PretrainModel

LEARNING_RATE = 0.1
OPTIONS: dict[str, dict[str, dict[str, float]]] = {
    "mae": {"mae": {"decoder_dim": 64, "decoder_depth": 1, "decoder_heads": 4}},
    "droppos": {"droppos": {"decoder_dim": 64, "decoder_depth": 1, "decoder_heads": 4}},
}
OPTIONS["mae+droppos"] = OPTIONS["mae"] | OPTIONS["droppos"]


def build(case: str) -> tuple[PretrainModel, list[PretrainAlgorithm]]:
    torch.manual_seed(0)
    model = PretrainModel(build_encoder("vit_tiny16", image_size=64, patch_size=8, depth=2), seed=3)
    attached = [algorithm_class(name)(**options) for name, options in OPTIONS[case].items()]
    for algorithm in attached:
        algorithm.attach(model)
    return model, attached


def make_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    size = (4, 1, 3, 64, 64)
    return {
        "view/image": torch.randint(0, 256, size, dtype=torch.uint8, generator=generator),
        "view/flip": torch.rand(4, 1, generator=generator) < 0.5,
        "index": torch.arange(4),
        "epoch": torch.ones(4, dtype=torch.int64),
    }


def backward(
    model: PretrainModel, attached: list[PretrainAlgorithm], batch: dict[str, torch.Tensor]
) -> torch.Tensor:
    for algorithm in attached:
        algorithm.write(batch, model)
    loss = model.loss(model(batch), batch)["total"]
    loss.backward()
    return loss.detach()


def compare(case: str) -> None:
    alone, attached = build(case)
    halves = [{k: v[2 * r : 2 * r + 2] for k, v in make_batch().items()} for r in range(2)]
    expected = torch.stack([backward(alone, attached, half) for half in halves]).mean()
    torch.optim.SGD(alone.parameters(), lr=LEARNING_RATE / 2).step()  # the mean of two gradients

    sharded, attached = build(case)
    config = FSDP2Config(device_mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    parallelize_composer_model(sharded, None, config, Precision.FP32)
    rank = dist.get_global_rank()
    loss = backward(sharded, attached, halves[rank])
    torch.distributed.all_reduce(loss)
    # gloo has no averaging reduction: FSDP2's gradients are sums there, and means on NCCL
    torch.optim.SGD(sharded.parameters(), lr=LEARNING_RATE / 2).step()
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
    print(f"{case}: loss {float(loss / 2):.6f} on two ranks equals {float(expected):.6f}")


if __name__ == "__main__":
    dist.initialize_dist("cpu", timeout=60)
    for name in sys.argv[1:]:
        compare(name)
