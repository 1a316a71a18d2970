"""Export of Swin: timm computes our features, and a fine-tuned run's logits."""

from pathlib import Path

import pytest
import torch

from pospre.errors import UserError
from pospre.exporting.export import export
from pospre.training.build import load_model
from tests.evaluation.checkpoints import printed_model, save_checkpoint
from tests.swin_runs import DROPPOS, SUPERVISED, small_swin


@torch.no_grad()
def test_a_fine_tuned_swins_logits_are_timms(tmp_path: Path) -> None:
    recipe = small_swin(tmp_path, "supervised", SUPERVISED, window=8)
    checkpoint = save_checkpoint(recipe)
    lines = export(str(checkpoint), tmp_path / "swin.pth", format="timm")
    assert "features and logits" in "\n".join(lines)
    model = load_model(str(checkpoint))[0]
    images = torch.randn(2, 3, 64, 64)
    ours = model.objectives["supervised"]({"student": model.encoder(images)}, {})["logits"]
    torch.testing.assert_close(printed_model(lines)(images), ours, atol=1e-4, rtol=1e-4)


def test_a_pre_trained_swin_has_a_zero_classifier_or_none(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(small_swin(tmp_path, "droppos", DROPPOS))
    for classes, number in ((None, 1000), (0, 0)):
        out = tmp_path / f"swin{number}.pth"
        lines = export(str(checkpoint), out, format="timm", num_classes=classes)
        assert printed_model(lines).num_classes == number
    with pytest.raises(UserError, match=r"--grid 8x8 needs positions that take any grid"):
        export(str(checkpoint), tmp_path / "other.pth", format="timm", grid="8x8")
