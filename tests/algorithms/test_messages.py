"""What methods say of options, views and encoders with which they cannot work.

``test_options`` has values outside of their ranges; what methods say of each other is also in
``tests/model/test_compose.py``.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pospre.algorithms.distill.targets import hadamard
from pospre.algorithms.ijepa.blocks import check_blocks
from pospre.data.views.options import ViewGroup
from pospre.model.algorithm import PretrainAlgorithm
from pospre.training.build import build_model
from tests.algorithms.cases import GROUPS, made, tiny_model
from tests.algorithms.ijepa.test_blocks import PUBLISHED
from tests.algorithms.test_droppos_swin import swin_recipe
from tests.algorithms.test_mae_uniform import um_mae
from tests.refusals import refuses
from tests.swin_runs import SUPERVISED, small_swin

TWO = {name: GROUPS[name] for name in ("view", "second")}
SMALLER = {**TWO, "second": ViewGroup(name="second", size=16)}
QUERY = {"query": GROUPS["query"]}
LOCALS = {name: GROUPS[name] for name in ("global", "local")}


def build(*methods: PretrainAlgorithm, **options: Any) -> None:
    """Make a model without memory of its own."""
    with torch.device("meta"):
        tiny_model(*methods, **options)


def alone(name: str, **options: Any) -> None:
    build(made(name, **options))


def part(**options: Any) -> None:
    build(made("part", **options), views={"part": GROUPS["part"]}, positions="none")


def globals_of(count: int) -> dict[str, ViewGroup]:
    return {"global": ViewGroup(name="global", count=count, size=32)}


def dinov2(**options: Any) -> None:
    build(made("dinov2", **options), views=globals_of(2))


def masked_position(host: dict[str, Any], **options: Any) -> None:
    methods = made("masked_position", **options), made("dinov2", **host)
    build(*methods, views=globals_of(2))


def sp(
    views: dict[str, Any],
    encoder: dict[str, Any] | None = None,
    *others: PretrainAlgorithm,
    **options: Any,
) -> None:
    pair = {"pair": ViewGroup(**{"name": "pair", "count": 2, "size": 16, **views})}
    build(made("sp", **options), *others, views=pair, **encoder or {})


def loca(
    views: dict[str, Any],
    encoder: dict[str, Any] | None = None,
    *others: PretrainAlgorithm,
    **options: Any,
) -> None:
    groups = {"view": GROUPS["view"], **views}
    build(made("loca", **options), *others, views=groups, **encoder or {})


def ijepa(**options: Any) -> None:
    build(made("ijepa", **options), image_size=64, class_token=False)


def stop(*others: PretrainAlgorithm, **options: Any) -> None:
    build(made("stop", **options), made("ijepa"), *others, image_size=64, class_token=False)


def dropped_context(**variant: str) -> None:
    stop(made("droppos", temperature=None), **variant)


def lut(*others: PretrainAlgorithm, views: Any = TWO, encoder: Any = (), **options: Any) -> None:
    build(*(others or (made("mae"),)), made("lut", **options), views=views, **dict(encoder))


def field(**options: Any) -> None:
    build(made("mae"), made("crop_field", field_size=None, **options))


def blocks(official: bool = False, **changes: Any) -> None:
    check_blocks(replace(PUBLISHED, **changes), "ijepa", official=official)


def swin(recipe: Any, **algorithms: Any) -> None:
    chosen = recipe.model_copy(update={"algorithms": {**recipe.algorithms, **algorithms}})
    with torch.device("meta"):
        build_model(chosen)


def supervised_swin(**options: Any) -> None:
    swin(small_swin("unused", "supervised", {**SUPERVISED, **options}))


NO_LOSS = {"dino_weight": 0.0, "koleo_weight": 0.0}
HIDDEN = {"position_token": "zeros", "temperature": None}
OFFSETS = {"positions": "shared_relative"}
ROTARY = {"rotary": {"rescale": 2.0}}
ONE_OF_FOUR = r"one patch of every 2×2.*must be 0\.75, not 0\.5"
CONST = r"scale_range = \(0.2, 1.0\) has no effect with crop_field.box_scale = const"
PARTLY: Any = {"mask_ratio": 0.5, "mixup": 0.8}

ROWS: list[tuple[str, Callable[[], object]]] = [
    # pixels
    ("hides no patch to predict", lambda: alone("mae", mask_ratio=0.0)),
    ("leaves none of the 16 tokens visible", lambda: alone("mae", mask_ratio=0.99)),
    ("mae.mask_block = 3 does not divide the grid of 4×4 patches. Use one of 1, 2, 4",
     lambda: alone("mae", mask_block=3)),
    ("leaves none of the 4 blocks visible",
     lambda: alone("mae", mask_block=2, mask_ratio=0.9)),
    ("mae.mask_block = 2 has no effect with mae.sampling = uniform",
     lambda: alone("mae", mask_block=2, sampling="uniform")),
    ("mae.decoder_heads = 5 does not divide", lambda: alone("mae", decoder_heads=5)),
    ("leaves none of the 4 cells visible", lambda: alone("simmim", mask_ratio=0.95)),
    ("simmim.mask_cell is 12, but must be a multiple of the patch size 8",
     lambda: alone("simmim", mask_cell=12)),
    ("simmim.mask_cell = 24 does not divide encoder.image_size = 32",
     lambda: alone("simmim", mask_cell=24)),
    # positions
    ("leaves none of the 16 tokens", lambda: alone("droppos", mask_ratio=0.99)),
    ("droppos.decoder_heads = 5 does not divide", lambda: alone("droppos", decoder_heads=5)),
    *((f"{key} = {value} has no effect with the host mae",
       lambda key=key, value=value: build(made("droppos", **{key: value}), made("mae")))
      for key, value in (("mask_ratio", 0.5), ("sampling", "uniform"))),
    ("gives none of 16 patches .* Use at least 0.0625, or 0",
     lambda: build(made("mp3", position_rate=0.01), positions="none")),
    ("gives all 16 patches their position: none is left",
     lambda: build(made("mp3", position_rate=0.99), positions="none")),
    ("mp3.temperature needs a class token",
     lambda: build(made("mp3", temperature=0.1), positions="none", class_token=False)),
    ("mae.*Use mp3 alone", lambda: build(made("mp3", mask_ratio=0.0), made("mae"))),
    ("part.num_pairs = 64, but 4 patches .part.share = 0.25 of 4 × 4. make 12 pairs. Use at most",
     lambda: part(share=0.25)),
    (r"part.sizes = \[1.0, 5.0\], but a view of 32 × 32 pixels holds no patch of more than 4",
     lambda: part(sizes=(1.0, 5.0))),
    (r"part.sizes = \[4.0, 4.0\], but .* and one of as many in a single place. Use smaller",
     lambda: part(sizes=(4.0, 4.0))),
    (r"part.log_ratios = True has no effect with part.sizes = \(1.0, 1.0\)",
     lambda: part(sizes=(1.0, 1.0), log_ratios=True)),
    # features of hidden blocks
    ("ijepa.target_tokens is 30, but must be from 1 to 29", lambda: blocks(target_tokens=30)),
    (r"ijepa.target_scale = \[0.15, 0.2\] leaves target blocks without",
     lambda: blocks(grid=(2, 2))),
    ("ijepa.context_tokens = 120 is more than the target blocks",
     lambda: blocks(context_tokens=120)),
    ("ijepa.context_tokens is 190", lambda: blocks(context_tokens=190)),
    ("ijepa.official = true keeps more than 10 tokens",
     lambda: blocks(official=True, grid=(8, 8))),
    ("ijepa.predictor_heads = 5 does not divide", lambda: ijepa(predictor_heads=5)),
    ("ijepa.context_tokens is 60", lambda: ijepa(context_tokens=60)),
    ("context_tokens = 9 has no effect with ijepa.official",
     lambda: ijepa(official=True, context_tokens=9)),
    (r"context_warmup = \(0.2, 0.3\) has no effect with ijepa.context_weight = 0.0",
     lambda: ijepa(context_warmup=(0.2, 0.3))),
    ("official = true keeps more than 10 tokens", lambda: ijepa(official=True)),
    ("ijepa works on one view",
     lambda: build(made("ijepa"), views={"view": ViewGroup(count=2, size=32)})),
    ("stop.official = True has no effect with stop.variant",
     lambda: stop(official=True, variant="both")),
    ("stop.l1_weight = 0.0001 has no effect with stop.variant", lambda: stop(l1_weight=1e-4)),
    ("stop.variant = both puts noise.*droppos changes too",
     lambda: dropped_context(variant="both")),
    ("learned_pos has one position.*crop_field",
     lambda: stop(made("crop_field", field_size=None), variant="learned_pos")),
    # crops
    (r"dinov2.mask_ratio = \[0.0, 0.01\] masks none of the",
     lambda: dinov2(mask_ratio=(0.0, 0.01))),
    ("dinov2.mask_crop_rate = 0.3 masks no whole number", lambda: dinov2(mask_crop_rate=0.3)),
    ("dinov2.dino_weight = 0.0, dinov2.ibot_weight = 0.0 .* leave no loss",
     lambda: dinov2(ibot_weight=0.0, **NO_LOSS)),
    ("leave no loss", lambda: dinov2(mask_crop_rate=0.0, **NO_LOSS)),
    ("dinov2.mask_shape = cyclic has no effect with dinov2.mask_crop_rate = 0.0",
     lambda: dinov2(mask_shape="cyclic", mask_crop_rate=0.0)),
    ("dinov2.koleo_crops = first has no effect with dinov2.spread = sigreg",
     lambda: dinov2(spread="sigreg", koleo_crops="first")),
    ("dinov2.koleo_weight = 1.0 has no effect with dinov2.spread = sigreg",
     lambda: dinov2(spread="sigreg", koleo_weight=1.0)),
    ("dinov2.sigreg_weight = 1.0 has no effect with dinov2.spread = koleo",
     lambda: dinov2(sigreg_weight=1.0)),
    ("leave no loss",
     lambda: dinov2(spread="sigreg", sigreg_weight=0.0, dino_weight=0.0, ibot_weight=0.0)),
    ("lejepa compares whole views, but in some of data.views.global patches are replaced",
     lambda: build(made("lejepa"), made("dinov2"), views=globals_of(2))),
    ("lejepa needs the view group 'global'", lambda: alone("lejepa")),
    ("lejepa pulls the views .* data.views.global.count is 1 .* Set it to 2",
     lambda: build(made("lejepa"), views=globals_of(1))),
    ("lejepa: encoder.positions = shared_relative supports only the grid",
     lambda: build(made("lejepa"), views=LOCALS, **OFFSETS)),
    ("patch_head_bottleneck = 8 has no effect with dinov2.separate_heads",
     lambda: dinov2(patch_head_bottleneck=8)),
    ("needs the view group 'global'", lambda: build(made("dinov2"), views={"view": ViewGroup()})),
    *((rf"data.views.global.count is {count}\. Set it to 2",
       lambda count=count: build(made("dinov2"), views=globals_of(count))) for count in (1, 3)),
    ("dinov2 needs a class token",
     lambda: build(made("dinov2"), views=globals_of(2), class_token=False)),
    ("the views of data.views.local have another",
     lambda: build(made("dinov2"), views=LOCALS, **OFFSETS)),
    ("masks none of the 16 patches", lambda: masked_position({}, mask_ratio=(0.0, 0.01))),
    ("mask_crop_rate = 1.0 leaves none", lambda: masked_position({"mask_crop_rate": 1.0})),
    ("needs the view group 'globals?', but data.views has view", lambda: field(enclose="globals")),
    ("field_size = 9 has no effect with encoder.positions = sincos",
     lambda: build(made("mae"), made("crop_field", field_size=9))),
    ("crop_field.interpolation = bilinear", lambda: field(interpolation="bilinear")),
    (CONST, lambda: field(box_scale="const", scale_range=(0.2, 1.0))),
    ("crop_field.box_scale = fill", lambda: field(box_scale="fill", scale_range=(0.2, 1.0))),
    ("rotary has shift, jitter or rescale, but .*Leave it out",
     lambda: build(made("mae"), made("crop_field", field_size=None), positions=ROTARY)),
    # a second view
    ("target_mask_ratio = 0.5 has no effect",
     lambda: lut(target_mask_ratio=0.5, supervision="tokens")),
    ("lut.steer = both has no effect", lambda: lut(pool="class_token", steer="both")),
    ("Add data.views.second with count: 1", lambda: lut(views={"view": TWO["view"]})),
    ("Give data.views.second the size of data.views.view",
     lambda: lut(views=SMALLER, symmetric=True)),
    ("encoder.class_token is false",
     lambda: lut(pool="class_token", encoder={"class_token": False})),
    ("which 'ijepa' does not draw", lambda: lut(made("ijepa"), symmetric=True)),
    *((f"Set {name}.mask_ratio to 0.5 or more",
       lambda name=name: lut(made(name, mask_ratio=0.25), symmetric=True))
      for name in ("mae", "simmim", "droppos")),
    ("supervised mixes images in 'view'", lambda: lut(made("supervised", **PARTLY))),
    ("loca compares views of one image, but supervised mixes images in 'view'",
     lambda: loca(QUERY, {}, made("supervised", mixup=0.8))),
    # pairs of views
    (r"data.views.pair has crop = full\. Use crop: random", lambda: sp({"crop": "full"})),
    (r"data.views.pair has crop = random and scale = \[0.3, 0.3\]",
     lambda: sp({"scale": (0.3, 0.3)})),
    ("sizes of its crops of square images hardly differ",
     lambda: sp({"scale": (0.3, 0.3001), "ratio": (1.0, 1.0)})),
    (r"sp\.pool = class_token needs a class token",
     lambda: sp({}, {"class_token": False}, pool="class_token")),
    ("'view_places', but crop_field gives",
     lambda: sp({}, {}, made("crop_field", field_size=None))),
    ("sp: encoder.positions = shared_relative supports only the grid", lambda: sp({}, OFFSETS)),
    # a reference and its queries
    ("Add data.views.query with count: 1", lambda: loca({})),
    (r"loca.context_ratio = 0.05 shows none of 16 patches.*at least 0\.0625",
     lambda: loca(QUERY, context_ratio=0.05)),
    ("loca.query_mask_ratio = 0.95 leaves none of the 16",
     lambda: loca(QUERY, query_mask_ratio=0.95)),
    ("context_places = False with encoder.positions = none: nothing would tell",
     lambda: loca(QUERY, {"positions": "none"}, context_places=False)),
    ("'view_places', but crop_field gives",
     lambda: loca(QUERY, {}, made("crop_field", field_size=None))),
    ("loca: encoder.positions = shared_relative supports only the grid",
     lambda: loca({**QUERY, "focal": GROUPS["focal"]}, OFFSETS)),
    ("dinov2 encodes every patch of 'global' .* loca every patch .* Use one of them.$",
     lambda: loca({**QUERY, **globals_of(2)}, {}, made("dinov2"))),
    ("loca.momentum_end = 0.999 has no effect with the teacher of ema_teacher",
     lambda: loca(QUERY, {}, made("ema_teacher"), momentum_end=0.999)),
    ("algorithms.loca uses a momentum teacher, but there is none",
     lambda: loca(QUERY, momentum_start=None)),
    # classes, teachers and references
    ("supervised.num_classes is None", lambda: alone("supervised", num_classes=None)),
    ("label_smoothing = 0.1 has no effect",
     lambda: alone("supervised", loss="bce", label_smoothing=0.1)),
    ("ijepa has a teacher of its own, so ema_teacher",
     lambda: build(made("ema_teacher"), made("ijepa"))),
    *((rf"{name}: the teacher's momentum",
       lambda name=name, start=start, end=end: build(
           made(name, momentum_start=start, momentum_end=end),
           *([] if name == "ijepa" else [made("mae")])))
      for name in ("ema_teacher", "ijepa")
      for start, end in ((1.0, 1.0), (-0.1, 1.0), (0.9, 0.8), (0.9, 1.1))),
    (r"patch_weight = 0 and distill\.class_weight = 0 leave",
     lambda: alone("distill", patch_weight=0.0, class_weight=0.0)),
    (r"distill\.class_weight needs a class token",
     lambda: build(made("distill"), class_token=False)),
    (r"num_rolls = 2 has no effect with distill\.target = raw",
     lambda: alone("distill", num_rolls=2)),
    (r"has no effect with distill\.distance = cosine",
     lambda: alone("distill", standardise="isotropic")),
    ("turns features, which no mse can tell",
     lambda: alone("distill", standardise="phi_s", distance="mse")),
    (r"of patches, but distill\.patch_weight = 0",
     lambda: alone("distill", target="debiased", patch_weight=0.0)),
    (r"positions = learned\. Use none or torus",
     lambda: build(made("distill", target="rolled"), positions="learned")),
    (r"width 100, .* Use distill\.standardise: isotropic", lambda: hadamard(100)),
    # Swin
    ("swin_tiny has offsets.*Use zeros", lambda: swin(swin_recipe(position_token="learned"))),
    (r"encoder\.class_token is false", lambda: swin(swin_recipe(temperature=0.1))),
    (ONE_OF_FOUR, lambda: swin(swin_recipe(mask_ratio=0.5))),
    (ONE_OF_FOUR, lambda: swin(um_mae(mask_ratio=0.5))),
    ("mae leaves 32 patches visible, but .* needs a square of them.*uniform",
     lambda: swin(um_mae(mask_ratio=0.5, sampling="random"))),
    ("mae.mask_block = 4 shows whole squares of patches, but .* merges patches",
     lambda: swin(um_mae(sampling="random", mask_block=4))),
    ("'mae' includes masked ones", lambda: swin(um_mae(), droppos=HIDDEN)),
    ("supervised.pooling = cls needs a class token", lambda: supervised_swin(pooling="cls")),
    (r"supervised\.mask_ratio = 0\.75 has no effect with swin_tiny",
     lambda: supervised_swin(mask_ratio=0.75)),
]  # fmt: skip


@pytest.mark.parametrize(("words", "call"), ROWS)
def test_what_cannot_work_is_said(words: str, call: Callable[[], object]) -> None:
    refuses(words, call)


@pytest.mark.parametrize(
    "call",
    [
        dropped_context,
        lambda: blocks(official=True),
        lambda: lut(views=SMALLER),
        lambda: sp({"size": 32}, OFFSETS),
    ],
)
def test_what_is_near_to_that_works(call: Callable[[], object]) -> None:
    call()
