"""Files of rotary encoders (DINOv3, RoPE-ViT, EVA-02) load whole, or a message says why not.

The weights are random; what computes the expected tokens is timm's or transformers' model.
"""

import math
from collections.abc import Callable
from functools import partial
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
from pospre.nn.positions.foreign import as_text, rope_vit
from pospre.nn.weights.timm_models import wrap_encoder
from pospre.training.foreign import Shown
from pospre.training.start_weights import load_weights
from tests.nn.weights.test_eva import close, redrawn
from tests.refusals import refuses

State = dict[str, Tensor]
QKVB, PLUS = "vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3_qkvb"
AXIAL, APE = "vit_small_patch16_rope_224", "vit_small_patch16_rope_ape_224"
MIXED = "vit_small_patch16_rope_mixed_224"
SMALL = Shown((64, 96))


def vit_of(name: str, **options: Any) -> Any:
    chosen = {"depth": 2, "num_classes": 0, **options}
    return redrawn(timm.create_model(name, **chosen)).float()


def images(side: int = 16) -> Tensor:
    return torch.randn(2, 3, 4 * side, 6 * side, generator=torch.Generator().manual_seed(1))


def renamed(state: State, **pairs: str) -> State:
    for old, new in pairs.items():
        state = {key.replace(old, new): value for key, value in state.items()}
    return state


def as_timm_reads(encoder: Any) -> None:
    """Let a table be read at another grid as timm does; the codes of its authors do otherwise."""
    encoder.positions.resampling = "antialiased"


def official(state: State) -> State:
    """Lay a state of timm's out as DINOv3's code saves it."""
    found = renamed(state, reg_token="storage_tokens", fc1_g="w1", fc1_x="w2")
    found = renamed(found, gamma_1="ls1.gamma", gamma_2="ls2.gamma")
    if any(".w1." in key for key in found):
        found = renamed(found, fc2="w3")
    for block in range(2):
        start = f"blocks.{block}.attn."
        query, value = found.pop(f"{start}q_bias"), found.pop(f"{start}v_bias")
        found[f"{start}qkv.bias"] = torch.cat([query, torch.full_like(query, 7.0), value])
        mask = torch.ones(3, len(query))
        mask[1] = 0
        found[f"{start}qkv.bias_mask"] = mask.flatten()
    periods = 100 ** (torch.arange(16) / 16)
    dim = found["cls_token"].shape[2]
    return found | {
        "mask_token": torch.ones(1, dim),
        "rope_embed.periods": periods.bfloat16().float(),
        "local_cls_norm.weight": torch.ones(dim),
        "local_cls_norm.bias": torch.zeros(dim),
    }


def rounded(vit: Any) -> Any:
    """Let timm's model have the periods of the official files."""
    vit.rope.periods.copy_(vit.rope.periods.bfloat16())
    return vit


@pytest.mark.parametrize("name", [QKVB, PLUS])
def test_an_official_file_arrives_whole(name: str, tmp_path: Path) -> None:
    vit, path = vit_of(name), tmp_path / "dinov3.pth"
    torch.save(official(vit.state_dict()), path)
    subject = open_model(str(path), shown=SMALL)
    count = len(subject.model.encoder.state_dict())
    assert f"{count} of {count} tensors" in subject.origin
    for left_out in ("mask_token", "local_cls_norm"):
        assert left_out in subject.origin
    assert "bias_mask" not in subject.origin and "fresh" not in subject.origin
    with torch.no_grad():
        ours, exact = subject.model.eval().encoder(images()), vit.forward_features(images())
        expected = rounded(vit).forward_features(images())
    assert (exact - expected).abs().max() > 1e-3, "the periods are not felt"
    close(ours, expected, 1e-5)
    positions = {"rotary": {"bf16_periods": True}}
    given: dict[str, Any] = {
        "image_size": (64, 96),
        "depth": 2,
        "layer_scale": 1.0,
        "num_registers": 4,
    }
    model = PretrainModel(build_encoder(f"timm:{name}", positions=positions, **given), seed=0)
    assert f"{count} of {count} tensors" in load_weights(model, path)
    with torch.no_grad():
        close(model.eval().encoder(images()), expected, 1e-5)


def test_a_bias_of_keys_is_not_left_out_in_silence(tmp_path: Path) -> None:
    state = official(vit_of(QKVB).state_dict())
    torch.save({k: v for k, v in state.items() if not k.endswith("bias_mask")}, tmp_path / "v3.pth")
    given: dict[str, Any] = {"depth": 2, "layer_scale": 1.0, "num_registers": 4}
    encoder = build_encoder(f"timm:{QKVB}", image_size=64, positions="rotary", **given)
    with pytest.raises(UserError, match=r"bias of keys in 'blocks\.0.*keep the file's 'bias_mask'"):
        load_weights(PretrainModel(encoder, seed=0), tmp_path / "v3.pth")


@torch.no_grad()
@pytest.mark.parametrize("kept", [(1.0, 0.0, 1.0), (0.0, 0.0, 0.0), (0.5, 0.0, 2.0)])
def test_a_bias_is_multiplied_by_its_mask_as_in_dinov3(kept: Any, tmp_path: Path) -> None:
    vit, path = rounded(vit_of(QKVB)), tmp_path / "v3.pth"
    state = official(vit.state_dict())
    for block, part in enumerate(vit.blocks):
        masked = torch.tensor(kept).repeat_interleave(len(part.attn.q_bias))
        state[f"blocks.{block}.attn.qkv.bias_mask"] = masked
        part.attn.q_bias.mul_(kept[0])
        part.attn.v_bias.mul_(kept[2])
    torch.save(state, path)
    subject = open_model(str(path), shown=SMALL)
    close(subject.model.eval().encoder(images()), vit.forward_features(images()), 1e-5)
    state["blocks.1.attn.qkv.bias_mask"][:] = torch.nan
    torch.save(state, path)
    with pytest.raises(UserError, match=r"'blocks.1.attn.qkv.bias_mask' holds values that are not"):
        open_model(str(path))


@pytest.mark.parametrize("name", [QKVB, PLUS, "vit_small_patch16_dinov3", MIXED, AXIAL, APE])
def test_a_file_of_timms_arrives_whole(name: str, tmp_path: Path) -> None:
    vit, path = vit_of(name, dynamic_img_size=True), tmp_path / "model.safetensors"
    save_file(vit.state_dict(), path)
    told = f",positions={as_text(rope_vit(table=name == APE))}" if name in (AXIAL, APE) else ""
    with torch.no_grad():
        expected = vit.forward_features(images())
    for address in (f"{path}{told}", f"timm:{name},{path}"):
        with pytest.MonkeyPatch.context() as patch:
            shallow = partial(timm.create_model, depth=2)
            patch.setattr(timm, "create_model", shallow)
            subject = open_model(address, shown=SMALL)
        count = len(subject.model.encoder.state_dict())
        assert f"{count} of {count} tensors" in subject.origin
        if name == APE:
            as_timm_reads(subject.model.encoder)
        with torch.no_grad():
            close(subject.model.eval().encoder(images()), expected, 1e-5)
        build_encoder(**subject.recipe.encoder.arguments())


@pytest.mark.parametrize("gated", [False, True])
def test_a_file_of_transformers_arrives_whole(gated: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DINOv3ViTConfig(
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_register_tokens=4,
        use_gated_mlp=gated,
        hidden_act="silu" if gated else "gelu",
    )
    network = redrawn(transformers.DINOv3ViTModel(config)).float()
    network.save_pretrained(tmp_path)
    subject = open_model(str(tmp_path / "model.safetensors"), shown=SMALL)
    count = len(subject.model.encoder.state_dict())
    assert f"{count} of {count} tensors" in subject.origin and "mask_token" in subject.origin
    with torch.no_grad():
        expected = network(pixel_values=images()).last_hidden_state
        close(subject.model.eval().encoder(images()), expected, 2e-5)


def rope_vit_file(state: State) -> State:
    freqs = state["rope.freqs"]
    found = {key: value for key, value in state.items() if key != "rope.freqs"}
    cells = torch.arange(196.0)
    return found | {"freqs": freqs.flatten(2), "freqs_t_x": cells % 14, "freqs_t_y": cells // 14}


def eva_02_file(state: State) -> State:
    found = renamed(state, fc1_g="w1", fc1_x="w2")
    found = renamed(found, **{"q_proj.bias": "q_bias", "v_proj.bias": "v_bias"})
    found = renamed(found, **{"mlp.norm": "mlp.ffn_ln"})
    found = renamed(found, **{"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3"})
    turn = torch.ones(256, 64)
    starts = ("rope.", "blocks.0.rope.", "blocks.1.rope.")
    return found | {f"{start}freqs_{wave}": turn for start in starts for wave in ("cos", "sin")}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        (MIXED, rope_vit_file),
        ("eva02_tiny_patch14_224", eva_02_file),
        ("eva02_base_patch14_224", eva_02_file),
        ("eva02_tiny_patch14_224", lambda state: state),
    ],
)
def test_other_official_files_arrive_whole(
    name: str, layout: Callable[[State], State], tmp_path: Path
) -> None:
    patch = 14 if "eva02" in name else 16
    vit = vit_of(name, dynamic_img_size=True)
    torch.save(layout(vit.state_dict()), tmp_path / "file.pth")
    subject = open_model(str(tmp_path / "file.pth"), shown=Shown((4 * patch, 6 * patch)))
    count = len(subject.model.encoder.state_dict())
    assert f"{count} of {count} tensors" in subject.origin
    if "eva02" in name:
        as_timm_reads(subject.model.encoder)
    with torch.no_grad():
        expected = vit.forward_features(images(patch))
        close(subject.model.eval().encoder(images(patch)), expected, 5e-5)  # 2e-5 with AVX2 alone


def golden(name: str) -> Any:
    vit: Any = timm.create_model(name, depth=2, num_classes=0).double().eval()
    for k, (key, parameter) in enumerate(sorted(vit.named_parameters())):
        i = torch.arange(parameter.numel(), dtype=torch.float64)
        start = 1.0 if key.endswith(("norm.weight", "norm1.weight", "norm2.weight")) else 0.0
        start = 0.5 if "gamma" in key else start
        size = 0.1 if key.endswith("qkv.weight") else 0.02
        values = start + size * torch.sin(0.7 * i**1.1 + 1.3 * k)
        parameter.data.copy_(values.view_as(parameter))
    return vit


@pytest.mark.parametrize(
    ("name", "total", "absolute", "weighted", "token"),
    [
        (QKVB, -12.6031, 10477.214, -0.11421, [1.04737, 0.5868, -1.23559, -1.48175]),
        (PLUS, 5.7996, 10520.580, -0.01453, [0.68117, -0.36054, -2.12804, -0.52426]),
    ],
)
def test_the_tokens_are_those_of_the_official_code(
    name: str, total: float, absolute: float, weighted: float, token: list[float]
) -> None:
    """Figures of facebookresearch/dinov3 @ 6876159 with weights and images of a formula."""
    encoder = wrap_encoder(golden(name)).eval()
    i = torch.arange(2 * 3 * 48 * 64, dtype=torch.float64)
    image = (torch.sin(0.01 * i) + torch.cos(0.0003 * i**1.1)).view(2, 3, 48, 64)
    with torch.no_grad():
        tokens = encoder(image)
    count = torch.arange(tokens.numel(), dtype=torch.float64)
    assert tokens.shape == (2, 17, 384)
    assert float(tokens.sum()) == pytest.approx(total, abs=2e-3)
    assert float(tokens.abs().sum()) == pytest.approx(absolute, abs=2e-2)
    for first in (0, 1):  # whether elements are counted from 0 or from 1
        if math.isclose(
            float((tokens.flatten() * (count + first)).sum()) / 1e6, weighted, abs_tol=2e-5
        ):
            break
    else:
        pytest.fail("the weighted sum is another")
    torch.testing.assert_close(tokens[0, 5, :4], torch.tensor(token).double(), rtol=0, atol=1e-5)


def without(key: str) -> Callable[[State], State]:
    return lambda state: {name: value for name, value in state.items() if name != key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("blocks.1.mlp.w2.bias"), r"lacks .*'blocks.1.mlp.fc1.bias': its part 'value'"),
        (without("storage_tokens"), None),
        (lambda state: state | {"rope_embed.periods": torch.ones(16)},
         r"rotary periods other than .*positions=\{rotary: \{base"),
        (lambda state: state | {"patch_embed.proj.weight": torch.ones(96, 3, 16, 16)},
         r"has shape \(1152, 384\), but an encoder of width 96 has"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(
    change: Callable[[State], State], message: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "dinov3.pth"
    torch.save(change(official(vit_of(PLUS).state_dict())), path)
    if message is None:  # IN1k's ViT-L has none, and periods say that it is rotary
        assert open_model(str(path), shown=SMALL).model.encoder.num_prefix_tokens == 1
        return
    refuses(message, lambda: open_model(str(path), shown=SMALL))


def test_encoder_and_file_must_turn_alike(tmp_path: Path) -> None:
    path = tmp_path / "dinov3.pth"
    torch.save(official(vit_of(QKVB).state_dict()), path)
    given: dict[str, Any] = {"image_size": 64, "depth": 2, "num_registers": 4, "layer_scale": 1.0}
    name = f"timm:{QKVB}"
    for positions, said in (
        ("learned", r"has learned; use encoder.positions = \{rotary: \{bf16_periods: true\}\}"),
        ("none", r"has none; use"),
        ({"rotary": {"bf16_periods": True, "normalize": "max"}}, r"normalize: max\}\}; use"),
        ("rotary_mixed", r"has rotary_mixed; use"),
    ):
        model = PretrainModel(build_encoder(name, positions=positions, **given), seed=0)
        with pytest.raises(UserError, match=said):
            load_weights(model, path)
    exact = PretrainModel(build_encoder(name, positions="rotary", **given), seed=0)
    assert "rotary periods, bfloat16 in the file, exact here" in load_weights(exact, path)


def test_what_no_tensor_says_must_be_told(tmp_path: Path) -> None:
    path = tmp_path / "rope.pth"
    torch.save(vit_of(AXIAL).state_dict(), path)
    refuses(r"holds no positions.*RoPE-ViT.*coordinates: cells", lambda: open_model(str(path)))
    for wrong in ("[1]", "{}", "{rotary: 3}", "{1: {}}"):
        with pytest.raises(UserError, match=r"after positions= comes a scheme's name"):
            open_model(f"{path},positions={wrong}")
    for wrong in ("rotray", "{learned_rotary: {rotation: rotray}}"):
        with pytest.raises(UserError, match=r"'rotray'.*rotary"):
            open_model(f"{path},positions={wrong}")
    torch.save(vit_of(MIXED).state_dict(), path)
    with pytest.raises(UserError, match=r"has positions rotary_mixed; leave ',positions=…' out"):
        open_model(f"{path},positions=rotary")


def test_a_table_does_not_say_whether_something_turns_too(tmp_path: Path) -> None:
    path = tmp_path / "ape.pth"
    torch.save(vit_of(APE, img_size=64).state_dict(), path)
    given: dict[str, Any] = {"image_size": 64, "depth": 2, "layer_scale": 1.0}
    encoder = build_encoder("vits16", positions=rope_vit(table=True), **given)
    model = PretrainModel(encoder, seed=0)
    refuses(r"does not say whether .*positions=learned", lambda: load_weights(model, path))
    told = load_weights(model, f"{path},positions={as_text(rope_vit(table=True))}")
    assert "34 of 34 tensors" in told
    weight = encoder.get_parameter("blocks.0.attn.qkv.weight")
    first = weight.clone()
    load_weights(model, f"{path},positions=learned")
    assert not torch.equal(first, weight)


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_a_gated_file_that_is_a_web_page_is_named(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"dinov3.{ending}"
    path.write_text("<!DOCTYPE html><html>Access denied</html>")
    refuses(r"^\S+ is a web page, .* accept the licence", lambda: open_model(str(path)))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0")
    refuses(r"^\S+ is a Git LFS pointer; `git lfs pull`", lambda: open_model(str(path)))
