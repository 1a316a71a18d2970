"""DINOv2 against numbers recorded from the published code: a whole step, and its parts alone.

The published step was run as it is (backbone, heads, losses) on CPU, with the tensors that
``official.tensor`` draws; its fused attention was replaced by the plain one in the same repository,
and lists of crops were encoded one after the other.
"""

import json

import pytest
import torch
from torch import Tensor, nn

from pospre.algorithms.dinov2.dinov2 import DINOv2
from pospre.algorithms.dinov2.losses import Center, koleo, sinkhorn
from pospre.algorithms.dinov2.prototype_task import PrototypeHead
from pospre.data.views.options import ViewGroup
from pospre.model.model import PretrainModel
from tests.algorithms.official import FIXTURES, assert_recorded, small_encoder, tensor

pytestmark = pytest.mark.science

RECORDED = json.loads((FIXTURES / "dinov2_official.json").read_text())
SAMPLES, LOCALS = 4, 3
VIEWS = {
    "global": ViewGroup(name="global", count=2, size=48),
    "local": ViewGroup(name="local", count=LOCALS, size=48),
}
NAMES = (
    ("contents.named.dinov2.token", "backbone.mask_token"),
    ("objectives.named.dinov2.", ""),
    ("teacher.module.", "backbone."),
    ("encoder.", "backbone."),
    ("positions.pos_embed", "pos_embed"),
    ("teacher_", ""),
    ("patch_head.", "ibot_head."),
    ("module.", ""),
    ("last.weight", "last_layer.weight_v"),
    ("last.scale", "last_layer.weight_g"),
)


class RecordedImages(nn.Module):
    """Stands where flip and normalisation stand, and returns the recorded images."""

    def forward(self, image: Tensor, *rest: object) -> Tensor:
        group = "global" if image.shape[1] == 2 else "local"
        crops = [
            tensor(f"{group}{sample}_{view}", (3, 48, 48), 2.0)
            for sample in range(SAMPLES)
            for view in range(image.shape[1])
        ]
        return torch.stack(crops).unflatten(0, (SAMPLES, -1))


def official_name(name: str) -> str:
    """Translate one of our parameter names into the official repository's."""
    for ours, theirs in NAMES:
        name = name.replace(ours, theirs, 1)
    return f"dino_{name}" if name.startswith("head.") else name


def load_weights(model: PretrainModel) -> None:
    """Give student and teacher the weights of the recorded run."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            theirs = official_name(name)
            if theirs.endswith("weight_g"):
                continue  # ones on both sides
            full = ("teacher." if "teacher" in name else "student.") + theirs
            if theirs.endswith("gamma") or ("norm" in theirs and theirs.endswith("weight")):
                start = 1.0 if "norm" in theirs else 0.3
                parameter.copy_(start + tensor(full, parameter.shape, 0.1))
            else:
                # the published mask token has two dimensions, as a matrix has
                parameter.copy_(tensor(full, parameter.shape, 0.2 if parameter.ndim > 1 else 0.1))


def recorded_batch() -> dict[str, Tensor]:
    masked = torch.zeros(SAMPLES, 72, dtype=torch.bool)
    for sample, cells in enumerate(RECORDED["masked"]):
        masked[sample, cells] = True
    return {
        "index": torch.arange(SAMPLES),
        "epoch": torch.zeros(SAMPLES, dtype=torch.int64),
        "global/image": torch.zeros(SAMPLES, 2, 3, 48, 48, dtype=torch.uint8),
        "global/flip": torch.zeros(SAMPLES, 2, dtype=torch.bool),
        "global/masked": masked.unflatten(1, (2, 36)),
        "local/image": torch.zeros(SAMPLES, LOCALS, 3, 48, 48, dtype=torch.uint8),
        "local/flip": torch.zeros(SAMPLES, LOCALS, dtype=torch.bool),
    }


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("sinkhorn", {}),
        ("centering", {"centering": "centering"}),
        ("separate_heads", {"separate_heads": True}),
    ],
)
def test_a_step_equals_the_official_code(case, options):
    recorded = RECORDED["cases"][case]
    encoder = small_encoder(positions="learned", layer_scale=0.1)
    algorithm = DINOv2(
        num_prototypes=24,
        head_hidden=40,
        head_bottleneck=16,
        train_norm=True,
        teacher_temperature_start=0.06,
        **options,
    )
    model = PretrainModel(encoder, [algorithm], seed=0, views=VIEWS)
    model.augment = RecordedImages()  # type: ignore[assignment]
    load_weights(model)
    inputs = recorded_batch()
    for step in recorded["steps"]:  # the second step sees the centre of the first
        model.zero_grad()
        terms = model.loss(model(inputs), inputs)
        terms["total"].backward()
        dino = step["dino_local_crops_loss"] + step["dino_global_crops_loss"]
        assert abs(float(terms["metric/dinov2_dino"]) - dino) < 1e-5
        assert abs(float(terms["metric/dinov2_ibot"]) - 2 * step["ibot_loss"]) < 1e-5
        assert abs(0.1 * float(terms["metric/dinov2_koleo"]) - 2 * step["koleo_loss"]) < 1e-5
        model.objectives["dinov2"].after_step()
    checked = set()
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        theirs = official_name(name)
        checked.add(theirs)
        assert_recorded(parameter.grad, recorded["gradients"][theirs], theirs)
    assert checked == set(recorded["gradients"])


def test_the_head_alone():
    head = PrototypeHead(12, 20, hidden=16, bottleneck=8, train_norm=True)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            theirs = name.replace("last.weight", "last_layer.weight_v")
            if name != "last.scale":
                parameter.copy_(tensor(f"head.{theirs}", parameter.shape, 0.3))
    tokens = tensor("head.input", (5, 12), 1.0).requires_grad_()
    logits = head(tokens)
    (logits * tensor("head.probe", logits.shape, 1.0)).sum().backward()
    recorded = RECORDED["head"]
    torch.testing.assert_close(logits, torch.tensor(recorded["logits"]), atol=1e-5, rtol=0)
    torch.testing.assert_close(tokens.grad, torch.tensor(recorded["input"]), rtol=1e-4, atol=1e-5)
    for name, parameter in head.named_parameters():
        theirs = official_name(f"head.{name}").removeprefix("dino_head.")
        expected = torch.tensor(recorded["gradients"][theirs])
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.04, 0.07])
def test_sinkhorn_alone(temperature):
    targets = sinkhorn(tensor("sinkhorn", (9, 14), 1.0), temperature)
    expected = torch.tensor(RECORDED["sinkhorn"][str(temperature)])
    torch.testing.assert_close(targets, expected, atol=1e-5, rtol=0)
    if temperature == 0.07:
        patches = torch.tensor(RECORDED["ibot_sinkhorn"])
        torch.testing.assert_close(targets, patches, atol=1e-5, rtol=0)


def test_centering_alone():
    center = Center(14)
    for step, recorded in enumerate(RECORDED["centering"]):
        targets = center(tensor(f"center{step}", (6, 14), 1.0), 0.07)
        torch.testing.assert_close(targets, torch.tensor(recorded), atol=1e-5, rtol=0)
        center.after_step()


def test_koleo_alone():
    features = tensor("koleo", (6, 10), 1.0).requires_grad_()
    loss = koleo(features)
    loss.backward()
    assert abs(float(loss) - RECORDED["koleo"]["loss"]) < 1e-5
    expected = torch.tensor(RECORDED["koleo"]["gradient"])
    torch.testing.assert_close(features.grad, expected, rtol=1e-4, atol=1e-5)
