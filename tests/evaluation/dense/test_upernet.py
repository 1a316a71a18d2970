"""UperNet against another implementation of it, and its training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.upernet.configuration_upernet import UperNetConfig
from transformers.models.upernet.modeling_upernet import UperNetFCNHead, UperNetHead

from pospre.evaluation.dense.segmentation.decoders import UperNet
from tests.evaluation.dense.pictures import mask_folder


def copy_block(theirs: nn.Module, ours: nn.Module) -> None:
    convolution, norm = theirs.get_submodule("conv"), theirs.get_submodule("batch_norm")
    convolution.load_state_dict(ours.get_submodule("0").state_dict())
    norm.load_state_dict(ours.get_submodule("1").state_dict())


def test_logits_are_those_of_transformers():
    options: dict[str, Any] = {"num_labels": 5, "pool_scales": [1, 2, 3, 6]}
    config = UperNetConfig(hidden_size=6, **options)
    ours, theirs = UperNet(8, 5, channels=6, dropout=0.0), UperNetHead(config, [8] * 4)
    for place in range(4):
        copy_block(theirs.psp_modules.blocks[place].layers[1], ours.pools[place].get_submodule("1"))
    copy_block(theirs.bottleneck, ours.top)
    copy_block(theirs.fpn_bottleneck, ours.fuse)
    for place in range(3):
        copy_block(theirs.lateral_convs[place], ours.lateral[place])
        copy_block(theirs.fpn_convs[place], ours.smooth[place])
    theirs.classifier.load_state_dict(ours.classify[1].state_dict())
    maps = [torch.randn(2, 8, 6, 8) for _ in range(4)]
    levels = ours.rescale(maps)
    assert [tuple(level.shape[2:]) for level in levels] == [(24, 32), (12, 16), (6, 8), (3, 4)]
    torch.testing.assert_close(ours(maps), theirs(levels), atol=1e-5, rtol=1e-5)

    config.auxiliary_channels = 256
    auxiliary = UperNetFCNHead(config, [8] * 4)
    copy_block(auxiliary.convs.get_submodule("0"), ours.auxiliary.get_submodule("0"))
    auxiliary.classifier.load_state_dict(ours.auxiliary[2].state_dict())
    classes = torch.randint(0, 5, (2, 48, 64))
    wanted = sum(
        weight
        * nn.functional.cross_entropy(
            nn.functional.interpolate(logits, (48, 64), mode="bilinear"), classes
        )
        for weight, logits in ((1.0, theirs(levels)), (0.4, auxiliary(levels)))
    )
    torch.testing.assert_close(ours.loss(maps, classes), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("finetune", [False, True])
def test_colours_are_learned(measure: Callable[..., Any], tmp_path: Path, finetune: bool):
    data = mask_folder(tmp_path, {"train": 6, "val": 3})
    settings = {"iterations": 20, "batch_size": 2, "lr": 0.005, "channels": 16, "baseline": False}
    results = measure("segmentation", data, decoder="upernet", finetune=finetune, **settings)
    assert results["mIoU"] > 0.6 > results["constant_mIoU"]
    assert results["layers"] == [0, 0, 1, 1]
