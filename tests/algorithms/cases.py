"""Small models with any algorithms: what the contract and composition tests run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import PretrainAlgorithm, algorithm_class
from pospre.model.compose import compose
from pospre.model.layout import Layout
from pospre.model.model import PretrainModel
from pospre.model.progress import Progress
from pospre.nn.build import build_encoder
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.sizes import SIZES
from pospre.nn.vit import Encoder

HOSTS = ("mae", "simmim", "ijepa", "dinov2", "lejepa", "supervised")
ALONE = ("droppos", "loca", "mp3", "part", "sp")
"""Position algorithms that need no host."""

DECODER: dict[str, Any] = {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
NARROW = replace(SIZES["vit_tiny16"], embed_dim=48)
"""The size of the encoders: as fast as one can be that has three heads."""

Options = dict[str, dict[str, Any]]
"""Options of algorithms by their names."""

OPTIONS: Options = {
    "loca": {"num_prototypes": 32, "head_hidden": 32, "head_bottleneck": 16},
    "mae": DECODER,
    "droppos": DECODER,
    "simmim": {"mask_cell": 16},
    "ijepa": {"predictor_dim": 32, "predictor_depth": 1, "predictor_heads": 2},
    "dinov2": {"num_prototypes": 32, "head_hidden": 32, "head_bottleneck": 16},
    "supervised": {"num_classes": 3},
    "lejepa": {"hidden_dim": 32, "projection_dim": 16, "num_slices": 32},
    "lut": {"hidden_dim": 32},
    "crop_field": {"field_size": 9},
    "diet": {"num_images": 120, "mixup": 0.0, "cutmix": 0.0},
}

HOST_OF = {
    "stop": ("ijepa",),
    "lut": ("mae",),
    "crop_field": ("mae",),
    "masked_position": ("dinov2",),
    "ema_teacher": ("mae",),
}
"""The host beside which an algorithm is tested that cannot stand alone."""

GROUPS = {
    "view": ViewGroup(size=32),
    "second": ViewGroup(name="second", size=32),
    "global": ViewGroup(name="global", count=2, size=32),
    "local": ViewGroup(name="local", count=2, size=16),
    "query": ViewGroup(name="query", size=32),
    "focal": ViewGroup(name="focal", count=2, size=16),
    "pair": ViewGroup(name="pair", count=2, size=16, scale=(0.05, 0.32)),
    "part": ViewGroup(name="part", size=32),
}


@dataclass(frozen=True)
class Case:
    """Algorithms that train together.

    Attributes:
        names: of the algorithms.
        options: of an algorithm by its name, beyond ``OPTIONS``.
        encoder: options of the encoder beyond those that the algorithms need.
    """

    names: tuple[str, ...]
    options: Options = field(default_factory=dict)
    encoder: dict[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The names, joined."""
        return "+".join(self.names)

    @cached_property
    def views(self) -> dict[str, ViewGroup]:
        """Return the view groups that these algorithms read, of small views; ``view`` for none."""
        with torch.device("meta"):
            return views_of(self.algorithms(), self.encoder_of())

    @property
    def needed(self) -> dict[str, Any]:
        """The encoder's option without which these algorithms are refused, or idle."""
        if "crop_field" in self.names:
            return {"positions": "learned"}
        return {"positions": "none"} if self.names in (("mp3",), ("part",)) else {}

    def of_one_block(self) -> "Case":
        """Return the case with an encoder of one block, for half the time to compile it."""
        return replace(self, encoder={**self.encoder, "depth": 1})

    def algorithms(self) -> list[PretrainAlgorithm]:
        """Return new algorithms."""
        return [made(name, **self.options.get(name, {})) for name in self.names]

    def build(self, *, seed: int = 7) -> PretrainModel:
        """Return a small model; its encoder has the same weights for any seed."""
        torch.manual_seed(0)
        encoder, algorithms = self.encoder_of(), self.algorithms()
        reference = self.encoder_of() if needs_reference(algorithms, encoder) else None
        return PretrainModel(encoder, algorithms, seed=seed, views=self.views, reference=reference)

    def layout(self) -> Layout:
        """Return what the algorithms run together, without weights."""
        with torch.device("meta"):
            encoder, algorithms = self.encoder_of(), self.algorithms()
            reference = self.encoder_of() if needs_reference(algorithms, encoder) else None
            return compose(algorithms, encoder, self.views, reference)

    def encoder_of(self) -> Encoder:
        """Return the encoder."""
        needs = {"image_size": 32, "patch_size": 4, "depth": 2, **self.needed}
        return Encoder(NARROW, EncoderOptions("vit_tiny16", **{**needs, **self.encoder}))

    def batch(self, size: int = 4) -> dict[str, Tensor]:
        """Return ``size`` random samples with all views; row i is the same in every batch."""
        rows = [_sample(index, self.views) for index in range(size)]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def _sample(index: int, views: dict[str, ViewGroup]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + index)
    sample = {
        "index": torch.tensor([index + 10]),
        "epoch": torch.tensor([1]),
        "label": torch.tensor([index % 3]),
    }
    for name, group in views.items():
        shape = (1, group.count, 3, *group.shape)
        sample[f"{name}/image"] = torch.randint(
            0, 256, shape, dtype=torch.uint8, generator=generator
        )
        sample[f"{name}/flip"] = torch.rand(1, group.count, generator=generator) < 0.5
        corner = torch.rand(1, group.count, 2, generator=generator) * 0.5
        side = 0.3 + torch.rand(1, group.count, 2, generator=generator) * 0.2
        sample[f"{name}/box"] = torch.cat([corner, corner + side], dim=-1)
    return sample


def views_of(
    algorithms: Sequence[PretrainAlgorithm], encoder: PatchEncoder
) -> dict[str, ViewGroup]:
    """Return the view groups that algorithms read; ``view`` for none."""
    try:
        uses = [each.uses(encoder) for each in algorithms]
    except UserError:  # a refusal, which building them says again
        return GROUPS
    passes = [one for each in uses for one in each.passes.values()]
    read = {one.group for one in passes if not (one.or_all or one.reference)}
    read = read.union(*(each.views for each in uses)) or {"view"}
    return {name: group for name, group in GROUPS.items() if name in read}


def needs_reference(algorithms: Sequence[PretrainAlgorithm], encoder: Encoder) -> bool:
    """Return whether one of the algorithms reads a reference."""
    passes = [one for each in algorithms for one in each.uses(encoder).passes.values()]
    return any(one.reference for one in passes)


def tiny_model(
    *algorithms: PretrainAlgorithm,
    views: dict[str, ViewGroup] | None = None,
    seed: int = 7,
    reference: nn.Module | None = None,
    **encoder: Any,
) -> PretrainModel:
    """Return a model of one block on 4×4 patches of 8 pixels."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"image_size": 32, "patch_size": 8, "depth": 1, **encoder}
    made = build_encoder("vit_tiny16", **options)
    return PretrainModel(made, algorithms, seed=seed, views=views, reference=reference)


_class_of = cache(algorithm_class)  # which looks at the folder


def made(name: str, **options: Any) -> PretrainAlgorithm:
    """Return an algorithm of a small size."""
    return _class_of(name)(**{**OPTIONS.get(name, {}), **options})


def random_views(
    group: str = "view", *, size: int = 4, views: int = 1, side: int = 32, seed: int = 1
) -> dict[str, Tensor]:
    """Return ``size`` samples with random images of a group of views, none mirrored."""
    generator, shape = torch.Generator().manual_seed(seed), (size, views, 3, side, side)
    return {
        f"{group}/image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        f"{group}/flip": torch.zeros(size, views, dtype=torch.bool),
        "index": torch.arange(size),
        "epoch": torch.zeros(size, dtype=torch.int64),
    }


def written(model: PretrainModel, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with what the algorithms write into it, half way through training."""
    return model.prepare(dict(batch), Progress(0.5, 0.5))


def train(
    model: PretrainModel, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor], steps: range
) -> list[float]:
    """Train on one batch as the trainer does and return the loss of every step."""
    losses = []
    for step in steps:
        progress = Progress(step / 10, 0.0)
        inputs = model.prepare(dict(batch), progress)
        optimizer.zero_grad()
        loss = model.loss(model(inputs), inputs)["total"]
        loss.backward()
        optimizer.step()
        model.after_step(progress)
        losses.append(loss.item())
    return losses


def train_and_resume(
    build: Callable[[], PretrainModel], batch: dict[str, Tensor], saved_after: int, steps: int
) -> tuple[PretrainModel, list[float]]:
    """Train on one batch, and again from what was saved on the way; return model and losses.

    Raises:
        AssertionError: the resumed run has other losses or weights.
    """
    model = build()
    optimizer = make_optimizer(model)
    losses = train(model, optimizer, batch, range(saved_after))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses += train(model, optimizer, batch, range(saved_after, steps))
    resumed = build()
    optimizer = make_optimizer(resumed)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = train(resumed, optimizer, batch, range(saved_after, steps))
    assert again == losses[saved_after:], f"a resumed run differs: {again}, {losses}"
    found = resumed.state_dict()
    differ = [key for key, value in model.state_dict().items() if not found[key].equal(value)]
    assert not differ, f"a resumed run has other weights: {differ}"
    return model, losses


def make_optimizer(model: PretrainModel) -> torch.optim.Optimizer:
    """Return AdamW over what is trained; at 1e-3, dinov2's first steps overshoot."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-4)
