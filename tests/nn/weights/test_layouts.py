"""Published layouts of weights: every tensor arrives, and the features are the publisher's own.

The weights are random; the files are laid out as each code saves them. What computes the expected
features is timm's or transformers' model of the same weights.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.models import open_model
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.positions.file_tables import with_prefix_rows
from pospre.nn.positions.sincos import sincos_positions
from pospre.nn.positions.table import Resampling, Table, resample_positions
from pospre.nn.weights.timm_models import wrap_encoder
from pospre.training.foreign import Shown
from pospre.training.start_weights import load_weights

State = dict[str, Tensor]
SMALL: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 2}
ALIKE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5}


def images(side: int = 32) -> Tensor:
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


def drawn(model: Any) -> Any:
    """Give every tensor of a model other values than it begins with."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def vit(**options: Any) -> Any:
    chosen = {"num_classes": 0, **SMALL, **options}
    return drawn(timm.create_model("vit_tiny_patch16_224", **chosen))


def beit(**options: Any) -> Any:
    chosen = {**SMALL, "num_heads": 3, "num_classes": 0, **options}
    return drawn(timm.create_model("beit_base_patch16_224", **chosen))


def renamed(state: State, *pairs: tuple[str, str]) -> State:
    for old, new in pairs:
        state = {key.replace(old, new): value for key, value in state.items()}
    return state


def under(start: str, state: State, shift: float = 0.0) -> State:
    return {f"{start}{key}": value + shift for key, value in state.items()}


def optimiser(state: State) -> dict[str, Any]:
    moments = {number: {"exp_avg": value} for number, value in enumerate(state.values())}
    return {"state": moments, "param_groups": [{"lr": 1e-3, "params": [*moments]}]}


def mae(state: State) -> Any:
    decoder = {"mask_token": torch.ones(1, 1, 64), "decoder_pred.weight": torch.ones(4, 64)}
    return {
        "model": state | decoder,
        "optimizer": optimiser(state),
        "epoch": 799,
        "args": argparse.Namespace(model="mae_vit", lr=1e-3),
    }


def pixio(state: State) -> Any:
    """Its class tokens are one tensor, each with a row of the table."""
    tokens = torch.cat([state["cls_token"], state.pop("reg_token")], dim=1)
    return state | {"cls_token": tokens}


def droppos(state: State) -> Any:
    return mae(state | {"mask_pos_token": torch.ones(1, 1, 192)})


def dino(state: State) -> Any:
    return {
        "student": under("module.backbone.", state) | {"module.head.mlp.0.bias": torch.ones(4)},
        "teacher": under("backbone.", state, 1.0) | {"head.mlp.0.bias": torch.ones(4)},
        "args": argparse.Namespace(arch="vit_tiny"),
    }


def dinov2(state: State) -> Any:
    return state | {"mask_token": torch.ones(1, 192)}


def chunks(state: State) -> Any:
    """As DINOv2's training saves its teacher: every chunk counts its blocks on."""
    parts = [(f"blocks.{number}.", f"blocks.{number // 1}.{number}.") for number in range(2)]
    return {"teacher": under("backbone.", renamed(dinov2(state), *parts))}


def registers(state: State) -> Any:
    """As DINOv2 saves them: the class token's position is apart, registers have none."""
    position = torch.full((1, 1, 192), 0.25)
    table = torch.cat([position, state["pos_embed"]], dim=1)
    state = state | {"cls_token": state["cls_token"] - position, "pos_embed": table}
    return renamed(dinov2(state), ("reg_token", "register_tokens"))


def ijepa(state: State) -> Any:
    return {
        "encoder": under("module.", state),
        "predictor": {"module.predictor_embed.bias": torch.ones(4)},
        "target_encoder": under("module.", state, 1.0),
        "opt": optimiser(state),
        "epoch": 300,
    }


def simmim(state: State) -> Any:
    head = {"decoder.0.bias": torch.ones(4), "encoder.mask_token": torch.ones(1, 1, 192)}
    return {"model": under("encoder.", state) | head, "epoch": 99}


def pretrained_beit(state: State) -> Any:
    index = {"blocks.0.attn.relative_position_index": torch.zeros(17, 17)}
    return {"model": state | index | {"lm_head.bias": torch.ones(4), "mask_token": torch.ones(1)}}


@pytest.mark.parametrize(
    ("model", "layout", "left_out"),
    [
        (vit, lambda state: state, ""),
        (lambda: vit(num_classes=5), lambda state: state, "not used: head.weight, head.bias"),
        (lambda: vit(reg_tokens=4), lambda state: state, ""),
        (lambda: vit(class_token=False, global_pool="avg", fc_norm=False), ijepa, "predictor"),
        (vit, mae, "left out: model.mask_token, model.decoder_pred.weight"),
        (lambda: vit(reg_tokens=7), pixio, ""),
        (vit, droppos, "left out: model.mask_pos_token, model.mask_token, model.decoder_pred"),
        (vit, dino, "left out: student.module.head.mlp.0.bias … teacher.head.mlp.0.bias"),
        (lambda: vit(init_values=0.3), dinov2, "left out: mask_token"),
        (lambda: vit(init_values=0.3), chunks, "left out: teacher.backbone.mask_token"),
        (lambda: vit(init_values=0.3, reg_tokens=4, no_embed_class=True), registers, "mask_token"),
        (vit, simmim, "left out: model.decoder.0.bias"),
        (beit, pretrained_beit, "left out: model.lm_head.bias"),
        (lambda: beit(use_rel_pos_bias=False, use_shared_rel_pos_bias=True, global_pool="token"),
         pretrained_beit, "left out: model.lm_head.bias"),
    ],
    ids=[
        *("timm", "classifier", "timm_registers", "ijepa", "mae", "pixio", "droppos", "dino"),
        *("dinov2", "chunks", "registers", "simmim", "beit", "shared_beit"),
    ],
)  # fmt: skip
def test_every_tensor_arrives_and_features_are_the_publishers(
    model: Callable[[], Any], layout: Callable[[State], Any], left_out: str, tmp_path: Path
) -> None:
    theirs = model()
    path = tmp_path / "published.pth.tar"
    torch.save(layout(theirs.state_dict()), path)
    subject = open_model(str(path))
    expected = theirs.forward_features(images())
    torch.testing.assert_close(subject.model.eval().encoder(images()), expected, **ALIKE)
    count = len(subject.model.encoder.state_dict())
    assert f"{count} of {count} tensors" in subject.origin and left_out in subject.origin
    assert "32×32 pixels" in subject.origin
    described = build_encoder(**subject.recipe.encoder.arguments()).state_dict()
    ours = subject.model.encoder.state_dict()
    assert {k: v.shape for k, v in described.items()} == {k: v.shape for k, v in ours.items()}
    other = subject.initial()
    for key, value in subject.model.encoder.named_parameters():
        fixed = key == "positions.pos_embed" and not value.requires_grad
        assert torch.equal(value, other.encoder.get_parameter(key)) == fixed, key


def test_the_teacher_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    for layout in (dino, ijepa):
        path = tmp_path / "both.pth"
        torch.save(layout(vit().state_dict()), path)
        student, teacher = (
            open_model(str(path), weights=which).model.encoder.state_dict()
            for which in ("student", "teacher")
        )
        assert all(torch.equal(teacher[key], value + 1) for key, value in student.items())
    torch.save(mae(vit().state_dict()), path)
    with pytest.raises(UserError, match=r"--weights = teacher, but .* holds one encoder"):
        open_model(str(path), weights="teacher")


def test_a_fixed_table_is_recognised(tmp_path: Path) -> None:
    state = vit().state_dict()
    state["pos_embed"] = torch.cat([torch.zeros(1, 192), sincos_positions(192, 4, 4)])[None]
    torch.save(mae(state), tmp_path / "mae.pth")
    subject = open_model(str(tmp_path / "mae.pth"))
    assert subject.recipe.encoder.positions == "sincos"
    table = subject.initial().encoder.state_dict()["positions.pos_embed"]
    assert torch.equal(table, state["pos_embed"])


@pytest.mark.parametrize("kind", ["ViT", "Pixio", "Dinov2", "Dinov2WithRegisters"])
def test_models_of_transformers(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    shape = {"hidden_size": 192, "num_hidden_layers": 2, "num_attention_heads": 3}
    sizes = {"intermediate_size": 768, "image_size": 32, "patch_size": 8, "layer_norm_eps": 1e-6}
    config = getattr(library, f"{kind}Config")(**shape, **sizes)
    theirs = drawn(getattr(library, f"{kind}Model")(config))
    theirs.save_pretrained(tmp_path)
    subject = open_model(str(tmp_path / "model.safetensors"))
    expected = theirs(images()).last_hidden_state
    torch.testing.assert_close(subject.model.eval().encoder(images()), expected, **ALIKE)


def test_swiglu_under_dinov2s_names(tmp_path: Path) -> None:
    small = {**SMALL, "embed_dim": 48, "num_heads": 3, "init_values": 0.5}
    theirs = drawn(timm.create_model("vit_giant_patch14_dinov2", num_classes=0, **small))
    named = renamed(theirs.state_dict(), ("mlp.fc1", "mlp.w12"), ("mlp.fc2", "mlp.w3"))
    torch.save(dinov2(named), tmp_path / "giant.pth")
    fresh: Any = timm.create_model("vit_giant_patch14_dinov2", num_classes=0, **small)
    model = PretrainModel(wrap_encoder(fresh), seed=0).eval()
    assert "34 of 34 tensors" in load_weights(model, str(tmp_path / "giant.pth"))
    torch.testing.assert_close(model.encoder(images()), theirs.forward_features(images()), **ALIKE)
    theirs.blocks[0].mlp.fc1.weight.data[128:] = 0  # the values: the gates alone give nothing
    assert not torch.allclose(model.encoder(images()), theirs.forward_features(images()))


@pytest.mark.parametrize(
    ("layout", "how"),
    [(registers, "antialiased"), (dinov2, "offset"), (dino, "offset"), (mae, "bicubic")],
    ids=["registers", "dinov2", "dino", "mae"],
)
def test_positions_are_resampled_once_as_their_family_does(
    layout: Callable[[State], Any], how: Resampling, tmp_path: Path
) -> None:
    """Whatever size was asked for, and whatever size an evaluation takes then."""
    options: dict[str, Any] = {} if layout in (mae, dino) else {"init_values": 0.3}
    if layout is registers:
        options |= {"reg_tokens": 4, "no_embed_class": True}
    state, path = vit(**options).state_dict(), tmp_path / "weights.pth"
    torch.save(layout(state), path)
    subject = open_model(str(path), shown=Shown((48, 24)))
    assert f"resampled: pos_embed 4×4 → 6×3 in each pass ({how})" in subject.origin
    assert subject.model.encoder.image_size == (48, 24)
    for height, width in ((48, 24), (16, 64), (40, 56)):  # the second has as many patches
        grid = (height // 8, width // 8)
        patches, ours = state["pos_embed"][0, -16:], torch.randn(2, 3, height, width)
        head = state["pos_embed"][0, :-16]
        table = torch.cat([head, resample_positions(patches, (4, 4), grid, how)])[None]
        theirs = vit(**options, img_size=(height, width))
        theirs.load_state_dict(state | {"pos_embed": table})
        found = subject.model.eval().encoder(ours)
        torch.testing.assert_close(found, theirs.forward_features(ours), **ALIKE)
    again = vit(**options, img_size=(48, 24))
    again.load_state_dict(subject.model.timm_state(again))
    ours = torch.randn(2, 3, 48, 24)
    found = subject.model.encoder(ours)
    torch.testing.assert_close(again.forward_features(ours), found, **ALIKE)
    with pytest.raises(UserError, match=r"--image-size = 50 is not divisible .* Use 48"):
        open_model(str(path), shown=Shown((48, 50)))


def test_a_model_of_timms_is_resampled_as_timm_does(tmp_path: Path) -> None:
    theirs = vit(dynamic_img_size=True)
    model = PretrainModel(wrap_encoder(theirs), seed=0).eval()
    small = torch.randn(2, 3, 24, 16)
    torch.testing.assert_close(model.encoder(small), theirs.forward_features(small), **ALIKE)
    path = tmp_path / "exported.safetensors"
    save_file(theirs.state_dict(), path)
    name = f"timm:vit_tiny_patch16_224,{path}"
    with pytest.MonkeyPatch.context() as patch:
        create = timm.create_model
        patch.setattr(timm, "create_model", lambda *a, **k: create(*a, **{**k, "depth": 2}))
        encoder = open_model(name, shown=Shown((48, 32))).model.encoder
    table = encoder.positions
    assert isinstance(table, Table)
    assert table.resampling == "antialiased" and table.grid == (4, 4)
    assert torch.equal(table.pos_embed, theirs.state_dict()["pos_embed"])


def test_a_table_is_read_with_the_rows_that_it_has() -> None:
    patches = torch.arange(9.0).view(1, 9, 1) + 1
    head = torch.tensor([[[-1.0]]])
    for table, class_token, registers, rows in (
        (patches, False, 0, []),
        (patches, True, 0, [0]),
        (patches, True, 2, [0, 0, 0]),
        (torch.cat([head, patches], 1), True, 0, [-1]),
        (torch.cat([head, patches], 1), True, 2, [-1, 0, 0]),
        (torch.cat([head, 0 * head, 0 * head, patches], 1), True, 2, [-1, 0, 0]),
    ):
        full = with_prefix_rows(table, class_token, registers, bare=True)
        assert full.flatten().tolist() == [*rows, *range(1, 10)]
    assert with_prefix_rows(patches, True, 0, bare=False) is patches  # or 2×4 and a class token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: {"conv1.weight": torch.ones(1)},
         r"first tensors: conv1.weight. Known .*MAE"),
        (lambda state: [torch.ones(1)], r"holds no Vision Transformer of a known layout"),
        (lambda state: state | {"blocks.1.attn.q_norm.weight": torch.ones(64)},
         r"its tensor 'blocks.1.attn.q_norm.weight' is not in the encoder"),
        (lambda state: {k: v for k, v in state.items() if k != "blocks.1.norm1.bias"},
         r"lacks the tensor 'blocks.1.norm1.bias'"),
        (lambda state: state | {"patch_embed.proj.weight": torch.ones(96, 3, 8, 8)},
         r"encoder of width 96 has"),
        (lambda state: state | {"pos_embed": torch.ones(1, 19, 192)},
         r"grid of its tensor 'pos_embed' \(1, 19, 192\) is not square, .*other.bin,grid=7x28'"),
        (lambda state: {"a": under("v.", state), "b": under("v.", state)},
         r"holds several encoders: a.v., b.v.; save only one"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    change: Callable[[State], Any], message: str, tmp_path: Path
) -> None:
    torch.save(change(vit().state_dict()), tmp_path / "other.bin")
    with pytest.raises(UserError, match=message):
        open_model(str(tmp_path / "other.bin"))
