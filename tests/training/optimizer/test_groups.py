"""Parameter groups: what is decayed, layer decay as in timm, and parts that wait."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from timm import create_model
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from pospre.algorithms.supervised.supervised import Supervised
from pospre.model.algorithm import PretrainAlgorithm
from pospre.model.model import PretrainModel
from pospre.model.objective import Objective
from pospre.model.uses import Pass, Uses
from pospre.nn.build import build_encoder
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.lora import add_lora
from pospre.recipe.sections import Optimizer, Schedule
from pospre.training.optimizer.optim import build_optimizer, parameter_groups, rate_scale
from pospre.training.optimizer.schedule import build_schedule
from tests.algorithms.cases import made
from tests.refusals import refuses


def small_model(*algorithms: PretrainAlgorithm, **options: Any) -> PretrainModel:
    encoder = build_encoder("vit_tiny16", image_size=32, patch_size=8, depth=2, **options)
    return PretrainModel(encoder, algorithms, seed=0)


def by_name(model: nn.Module, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the group of every trained parameter, with a peak rate of 1."""
    groups = parameter_groups(model, 1.0, **options)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = [(names[id(parameter)], group) for group in groups for parameter in group["params"]]
    assert len(dict(found)) == len(found)  # none twice
    return dict(found)


def test_only_vectors_go_without_weight_decay() -> None:
    model = small_model(made("droppos"))
    groups = by_name(model)
    assert set(groups) == {name for name, p in model.named_parameters() if p.requires_grad}
    assert "encoder.positions.pos_embed" in dict(model.named_parameters())
    assert "encoder.positions.pos_embed" not in groups  # fixed, not trained
    for name in ("encoder.cls_token", "encoder.patch_embed.proj.weight"):
        assert groups[name]["weight_decay"] == 0.05
    for name in ("encoder.patch_embed.proj.bias", "encoder.norm.weight"):
        assert groups[name]["weight_decay"] == 0.0
    assert len({id(group) for group in groups.values()}) == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layer_decay": 2}, "layer_decay is 2.*less than or equal to 1"),
        ({"no_decay": "bias"}, "no_decay is 'bias'"),  # its letters are in every name
        ({"lr": "fast"}, "lr is 'fast': .*number"),
        ({"weigth_decay": 0}, "Did you mean 'weight_decay'"),
        ({"model": nn.Linear(2, 2), "layer_decay": 0.5}, "layer_decay need the PretrainModel"),
    ],
)
def test_groups_that_cannot_be_are_refused(wrong: dict[str, Any], said: str) -> None:
    arguments: dict[str, Any] = {"model": small_model(), "lr": 1e-3, **wrong}
    refuses(said, lambda: parameter_groups(**arguments))


def test_a_wrapper_hides_no_blocks() -> None:
    model = small_model()
    wrapped = nn.parallel.DataParallel(model)
    rates = [group["lr"] for group in parameter_groups(wrapped, 1.0, layer_decay=0.5)]
    assert rates == [group["lr"] for group in parameter_groups(model, 1.0, layer_decay=0.5)]
    assert set(rates) == {0.125, 0.25, 0.5, 1.0}


def test_names_without_decay() -> None:
    groups = by_name(small_model(positions="learned"), no_decay=("pos_embed", "cls_token"))
    assert groups["encoder.positions.pos_embed"]["weight_decay"] == 0.0
    assert groups["encoder.cls_token"]["weight_decay"] == 0.0
    assert groups["encoder.patch_embed.proj.weight"]["weight_decay"] == 0.05


@pytest.mark.parametrize(
    ("positions", "name"), [("rotary_mixed", "freqs"), ({"alibi": {"slopes": "learned"}}, "slope")]
)
def test_frequencies_and_slopes_of_positions_go_without_decay(positions: Any, name: str) -> None:
    groups = by_name(small_model(positions=positions))
    assert groups[f"encoder.positions.{name}"]["weight_decay"] == 0.0
    assert groups["encoder.blocks.0.attn.qkv.weight"]["weight_decay"] == 0.05


def test_layer_decay_is_timms() -> None:
    theirs = create_model("vit_base_patch16_224", depth=3, global_pool="avg", num_classes=7)
    expected = {}
    names = {id(parameter): name for name, parameter in theirs.named_parameters()}
    listed = param_groups_layer_decay(
        theirs, 0.05, no_weight_decay_list=("pos_embed", "cls_token"), layer_decay=0.65
    )
    for group in listed:
        for parameter in group["params"]:
            expected[names[id(parameter)]] = (group["lr_scale"], group["weight_decay"])
    encoder = build_encoder("vitb16", depth=3, positions="learned")
    model = PretrainModel(encoder, seed=0)
    groups = by_name(model, layer_decay=0.65, no_decay=("pos_embed", "cls_token"))
    compared = 0
    for name, group in groups.items():
        name = encoder.timm_name_of(name.removeprefix("encoder."))
        if name in expected:  # timm has fc_norm and head where ours has norm
            assert (group["lr"], group["weight_decay"]) == pytest.approx(expected[name])
            compared += 1
    assert compared == len(expected) - 4
    assert expected["fc_norm.weight"][0] == expected["head.weight"][0] == 1.0
    assert groups["encoder.norm.weight"]["lr"] == 1.0


@pytest.mark.parametrize(
    ("positions", "rates"),
    [
        ("relative", {"tables.0": 0.25, "tables.1": 0.5}),  # as block 0 and block 1
        ("shared_relative", {"table": 1.0}),  # BEiT's code gives it the last layer's id
        ("rotary_mixed", {"freqs": 1.0}),  # as timm does
        ("learned_rotary", {"pos_embed": 0.125}),  # as the patch embedding
    ],
)
def test_positions_learn_as_what_they_are_told_to(positions: str, rates: dict[str, float]) -> None:
    groups = by_name(small_model(positions=positions), layer_decay=0.5, no_decay=("tables.",))
    found = {name: group for name, group in groups.items() if ".positions." in name}
    assert {name.partition(".positions.")[2]: each["lr"] for name, each in found.items()} == rates
    for name, group in found.items():
        assert group["weight_decay"] == (0.0 if "tables" in name or "freqs" in name else 0.05)


def test_smallest_rate_of_vit_base_and_the_patch_embeddings_own() -> None:
    with torch.device("meta"):
        model = PretrainModel(build_encoder("vitb16"), seed=0)
    groups = by_name(model, layer_decay=0.75, patch_embed_lr=0.2)
    assert groups["encoder.cls_token"]["lr"] == pytest.approx(0.023757, rel=1e-4)
    assert groups["encoder.patch_embed.proj.weight"]["lr"] == pytest.approx(0.2 * 0.75**13)
    assert groups["encoder.blocks.11.mlp.fc1.weight"]["lr"] == 0.75


def test_pairs_have_a_rate_of_their_own() -> None:
    encoder = build_encoder("vit_tiny16", image_size=32, depth=3)
    add_lora(encoder, blocks=2, rank=4, layers=["q"])
    groups = by_name(PretrainModel(encoder, seed=0), layer_decay=0.5, lora_lr=4.0)
    pair = "encoder.blocks.1.attn.qkv.lora.q.a"
    assert (groups[pair]["lr"], groups[pair]["weight_decay"]) == (4 * 0.25, 0)
    assert groups["encoder.blocks.1.norm1.weight"]["lr"] == 0.25


BLOCKS_FROM_THE_END = {
    "encoder.patch_embed.proj.weight": 13,
    "encoder.patch_embed.norm.weight": 13,
    "encoder.layers.0.blocks.0.attn.qkv.weight": 12,
    "encoder.layers.0.blocks.1.mlp.fc1.weight": 11,
    "encoder.layers.1.downsample.reduction.weight": 10,
    "encoder.layers.1.blocks.0.attn.offset_bias.fc1.weight": 10,
    "encoder.layers.2.downsample.norm.weight": 8,
    "encoder.layers.2.blocks.5.norm1.weight": 3,
    "encoder.layers.3.downsample.reduction.weight": 2,
    "encoder.layers.3.blocks.0.attn.proj.bias": 2,
    "encoder.layers.3.blocks.1.attn.proj.weight": 1,
    "encoder.norm.weight": 0,
    "objectives.named.supervised.head.linear.weight": 0,
}


def test_layer_decay_counts_swins_blocks_through_the_stages() -> None:
    with torch.device("meta"):
        swin: Any = {"image_size": 256, "class_token": False, "init": "trunc_normal"}
        encoder = build_encoder("swin_tiny", positions="relative", **swin)
        model = PretrainModel(encoder, [Supervised(num_classes=5, pooling="mean")], seed=0)
    assert {*BLOCKS_FROM_THE_END} <= {*dict(model.named_parameters())}
    for name, below in BLOCKS_FROM_THE_END.items():
        scale = rate_scale(model, name, Optimizer(layer_decay=0.85))
        assert scale == pytest.approx(0.85**below), name


def test_editors_learn_as_the_patch_embedding() -> None:
    model = small_model(made("droppos"))
    groups = by_name(model, layer_decay=0.5)
    assert groups["places.named.droppos.mark"]["lr"] == 0.125
    assert groups["objectives.named.droppos.predict.weight"]["lr"] == 1.0


class Waiting(Objective):
    """An objective whose last layer waits for two epochs."""

    def __init__(self, encoder: PatchEncoder, options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, passes: dict[str, Tensor], batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"x": self.last(self.first(passes["x"]))}

    def loss(self, outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return outputs["x"].square().mean()


@dataclass(kw_only=True, eq=False)
class Waits(PretrainAlgorithm):
    """The method of this objective."""

    objective = Waiting

    def uses(self, encoder: PatchEncoder) -> Uses:
        return Uses(passes={"x": Pass()}, frozen={"last": 2})


class Step:
    """Training of a waiting objective, step by step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = small_model(Waits())
        self.objective = model.objectives.of(Waiting)
        rates = Optimizer(base_lr=0.1, lr_rule="none")
        self.optimizer = build_optimizer(model, rates, batch_size=8)
        self.schedule = build_schedule(
            self.optimizer,
            Schedule(name="constant", warmup="0ep"),
            rates=rates,
            max_duration="9ba",
            steps_per_epoch=3,
            batch_size=8,
        )

    def train(self, steps: int) -> list[list[bool]]:
        """Return for every step whether the first and the last layer moved."""
        moved = []
        layers = (self.objective.first, self.objective.last)
        for _ in range(steps):
            before = [layer.weight.detach().clone() for layer in layers]
            self.optimizer.zero_grad()
            self.objective.loss(self.objective({"x": torch.ones(1, 2)}, {}), {}).backward()
            self.optimizer.step()
            self.schedule.step()
            after = [layer.weight for layer in layers]
            moved.append([not torch.equal(a, b) for a, b in zip(before, after, strict=True)])
        return moved


def test_frozen_parameters_stand_still_in_the_first_epochs() -> None:
    assert Step().train(8) == [[True, False]] * 6 + [[True, True]] * 2


@pytest.mark.parametrize("stop", [2, 5, 6, 7])
def test_a_resumed_run_waits_for_the_same_epochs(stop: int) -> None:
    whole, first, second = Step(), Step(), Step()
    moved = whole.train(8)
    assert first.train(stop) == moved[:stop]
    second.objective.load_state_dict(first.objective.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.schedule.load_state_dict(first.schedule.state_dict())
    assert second.train(8 - stop) == moved[stop:]
    for name, value in second.objective.state_dict().items():
        assert torch.equal(value, whole.objective.state_dict()[name])
