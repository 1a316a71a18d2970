"""Combinations and options that cannot work: exit 2, one message that says what would."""

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str]]
CROPS = "data.views={global: {count: 2, size: 64}}"
SWIN = (
    "encoder={name: swin_tiny, image_size: 256, positions: relative, class_token: false,"
    " init: trunc_normal}"
)
LEARNED = "encoder.positions=learned"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # multi-crop on data that have one view, and views that do not fit
        (["algorithms={dinov2: {}}"], ["algorithms.dinov2", "'global'", "data.views.global"]),
        ([CROPS, "algorithms={mae: {}}"], ["algorithms.mae needs the view group 'view'"]),
        (["data.views={view: {size: 40}}"], ["data.views.view.size", "16"]),
        (["data.views={view: {size: 48}}"], ["data.views.view.size", "[64, 64]"]),
        (["data.views={view: {count: 2}}"], ["data.views.view.count is 2"]),
        # two hosts, and algorithms beside hosts that they are not for
        (["algorithms={mae: {}, simmim: {}}"], ["both write", "Use one of them"]),
        (["algorithms={mae: {}, mp3: {}}"], ["encoder.positions", "none"]),
        (["encoder.positions=none"], ["droppos needs positions to drop", "sincos or learned"]),
        (["algorithms={mae: {}, stop: {}}"], ["algorithms.stop", "ijepa"]),
        (["algorithms={lut: {}}"], ["algorithms.lut", "beside mae"]),
        (["algorithms={crop_field: {}}"], ["crop_field", "Add a host"]),
        (["algorithms={ema_teacher: {}}"], ["loss of its own", "Add a host"]),
        (
            ["algorithms={mae: {}}", "encoder.positions=relative"],
            ["encoder.positions = relative needs all tokens", "sincos"],
        ),
        # a teacher without momentum, or one that cannot be
        (
            [
                "data.views={view: {}, second: {}}",
                "algorithms={mae: {}, lut: {momentum_start: null}}",
            ],
            ["lut needs a teacher", "lut.momentum_start"],
        ),
        (["algorithms={ijepa: {momentum_start: 1.5}}"], ["1.5", "0 <= start < 1"]),
        (["algorithms.droppos.affinity=teacher"], ["droppos.affinity = teacher", "ema_teacher"]),
        # ratios, grids, heads
        (["algorithms={mp3: {mask_ratio: 1.0}}", "encoder.positions=none"], ["mp3.mask_ratio"]),
        (["algorithms={simmim: {mask_cell: 24}}"], ["simmim.mask_cell", "multiple"]),
        (["algorithms={ijepa: {context_tokens: 16}}"], ["ijepa.context_tokens"]),
        (["algorithms={ijepa: {predictor_heads: 7}}"], ["ijepa.predictor_heads"]),
        (
            [CROPS, LEARNED, "algorithms={dinov2: {num_prototypes: 1}}"],
            ["dinov2.num_prototypes", "1"],
        ),
        (
            [CROPS, LEARNED, "algorithms={dinov2: {}, masked_position: {mask_ratio: [0.5, 1.5]}}"],
            ["masked_position.mask_ratio"],
        ),
        (["algorithms.droppos.sampling=uniform"], ["one patch of every 2×2", "0.75"]),
        (["encoder.name=swin_tiny"], ["swin_tiny needs encoder.depth: null, not 1"]),
        (
            [SWIN, "algorithms={supervised: {num_classes: 2}}"],
            ["supervised.pooling = cls", "Use mean"],
        ),
        (
            [SWIN, "algorithms={supervised: {num_classes: 2, pooling: mean, mask_ratio: 0.75}}"],
            ["supervised.mask_ratio is 0.75", "Set it to 0"],
        ),
        (
            [SWIN, "algorithms={mae: {}}"],
            ["needs a token for every patch", "only droppos and supervised take Swin"],
        ),
        (
            ["trainer.compile=true", "data.views={view: {augment: {erase_rate: 0.25}}}"],
            ["trainer.compile on the CPU crashes", "data.views.view.augment.erase_rate"],
        ),
        (["encoder.window=8"], ["encoder.window = 8 is for swin_tiny"]),
    ],
)
def test_it_exits_2_and_writes_nothing(
    overrides: list[str], words: list[str], tiny: Path, run: Run, tmp_path: Path
) -> None:
    code, said = run(tiny, *overrides)
    assert code == 2, said
    assert said.startswith("error: ") and "Traceback" not in said
    for word in words:
        assert word in said, said
    assert not (tmp_path / "runs").exists()
