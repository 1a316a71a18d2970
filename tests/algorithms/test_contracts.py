"""The contract of every algorithm: one suite over all that are discovered."""

import copy
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from pospre.errors import UserError
from pospre.model.algorithm import algorithm_names
from pospre.model.progress import Progress
from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.nn.masking import slot_mask
from tests.algorithms.cases import HOST_OF, Case, Options, written

pytestmark = pytest.mark.science

DRAWING: Options = {
    "mae": {"sampling": "uniform", "second_mask_ratio": 0.25},
    "mp3": {"position_rate": 0.5},
    "lut": {"symmetric": True, "target_mask_ratio": 0.5},
    "part": {"predictor": "attention", "log_ratios": True},
    "stop": {"variant": "both"},
    "diet": {"mixup": 1.0, "cutmix": 1.0},
    "supervised": {"mixup": 0.8, "cutmix": 1.0, "mask_ratio": 0.5},
}
"""Options with which an algorithm draws all that it can draw."""


BESIDE = {*HOST_OF.values()}
"""Hosts that others are tested beside."""


def case_of(name: str, **options: object) -> Case:
    encoder = {"positions": "sincos"} if "position_rate" in options else {}
    return Case((*HOST_OF.get(name, ()), name), {name: dict(options)}, encoder)


@pytest.fixture(params=algorithm_names())
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_gradient_reaches_every_trained_parameter_and_no_teacher(name: str) -> None:
    case = case_of(name)
    model = case.build()
    # what begins at zero (tokens, biases) passes no gradient on: move it away
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    inputs = written(model, case.batch())
    model.loss(model(inputs), inputs)["total"].backward()
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, key
        else:
            assert parameter.grad is not None and parameter.grad.any(), key
    teachers = [p for _, teacher in model.teachers.pairs for p in teacher.parameters()]
    assert not any(parameter.requires_grad for parameter in teachers)


@pytest.mark.parametrize("host", ["mae", "simmim", "ijepa"])
def test_hidden_pixels_reach_the_target_and_never_the_prediction(host: str) -> None:
    case = case_of(host)
    model = case.build()
    inputs = written(model, case.batch())
    inputs["view/flip"][:] = False
    hidden = slot_mask(inputs["view/hidden"], 64).unsqueeze(-1)
    patches = patchify(inputs["view/image"][:, 0], (4, 4))
    changed = unpatchify(torch.where(hidden, patches ^ 255, patches), (8, 8)).unsqueeze(1)
    before, after = model(inputs)[host], model({**inputs, "view/image": changed})[host]
    assert torch.equal(before["predicted"], after["predicted"])
    assert (before["target"] != after["target"]).flatten(1).any(1).all()


def without(batch: dict[str, torch.Tensor], key: str) -> dict[str, torch.Tensor]:
    return {other: value for other, value in batch.items() if other != key}


def test_a_view_that_the_loader_left_out_is_said(name: str) -> None:
    case = case_of(name)
    model = case.build()
    for key in case.batch().keys() - {"index", "epoch", "label"}:
        if not key.endswith("/box"):
            with pytest.raises(UserError, match=f"lacks '{key}', for views of .*from_images"):
                model(written(model, without(case.batch(), key)))


@pytest.mark.parametrize("name", [name for name in algorithm_names() if (name,) not in BESIDE])
def test_compiled_forward_is_one_graph_that_stays_with_the_same_loss(
    name: str, whole_graph: Any
) -> None:
    case = case_of(name, **DRAWING.get(name, {})).of_one_block()
    model = case.build()
    twin = case.build()  # a forward may move running statistics
    inputs = written(model, case.batch())
    eager = model.loss(model(inputs), inputs)["total"]
    written(twin, case.batch())
    compiled = whole_graph(twin)
    torch.testing.assert_close(
        twin.loss(compiled(inputs), inputs)["total"], eager, rtol=1e-4, atol=1e-5
    )
    for progress in (0.0, 0.2, 0.7, 0.9):
        compiled(twin.prepare(case.batch(), progress))
    assert counters["stats"]["unique_graphs"] == 1


def test_bf16_loss_is_finite_and_near_fp32(name: str) -> None:
    case = case_of(name)
    model = case.build()
    inputs = written(model, case.batch())
    full = model.loss(copy.deepcopy(model)(inputs), inputs)["total"]
    with torch.autocast("cpu", torch.bfloat16):
        half = model.loss(model(inputs), inputs)["total"]
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, full, rtol=0.05, atol=0.05)


def test_microbatches_sum_to_the_batch_unless_it_says_that_samples_are_coupled(name: str) -> None:
    options: list[dict[str, object]] = [{}]
    if name == "droppos":
        options.append({"temperature": None})
    split = [slice(0, 3), slice(3, 4)]
    if name in ("lut", "lejepa"):  # whose batch norm, or SIGReg, takes no single sample
        split = [slice(0, 3), slice(3, 6)]
    for chosen in options:
        case = case_of(name, **chosen)
        says = bool(case.layout().coupled)
        whole, parts = (_gradients(case, each) for each in ([slice(0, split[-1].stop)], split))
        assert whole.keys() == parts.keys()
        near = all(torch.allclose(parts[key], whole[key], 1e-3, 1e-5) for key in whole)
        assert near != says


def _gradients(case: Case, microbatches: list[slice]) -> dict[str, torch.Tensor]:
    """Return the loss and all gradients as Composer sums them over microbatches."""
    model = case.build()
    total, samples = torch.zeros(()), microbatches[-1].stop
    for rows in microbatches:
        inputs = written(model, {key: value[rows] for key, value in case.batch(samples).items()})
        loss = model.loss(model(inputs), inputs)["total"] * ((rows.stop - rows.start) / samples)
        loss.backward()
        total += loss.detach()
    gradients = {k: p.grad for k, p in model.named_parameters() if p.grad is not None}
    return {"total": total, **gradients}


CENTRED: Options = {"dinov2": {"centering": "centering"}}
NORMS = [f"{part}.1.running_{what}" for part in ("head", "predictor") for what in ("mean", "var")]
NORMS += [f"{part}.1.num_batches_tracked" for part in ("head", "predictor")]
LAYERS = [name.replace("head.1", "project.1") for name in NORMS if name.startswith("head")]
LAYERS += [name.replace("project.1", "project.4") for name in LAYERS]
KEEPING: list[tuple[Case, list[str]]] = [
    (
        Case(("dinov2",), CENTRED),
        ["class_targets.center.center_K", "patch_targets.center.center_K"],
    ),
    (Case(("dinov2", "masked_position"), CENTRED), ["targets.center.center_K"]),
    (Case(("mae", "lut")), NORMS),
    (Case(("mae", "lut"), {"lut": {"symmetric": True}}), NORMS),
    (Case(("lejepa",)), LAYERS),
]
"""Methods whose objective keeps something from batch to batch, besides parameters: its names."""


@pytest.mark.parametrize(("case", "names"), KEEPING)
def test_what_is_kept_moves_as_far_in_a_step_of_microbatches(case: Case, names: list[str]) -> None:
    sizes = (4,) if case.names == ("lejepa",) else (4, 2)  # two are too few for SIGReg
    before, whole, *others = (_kept(case, size) for size in (0, 8, *sizes))
    prefix = f"objectives.named.{case.names[-1]}."
    assert {f"{prefix}{name}" for name in names} == {key for key in whole if prefix in key}
    for name, usual in whole.items():
        for other in others if not name.endswith("running_var") else ():  # too noisy
            moved, all_at_once = (value.double() - before[name] for value in (other[name], usual))
            far = (moved * all_at_once).sum() / all_at_once.square().sum()
            # batch norms see their microbatch
            assert float(far) == pytest.approx(1, abs=0.3 if "running" in name else 1e-4), name


def test_other_methods_keep_nothing(name: str) -> None:
    if name not in ("lut", "lejepa"):
        assert _kept(case_of(name), 0) == {}


def _kept(case: Case, size: int) -> dict[str, torch.Tensor]:
    """Return what objectives keep after a step on eight samples, ``size`` at a time; 0: before."""
    model = case.build()
    with torch.no_grad():
        for parameter in model.objectives.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    for start in range(0, 8, size) if size else ():
        rows = {key: value[start : start + size] for key, value in case.batch(8).items()}
        model(written(model, rows))
    model.after_step(Progress(0.0, 0.0))
    learned = {name for name, _ in model.named_parameters()}
    state = model.objectives.state_dict(prefix="objectives.")
    return {k: v.clone() for k, v in state.items() if k not in learned and "teacher" not in k}


def test_what_is_written_depends_on_seed_epoch_and_index_alone(name: str) -> None:
    case = case_of(name, **DRAWING.get(name, {}))
    model = case.build()
    batch = case.batch(4)
    whole = written(model, batch)
    order = [3, 1]
    part = written(model, {k: v[order] for k, v in batch.items()})
    for key, value in whole.items():
        assert torch.equal(part[key], value[order]), key
    others = {
        "epoch": written(model, batch | {"epoch": batch["epoch"] + 1}),
        "index": written(model, batch | {"index": batch["index"] + 100}),
        "seed": written(case.build(seed=8), batch),
    }
    # all that is written is drawn, but for what follows from the loader's boxes
    drawn = whole.keys() - batch.keys() - {"loca/place"}
    assert bool(drawn) == bool({*case.layout().writers} - {*batch})
    for word, other in others.items():
        assert [key for key in drawn if torch.equal(other[key], whole[key])] == [], word
