"""Export of Swin: timm computes our features, and a fine-tuned run's logits."""

from pathlib import Path

import torch

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


def test_a_pre_trained_swin_has_a_zero_classifier(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(small_swin(tmp_path, "droppos", DROPPOS))
    model = printed_model(export(str(checkpoint), tmp_path / "swin.pth", format="timm"))
    assert model.num_classes == 1000 and not model.get_classifier().weight.any()
