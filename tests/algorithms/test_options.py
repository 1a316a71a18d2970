"""Every option says what it takes: a value outside of it is refused before anything is attached."""

import math
from typing import Any

import pytest

from pospre.errors import UserError
from pospre.model.algorithm import algorithm_names
from tests.algorithms.cases import Options, made

NAN = math.nan
OUTSIDE: dict[str, dict[str, list[Any]]] = {
    "mae": {
        **{"mask_ratio": [1.2], "second_mask_ratio": [1.0], "weight": [-1.0], "sampling": ["odd"]},
        "mask_block": [0],
    },
    "droppos": {
        **{"mask_ratio": [1.0], "position_mask_ratio": [0.0], "temperature": [0.0]},
        **{"sigma_end": [-1.0], "weight": [NAN], "decoder_depth": [-1], "decoder_dim": [30]},
        **{"affinity": ["half"], "sampling": ["unifrom"]},
    },
    "simmim": {"mask_ratio": [1.0, 0.0], "weight": [-1.0]},
    "mp3": {
        **{"mask_ratio": [1.0, -0.1], "position_rate": [1.0], "temperature": [0.0]},
        **{"sigma_end": [-1.0], "distance": ["far"], "weight": [-1.0]},
    },
    "ijepa": {
        **{"predictor_dim": [30], "predictor_depth": [0], "num_targets": [0], "loss": ["l3"]},
        **{"target_tokens": [0], "context_tokens": [0], "target_scale": [(0.2, 0.1), (NAN, 0.2)]},
        **{"target_ratio": [(0.0, 1.0)], "context_scale": [(0.5, 1.2)], "weight": [-1.0]},
        **{"momentum_shape": ["square"], "context_weight": [-1.0], "context_warmup": [(0.2, 0.1)]},
    },
    "dinov2": {
        **{"num_prototypes": [1], "head_bottleneck": [0], "head_layers": [0]},
        **{"patch_head_bottleneck": [0], "freeze_epochs": [-1], "centering": ["sink"]},
        **{"mask_ratio": [(0.5, 0.2), (0.5, 1.0)], "mask_crop_rate": [-0.5]},
        **{"koleo_weight": [-1.0], "student_temperature": [NAN], "teacher_warmup": [30.0]},
        **{"teacher_temperature_start": [0.0], "mask_shape": ["ring"], "spread": ["none"]},
        "sigreg_weight": [-1.0],
    },
    "supervised": {
        **{"num_classes": [1], "pooling": ["max"], "mixup": [-1.0], "mix_rate": [1.5]},
        **{"mask_ratio": [1.0], "weight": [-1.0]},
    },
    "stop": {"variant": ["noisy"], "noise_std": [-0.1, NAN], "l1_weight": [0.0]},
    "lut": {
        **{"weight": [NAN], "hidden_dim": [0], "temperature": [0.0], "distance": ["l2"]},
        "target_mask_ratio": [1.0],
    },
    "crop_field": {
        **{"field_size": [1], "box_scale": ["beat"]},
        "scale_range": [(0.0, 1.0), (0.2, math.inf)],
    },
    "masked_position": {
        **{"mask_ratio": [(0.1, 1.0), (0.5, 0.1)], "shape": ["star"], "weight": [-1.0]}
    },
    "ema_teacher": {"shape": ["round"]},
    "part": {
        **{"sizes": [(0.0, 1.0), (2.0, 1.0)], "share": [0.0, 1.5], "num_pairs": [0]},
        **{"predictor": ["mlp"], "log_ratios": ["yes"], "weight": [-1.0]},
    },
    "diet": {
        **{"num_images": [1], "smoothing": [1.5], "mixup": [-1.0], "cutmix": [NAN]},
        **{"mix_rate": [1.5], "switch_rate": [-0.1], "weight": [-1.0]},
    },
    "loca": {
        **{"query_mask_ratio": [1.0], "context_ratio": [0.0], "num_prototypes": [1]},
        **{"student_temperature": [0.0], "teacher_temperature": [NAN], "weight": [-1.0]},
        **{"head_hidden": [0], "head_bottleneck": [0]},
    },
    "sp": {"pool": ["max"], "sigma": [(1.0, 1.0, 0.0, 1.0), (1.0, 1.0)], "weight": [-1.0]},
    "lejepa": {
        **{"sigreg_weight": [0.0, 1.5], "num_slices": [0], "hidden_dim": [0]},
        **{"projection_dim": [0], "weight": [-1.0]},
    },
    "paka": {"on": ["masked"], "resize": ["area"], "weight": [-1.0]},
    "gram": {"on": ["masked"], "level": ["patch"], "resize": ["area"], "weight": [-1.0]},
    "distill": {
        **{"target": ["blank"], "num_rolls": [0], "standardise": ["white"]},
        **{"distance": ["l3"], "class_weight": [-1.0], "patch_weight": [NAN]},
        **{"on": ["masked"], "weight": [-1.0]},
    },
}
SAID: Options = {
    "droppos": {"mask_ratio": "less than 1", "decoder_dim": "multiple of 4", "weight": "finite"},
    "mae": {"weight": "greater than or equal to 0"},
    "dinov2": {"mask_ratio": "low <= high < 1", "centering": "'sinkhorn' or 'centering'"},
    "supervised": {"mix_rate": "less than or equal to 1"},
}
"""What a refusal adds, of each kind of range once."""


@pytest.mark.parametrize("name", algorithm_names())
def test_a_value_outside_of_its_range_is_refused(name: str) -> None:
    for option, values in OUTSIDE[name].items():
        for value in values:
            said = rf"'{name}\.{option}(\.[01])?' is .*{SAID.get(name, {}).get(option, '')}"
            with pytest.raises(UserError, match=said):
                made(name, **{option: value})
