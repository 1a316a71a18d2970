"""What encoders and position schemes say of options, images, places and files that cannot be."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from pospre.evaluation.models import open_model
from pospre.exporting.export import export
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.masking import num_visible
from pospre.nn.places import Places
from pospre.nn.positions import SCHEMES, build_positions
from pospre.nn.positions.sincos import sincos_positions, sincos_positions_1d
from pospre.nn.swin.encoder import SWIN_NEEDS
from pospre.nn.weights.timm_models import wrap_encoder
from pospre.training.start_weights import load_weights
from tests.nn.positions.test_relative import KINDS, drawn
from tests.nn.positions.test_rotary import rotary
from tests.nn.positions.test_schemes import DIMS
from tests.nn.test_projections import give_lora
from tests.nn.test_projections import model_of as projections
from tests.nn.test_swin import SIDE, swin
from tests.nn.weights.test_eva import NARROW
from tests.nn.weights.test_foreign_positions import model_of, plain
from tests.refusals import refuses

UNTYPED: Any = build_encoder


def boxes(*corners: float) -> Places:
    return Places((4, 4)).within(torch.tensor([corners]))


def encoded(images: Tensor, places: Places | None = None, **options: Any) -> Tensor:
    encoder = build_encoder("vit_tiny16", depth=1, **{"image_size": 64, **options})
    return encoder(images, places=places)


def checked(corners: tuple[float, ...], **options: Any) -> None:
    scheme = rotary(**options)
    scheme.check(Places((4, 4)))  # a whole grid is as well as before
    scheme.check(boxes(*corners))


def shown(kind: str, height: int, width: int, places: Places | None = None) -> Tensor:
    return drawn(kind)(torch.randn(1, 3, height, width), None, places)


def outside(scheme: str, cell: int) -> Tensor:
    """Most schemes would compute something from such a cell."""
    moved = torch.arange(16).scatter(0, torch.tensor([3]), cell)[None]
    return encoded(torch.randn(1, 3, 64, 64), Places((4, 4)).move(moved), positions=scheme)


def with_lora(name: str, layer: str) -> object:
    vit: Any = timm.create_model(name, depth=1, img_size=32, num_classes=0)
    give_lora(vit.blocks[0], *layer.split(".")[1:])
    return wrap_encoder(vit)


@cache
def of_windows() -> Any:
    """It takes a second to make."""
    return swin(window=4)


def swin_with_lora() -> object:
    encoder: Any = swin(window=4)
    give_lora(encoder.layers[3].blocks[0].attn, "proj")
    return encoder.timm_state()


def head_with_lora() -> object:
    head: Any = projections("plain", ("supervised",)).objectives["supervised"]
    give_lora(head, "linear")
    return head.timm_state()


LEAVE_OUT = "positions.rotary has {} .*Leave it out"
SHIFTED = {"rescale": 2.0, "normalize": "min"}
TAKES = r"takes normalised floats \(B, 3, H, W\), .* of 16 and W"
CELLS = "cells .*{}.* grid of 4×4 has those from 0 to 15"
FINITE = r"not finite\. Give x0, y0, x1 and y1 as shares"
TIMM = ("vit_tiny_patch16_224", "vit_small_patch16_dinov3_qkvb")
LAYERS = ("attn.qkv", "mlp.fc1", "mlp.fc2")
WINDOW = "image_size = {} with encoder.window = {} "

ROWS: list[tuple[str, Callable[[], object]]] = [
    # options
    ("encoder.name is 'vitz16'. Did you mean 'vit", lambda: UNTYPED("vitz16")),
    ("has 4194304 patches of 16 x 16 pixels; use at most",
     lambda: build_encoder("vits16", image_size=1 << 15)),
    ("225 is not divisible by the patch size 16. Use 224",
     lambda: build_encoder("vits16", image_size=225)),
    ("patch_size is 0: .*greater than 0", lambda: build_encoder("vits16", patch_size=0)),
    ("depth is -1: .*greater than or equal to 1", lambda: build_encoder("vits16", depth=-1)),
    ("image_size is -16: .*greater than 0", lambda: build_encoder("vits16", image_size=-16)),
    ("gated_registers = 3, but encoder.num_registers = 2; give at most",
     lambda: build_encoder("vits16", num_registers=2, gated_registers=3)),
    ("gated_registers = 2 cannot be exported for timm, which has no such",
     lambda: build_encoder("vits16", depth=1, num_registers=2, gated_registers=2).timm_state()),
    (r"encoder\.init: xavier or trunc_normal, not dinov2",
     lambda: UNTYPED("swin_tiny", image_size=128, **{**SWIN_NEEDS, "init": "dinov2"})),
    *((WINDOW.format(size, window), partial(swin, image_size=size, window=window))
      for size, window in ((250, 8), (192, 16), (256, 12), (16, 8))),
    ("leaves none of the 4 tokens .* at most 0.75", lambda: num_visible(4, 0.9)),
    ("30", lambda: sincos_positions(30, 2, 2)),
    ("even width, not 33", lambda: sincos_positions_1d(33, 4)),
    # images, and places in them
    (TAKES, lambda: encoded(torch.randn(2, 3, 49, 64), image_size=(48, 64))),
    (TAKES, lambda: encoded(torch.randn(2, 1, 48, 64), image_size=(48, 64))),
    (TAKES, lambda: encoded(torch.randn(3, 48, 64), image_size=(48, 64))),
    (TAKES, lambda: encoded(torch.zeros(2, 3, 48, 64).byte(), image_size=(48, 64))),
    *((CELLS.format(cell), partial(outside, scheme, cell))
      for scheme in SCHEMES for cell in (-1, 16)),
    *((FINITE, lambda number=number: encoded(
        torch.randn(1, 3, 64, 64), boxes(0, 0, number, 1), positions="rotary"))
      for number in (float("nan"), float("inf"))),
    *((f"positions = {kind} supports only images of 4×4 .* got 4×2", partial(shown, kind, 32, 16))
      for kind in KINDS),
    *((f"positions = {kind} supports only whole cells of its grid",
       partial(shown, kind, 32, 32, boxes(0.0, 0.0, 0.5, 1.0))) for kind in KINDS),
    (LEAVE_OUT.format("normalize = max, but"),
     lambda: checked((0.0, 0.0, 0.5, 0.5), normalize="max")),
    (LEAVE_OUT.format("normalize = min and shift, jitter or rescale, but"),
     lambda: checked((0.0, 0.0, 0.5, 0.5), **SHIFTED)),
    (r"15 of 64 are visible.*mask_ratio 0\.75",
     lambda: of_windows()(torch.zeros(1, 3, SIDE, SIDE), torch.arange(15)[None])),
    (r"blocks of a ViT, but .* swin_.*model.encoder\(images\)",
     lambda: PretrainModel(of_windows(), seed=0).features(
         torch.randn(1, 3, SIDE, SIDE), layers=[1])),
    # parts of others
    ("has rotary positions of a kind that our encoder lacks",
     lambda: wrap_encoder(timm.create_model("vit_pe_core_tiny_patch16_384", **NARROW))),
    ("normalises within attention",
     lambda: wrap_encoder(timm.create_model("eva02_base_patch16_clip_224", **NARROW))),
    *((rf"its blocks\.0\.{layer} is a Lora, which is not timm's", partial(with_lora, name, layer))
      for name in TIMM for layer in LAYERS),
    ("encoder.layers.3.blocks.0.attn.proj is now .*Lora", swin_with_lora),
    ("supervised.head.linear is now .*Lora", head_with_lora),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_what_cannot_be_is_said(words: str, call: Callable[[], object]) -> None:
    refuses(words, call)


SCHEME_ROWS: list[tuple[str, Any]] = [
    (r"base = 50\.0 and .*one of", {"rotary": {"base": 50.0, "period_range": [1, 9]}}),
    (r"encoder\.positions\.rotary\.base.*greater than 0", {"rotary": {"base": 0.0}}),
    (r"positions\.rotary\.base.*finite", {"rotary": {"base": float("inf")}}),
    (r"rotary\.normalize.*'separate', 'max' or", {"rotary": {"normalize": "mean"}}),
    (r"rotary\.jitter.*greater than or equal to 1", {"rotary": {"jitter": 0.5}}),
    (r"rotary\.rescale.*greater than or equal to 1", {"rotary": {"rescale": 0.9}}),
    (r"rotary\.period_range.*greater than 0", {"rotary": {"period_range": [0, 9]}}),
    (r"rotary\.normalize = max is for coordinates = centred, not cells\. Leave it out",
     {"rotary": {"coordinates": "cells", "normalize": "max"}}),
    (r"rotary\.directions = 6, but a head of 8 channels has 2 periods: at most 2",
     {"rotary": {"directions": 6}}),
    (r"rotary\.directions.*multiple of 2", {"rotary": {"directions": 3}}),
    (r"columns_first has no meaning with directions = golden",
     {"rotary": {"directions": "golden", "columns_first": True}}),
    (r"positions = rotary .* 18 wide \(36 / 2\).*multiple of 4", "rotary"),
    (r"'encoder\.positions\.sincos\.base'\. Known: resampling", {"sincos": {"base": 3}}),
    (r"positions\.rotary_mixed\.theta.*base", {"rotary_mixed": {"theta": 10.0}}),
    (r"torus\.slopes.*'fixed', 'constant' or", {"torus": {"slopes": "steep"}}),
    (r"'halfs'\. Did you mean 'halves'\?", {"lookhere": {"fields": "halfs-none"}}),
    (r"names 3 .*8 heads\. Give at most 2", {"lookhere": {"fields": "halves-corners-none"}}),
    (r"positions\.lookhere\.slope.*greater than 0", {"lookhere": {"slope": 0.0}}),
    ("layer_slopes.*greater than 0", {"lookhere": {"layer_slopes": [1, 0]}}),
    (r"alibi rotates nothing\. Use rotary", {"learned_rotary": {"rotation": "alibi"}}),
    ("give a scheme's name", {"rotary": {}, "alibi": {}}),
    (r"encoder\.positions is 'rotatory'\. Did you mean 'rotary'", "rotatory"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "positions"), SCHEME_ROWS)
def test_bad_options_of_schemes_name_the_key_and_the_remedy(words: str, positions: Any) -> None:
    dims = DIMS._replace(dim=36, num_heads=2) if positions == "rotary" else DIMS
    refuses(f"(?s){words}", lambda: build_positions(positions, dims))


SAID = r"holds no positions: .*RoPE-ViT's.*file.pth,positions=none"
LOST: dict[str, Tensor | None] = {"pos_embed": None}
NETWORK = {**LOST, "shared_rel_pos.mlp.fc1.weight": torch.ones(512, 2)}


@pytest.mark.parametrize(
    ("words", "changes", "use"),
    [
        *((SAID, LOST, lambda path, name=name: load_weights(model_of(positions=name), path))
          for name in ("none", "learned", "sincos")),
        (SAID, LOST, open_model),
        (SAID, LOST, lambda path: export(path, Path(f"{path}.out.pth"), format="timm")),
        (r"holds positions \('pos_embed'\); leave ',positions=", {},
         lambda path: open_model(f"{path},positions=none")),
        ("'shared_rel_pos.mlp.fc1.weight' is not in the encoder", NETWORK, open_model),
    ],
)  # fmt: skip
def test_files_that_do_not_say_how_places_are_known(
    words: str, changes: dict[str, Any], use: Callable[[str], object], tmp_path: Path
) -> None:
    state = {**plain(), **changes}
    torch.save({k: v for k, v in state.items() if v is not None}, tmp_path / "file.pth")
    refuses(words, lambda: use(f"{tmp_path}/file.pth"), tmp_path)


def test_rounded_boxes_are_refused() -> None:
    box = torch.tensor([[0.123456, 0.2, 0.71234, 0.9]])
    Places((4, 4)).within(box).check()
    said = "rounded to torch.bfloat16.*; give them as float32"
    refuses(said, lambda: Places((4, 4)).within(box.bfloat16()).check())
