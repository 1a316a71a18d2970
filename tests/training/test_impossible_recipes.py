"""Recipes that cannot work: exit 2, one message that says what would.

The tests of each algorithm have its own options.
"""

from pathlib import Path

import pytest

from tests.training.tiny_runs import Run

CROPS = "data.views={global: {count: 2, size: 64}}"
SWIN = (
    "encoder={name: swin_tiny, image_size: 256, positions: relative, class_token: false,"
    " init: trunc_normal}"
)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        # multi-crop on data that have one view, and views that do not fit
        (["algorithms={dinov2: {}}"], ["algorithms.dinov2", "'global'", "data.views.global"]),
        ([CROPS, "algorithms={mae: {}}"], ["algorithms.mae needs the view group 'view'"]),
        (["data.views={view: {size: 40}}"], ["data.views.view.size", "16"]),
        (["data.views={view: {size: 48}}"], ["data.views.view.size", "[64, 64]"]),
        (["data.views={view: {count: 2}}"], ["data.views.view.count is 2"]),
        (
            ["data.views={view: {}, query: {inside: global}}"],
            ["data.views.query.inside = global", "the other view groups are: view"],
        ),
        # two hosts, and algorithms beside hosts that they are not for
        (["algorithms={mae: {}, mp3: {}}"], ["mp3 alone", "with dinov2", "droppos"]),
        (["algorithms={simmim: {}, mp3: {}}"], ["mp3 alone", "with dinov2"]),
        (["algorithms={mae: {}, simmim: {}}"], ["both write", "Use one of them"]),
        (
            ["algorithms={mp3: {position_rate: 0.5}}", "encoder.positions=none"],
            ["mp3.position_rate = 0.5", "Set encoder.positions: sincos"],
        ),
        (
            ["encoder.positions=none"],
            ["droppos changes the places", "has none to change", "Use sincos, learned"],
        ),
        (["algorithms={mae: {}, stop: {}}"], ["algorithms.stop", "ijepa"]),
        (["algorithms={lut: {}}"], ["algorithms.lut", "with mae"]),
        (["algorithms={crop_field: {}}"], ["crop_field", "Add a host"]),
        (["algorithms={ema_teacher: {}}"], ["listed has a loss", "Add a host"]),
        (
            ["algorithms={mae: {}, crop_field: {}}", "encoder.positions=relative"],
            ["crop_field places views anywhere", "encoder.positions = relative", "Use sincos"],
        ),
        (["encoder.positions={relative: {heads: 3}}"], ["'encoder.positions.relative.heads'"]),
        (["encoder.positions={relative: {}, sincos: {}}"], ["give a scheme's name"]),
        (["encoder.positions=relativ"], ["'relativ'", "relative"]),
        (
            ["encoder.positions=[rotary]"],
            ["['rotary'] (list); expected a scheme's name, or {name:"],
        ),
        (["algorithms.droppos.affinity=teacher"], ["droppos.affinity = teacher", "ema_teacher"]),
        (["encoder.name=swin_tiny"], ["swin_tiny needs encoder.depth: null, not 1"]),
        (
            [SWIN, "algorithms={simmim: {}}"],
            ["needs a token for every patch", "Only droppos, mae, supervised support"],
        ),
        (
            ["trainer.compile=true", "data.views={view: {augment: {erase_rate: 0.25}}}"],
            ["trainer.compile on the CPU crashes", "data.views.view.augment.erase_rate"],
        ),
        (["encoder.window=8"], ["encoder.window = 8 is for swin_tiny"]),
        # numbers that are none
        (["optimizer.weight_decay=.inf"], ["'optimizer.weight_decay' is inf", "a finite number"]),
        (["encoder.layer_scale=.inf"], ["'encoder.layer_scale' is inf", "a finite number"]),
        (["data.cache_limit=.inf"], ["'data.cache_limit' is inf", "200GB"]),
        (
            ["algorithms={ijepa: {target_scale: [.nan, 0.2]}}"],
            ["'algorithms.ijepa.target_scale.0' is nan", "a finite number"],
        ),
        # nothing to learn
        (
            ["algorithms={mp3: {}}", "encoder.positions=none", "encoder.image_size=16"],
            ["encoder.image_size = [16, 16]", "Use a larger image"],
        ),
        # options and views of no use
        (
            ["data.views={view: {}, local: {}}"],
            ["data.views.local", "is not read by any", "Remove it"],
        ),
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
