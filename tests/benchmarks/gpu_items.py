"""What is measured on GPUs: the list of ``gpu_minutes.py`` in order of worth, and the whole grid.

An item is done by one process. Seconds and GiB are expected on an H100 with 16 slow cores; they
decide what is started together, and what still fits into the time. On a CPU everything is tiny.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
METHODS = (
    *("mae", "simmim", "ijepa", "dinov2", "supervised"),
    *("droppos", "mp3", "stop", "lut", "intertwined"),
)
SIZES = ("vits16", "vitb16", "vitl16")
CROPS = ("dinov2", "intertwined")  # ten views an image
_BATCH, _LARGE = 256, {"vitl16": 128}
# auto: the method's own, in fp32 or (DINOv2) in bf16
_DDP, _OWN, _HALF = "trainer.fsdp=null", "trainer.residual=auto", "trainer.residual=bf16"
_WHOLE = [_DDP, "trainer.compile=true"]
SETTINGS = {
    "eager": [_DDP, "trainer.compile=false", _OWN],
    "compiled": [*_WHOLE, _OWN],
    "compiled, bf16 residual": [*_WHOLE, _HALF],
    "compiled, bf16 residual, cuDNN": [*_WHOLE, _HALF, "trainer.attention=cudnn"],
    "compiled, bf16 residual, float8": [*_WHOLE, _HALF, "trainer.float8=true"],
    "blocks": [_DDP, "trainer.compile=blocks", _OWN],
    "FSDP2": ["trainer.fsdp={}", "trainer.compile=false", _OWN],
    "FSDP2, compiled": ["trainer.fsdp={}", "trainer.compile=blocks", _OWN],
}
_GIB = {"mae": 14, "droppos": 8, "ijepa": 14, "supervised": 18, "mp3": 19, "dinov2": 26}
_MOST_GIB = 34.0  # of any other method, and of any at ViT-L
_STEPS = {"warm_up": 3, "settle": 3, "steps": 40}
_TINY_STEPS = {"warm_up": 1, "settle": 1, "steps": 2}
_TINY = {
    "": [
        "encoder.name=vit_tiny16",
        "encoder.depth=1",
        "encoder.image_size=32",
        "data.num_workers=1",
        "optimizer.lr_rule=none",  # no peak below the schedule's end
    ],
    "mae": ["algorithms.mae.decoder_depth=1", "algorithms.mae.decoder_dim=64"],
    "lut": ["algorithms.mae.decoder_depth=1", "algorithms.mae.decoder_dim=64"],
    "dinov2": ["algorithms.dinov2.num_prototypes=64", "data.views.global.size=32",
     "data.views.local.size=16"],
    "intertwined": ["algorithms.dinov2.num_prototypes=64"],
    "simmim": ["encoder.image_size=64"],
    "ijepa": ["encoder.image_size=64"],
    "stop": ["encoder.image_size=64"],
}  # fmt: skip


@dataclass(frozen=True)
class Item:
    """What one process does."""

    name: str
    kind: str  # see ``gpu_item.KINDS``
    asked: dict[str, Any] = field(default_factory=dict)
    prepares: float = 30.0  # seconds until it waits for the card, beside others
    timed: float = 0.0  # seconds that it then has the card alone; 0: it never waits
    gib: float = 3.0  # of the card, at most
    tiny: bool = False
    ranks: int = 1


def batch_of(method: str, size: str) -> int:
    """Return the images on a GPU."""
    return _LARGE.get(size, _BATCH) // (4 if method in CROPS else 1)


def minutes(*, tiny: bool, cores: int) -> list[Item]:
    """Return what is worth a few minutes of a card, the most worth first."""

    def speed(method: str, setting: str, size: str = "vitb16", **more: Any) -> Item:
        return training(method, size, setting, tiny=tiny, **more)

    def right(method: str) -> Iterator[Item]:
        yield _trial(f"right {method}", "right", _small(method, tiny), 110.0, tiny)
        yield _trial(f"resumed {method}", "resumed", _small(method, tiny), 50.0, tiny)

    best = "compiled, bf16 residual, cuDNN"
    mae_right, mae_resumed = right("mae")
    scenes = [f"data.num_workers={1 if tiny else cores}"]
    return [
        Item("ceilings", "ceilings", prepares=15.0, timed=8.0, gib=6.0, tiny=tiny),
        speed("mae", "compiled", plain=True),
        speed("mae", "eager", plain=True),
        speed("mae", "compiled, bf16 residual"),
        speed("droppos", "compiled"),
        mae_right,
        mae_resumed,
        speed("dinov2", "compiled"),
        speed("mp3", "compiled"),
        speed("mae", best),
        *right("droppos"),
        *right("dinov2"),
        speed("supervised", "compiled"),
        speed("ijepa", "compiled"),
        speed("mae", "compiled", "vitl16"),
        speed("dinov2", "compiled", "vitl16"),
        speed("mae", "compiled, bf16 residual, float8", "vitl16"),
        speed("mae", "FSDP2, compiled"),
        speed("mae", "compiled", loader="scenes", overrides=scenes),
        *others(tiny=tiny),
    ]


def others(*, tiny: bool) -> Iterator[Item]:
    """Yield what no training shows."""
    yield Item("copies beside computing", "overlap", prepares=15.0, timed=5.0, tiny=tiny)
    # the whole card
    yield _trial("microbatch_size auto", "auto", _small("mae", tiny, "vitb16"), 60.0, tiny, 79.0)


def grid(*, tiny: bool, ranks: int, data: str | None) -> list[Item]:
    """Return every method at every size with every setting, the first of every method first."""
    loaders = ["synthetic", *([data] if data else [])]
    trained = [
        training(method, size, setting, tiny=tiny, loader=loader, ranks=ranks)
        for setting in SETTINGS
        for size in SIZES
        for method in METHODS
        for loader in loaders
    ]
    return [*trained, *others(tiny=tiny)]


def training(
    method: str,
    size: str,
    setting: str,
    *,
    tiny: bool,
    loader: str = "synthetic",
    ranks: int = 1,
    **more: Any,
) -> Item:
    """Return an item that trains a recipe of ``yamls/pretrain`` and measures its speed.

    ``loader`` is the path of images, or ``scenes``, or a random batch again and again. With
    ``plain``, a plain loop is measured as well.
    """
    images = 4 if tiny else batch_of(method, size)
    steps = _TINY_STEPS if tiny else _STEPS
    asked = {
        "method": method,
        "size": size,
        "setting": setting,
        "loader": loader,
        "images": images,
        **steps,
        "plain": more.pop("plain", False),
        "overrides": [
            *_common(method, tiny, size),
            f"trainer.max_duration={sum(steps.values())}ba",
            *([] if loader in ("synthetic", "scenes") else [f"data.path={loader}"]),
            *SETTINGS[setting],
            *more.pop("overrides", []),
        ],
    }
    assert not more
    large = size == "vitl16"
    eager = setting in ("eager", "FSDP2")
    name = f"{method} {size} {setting}" + (f", {loader}" if loader != "synthetic" else "")
    return Item(
        name,
        "train",
        asked,
        prepares=(30.0 if eager else 90.0) * (1.4 if large else 1.0) + 30.0 * (loader == "scenes"),
        timed=12.0 if loader == "synthetic" else 40.0,
        gib=_MOST_GIB if large else _GIB.get(method, _MOST_GIB),
        tiny=tiny,
        ranks=ranks,
    )


def _trial(
    name: str, kind: str, asked: dict[str, Any], seconds: float, tiny: bool, gib: float = 3.0
) -> Item:
    return Item(name, kind, asked, prepares=seconds, gib=gib, tiny=tiny)


def _small(method: str, tiny: bool, size: str = "vit_tiny16") -> dict[str, Any]:
    """Return what trials ask for: a few steps of few images."""
    overrides = [
        *_common(method, tiny, size),
        "optimizer.lr_rule=none",  # no peak below the schedule's start
        "trainer.max_duration=6ba",
    ]
    return {"method": method, "images": 4 if tiny else 8, "overrides": overrides}


def _common(method: str, tiny: bool, size: str) -> list[str]:
    return [
        f"encoder.name={size}",
        "trainer.precision=amp_bf16",
        "trainer.progress_bar=false",
        f"trainer.device={'cpu' if tiny else 'gpu'}",
        "schedule.warmup=1ba",
        "schedule.length=null",
        "evaluation={}",
        *(["algorithms.supervised.num_classes=1000"] if method == "supervised" else []),
        *([*_TINY[""], *_TINY.get(method, [])] if tiny else []),
    ]


def recipe_path(method: str) -> str:
    """Return the recipe of a method, at ViT-B."""
    return str(ROOT / f"yamls/pretrain/{method}_vitb16.yaml")


def step_of(asked: dict[str, Any]) -> str:
    """Return the key of a training's floors, see ``pospre.planning.figures``."""
    return f"{asked['method']} {asked['size']} {asked['images']}"


def matching(items: Sequence[Item], words: Sequence[str]) -> list[Item]:
    """Return the items whose names have any of these words; all if there are none."""
    return [one for one in items if not words or any(word in one.name for word in words)]
