"""Small models with any algorithms attached: what the contract and composition tests run."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pospre.data.views.options import ViewGroup
from pospre.errors import UserError
from pospre.model.algorithm import (
    PretrainAlgorithm,
    Progress,
    algorithm_class,
)
from pospre.model.attached import attach_algorithm, write_draws
from pospre.model.model import PretrainModel
from pospre.nn.build import build_encoder
from pospre.nn.encoder_options import EncoderOptions
from pospre.nn.sizes import SIZES
from pospre.nn.vit import Encoder

HOSTS = ("mae", "simmim", "ijepa", "dinov2", "supervised")
ALONE = ("droppos", "mp3")
"""Position algorithms that need no host."""

DECODER = {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
NARROW = replace(SIZES["vit_tiny16"], embed_dim=48)
"""The size of the encoders: as fast as one can be that has three heads."""

Options = dict[str, dict[str, Any]]
"""Options of algorithms by their names."""

OPTIONS: Options = {
    "mae": DECODER,
    "droppos": DECODER,
    "simmim": {"mask_cell": 16},
    "ijepa": {"predictor_dim": 32, "predictor_depth": 1, "predictor_heads": 2},
    "dinov2": {"num_prototypes": 32, "head_hidden": 32, "head_bottleneck": 16},
    "supervised": {"num_classes": 3},
    "lut": {"hidden_dim": 32},
    "crop_field": {"field_size": 9},
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
}


_READ: dict[str, set[str]] = {}
"""The view groups that algorithms with options read; to find them takes longer than to build."""


@dataclass(frozen=True)
class Case:
    """Algorithms that are attached together.

    Attributes:
        names: of the algorithms, hosts first.
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

    @property
    def views(self) -> dict[str, ViewGroup]:
        """Return the view groups that these algorithms read, of small views; ``view`` for none."""
        key = repr((self.names, self.options))
        if key not in _READ:
            try:
                with torch.device("meta"):
                    model = self._model(GROUPS)
                    for algorithm in self.algorithms():
                        attach_algorithm(model, algorithm)
            except UserError:  # a refusal, which building them says again
                return GROUPS
            _READ[key] = {declared.group for declared in model.registry.passes.values()}
        return {name: GROUPS[name] for name in GROUPS if name in (_READ[key] or {"view"})}

    def of_one_block(self) -> "Case":
        """Return the case with an encoder of one block, for half the time to compile it."""
        return replace(self, encoder={**self.encoder, "depth": 1})

    def algorithms(self) -> list[PretrainAlgorithm]:
        """Return new algorithms in the order of attachment."""
        made = [
            algorithm_class(name)(**{**OPTIONS.get(name, {}), **self.options.get(name, {})})
            for name in self.names
        ]
        return sorted(made, key=lambda algorithm: not algorithm.is_host)

    def build(self, *, seed: int = 7) -> tuple[PretrainModel, list[PretrainAlgorithm]]:
        """Return a small model with the algorithms attached; the same weights for any seed."""
        algorithms, views = self.algorithms(), self.views
        torch.manual_seed(0)
        return self._model(views, algorithms, seed=seed), algorithms

    def _model(
        self,
        views: dict[str, ViewGroup],
        algorithms: Sequence[PretrainAlgorithm] = (),
        *,
        seed: int = 7,
    ) -> PretrainModel:
        needs = {"image_size": 32, "patch_size": 4, "depth": 2, **needed_positions(self.names)}
        encoder = Encoder(NARROW, EncoderOptions("vit_tiny16", **{**needs, **self.encoder}))
        return PretrainModel(encoder, algorithms, seed=seed, views=views)

    def batch(self, size: int = 4) -> dict[str, Tensor]:
        """Return ``size`` random samples with all views; row i is the same in every batch."""
        rows = [self._sample(index) for index in range(size)]
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    def _sample(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(100 + index)
        sample = {
            "index": torch.tensor([index + 10]),
            "epoch": torch.tensor([1]),
            "label": torch.tensor([index % 3]),
        }
        for name, group in self.views.items():
            shape = (1, group.count, 3, *group.shape)
            sample[f"{name}/image"] = torch.randint(
                0, 256, shape, dtype=torch.uint8, generator=generator
            )
            sample[f"{name}/flip"] = torch.rand(1, group.count, generator=generator) < 0.5
            corner = torch.rand(1, group.count, 2, generator=generator) * 0.5
            side = 0.3 + torch.rand(1, group.count, 2, generator=generator) * 0.2
            sample[f"{name}/box"] = torch.cat([corner, corner + side], dim=-1)
        return sample


def bare_model(
    *, views: dict[str, ViewGroup] | None = None, seed: int = 7, **encoder: Any
) -> PretrainModel:
    """Return a model of one block on 4×4 patches of 8 pixels; nothing is attached to it."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"image_size": 32, "patch_size": 8, "depth": 1, **encoder}
    return PretrainModel(build_encoder("vit_tiny16", **options), seed=seed, views=views)


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


def needed_positions(names: tuple[str, ...]) -> dict[str, Any]:
    """Return the encoder's option without which these algorithms are refused, or idle."""
    if "crop_field" in names:
        return {"positions": "learned"}
    return {"positions": "none"} if names == ("mp3",) else {}


def written(
    model: PretrainModel, algorithms: list[PretrainAlgorithm], batch: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return the batch with what the algorithms write into it, half way through training."""
    batch = dict(batch)
    write_draws(model, algorithms, batch, Progress(0.5, 0.5))
    return batch


def train(
    model: PretrainModel,
    algorithms: list[PretrainAlgorithm],
    optimizer: torch.optim.Optimizer,
    batch: dict[str, Tensor],
    steps: range,
) -> list[float]:
    """Train on one batch as the trainer does and return the loss of every step."""
    losses = []
    for step in steps:
        progress = Progress(step / 10, 0.0)
        inputs = dict(batch)
        write_draws(model, algorithms, inputs, progress)
        optimizer.zero_grad()
        loss = model.loss(model(inputs), inputs)["total"]
        loss.backward()
        optimizer.step()
        for algorithm in algorithms:
            algorithm.after_step(model, progress)
        losses.append(loss.item())
    return losses


def train_and_resume(
    build: Callable[[], tuple[PretrainModel, list[PretrainAlgorithm]]],
    batch: dict[str, Tensor],
    saved_after: int,
    steps: int,
) -> tuple[PretrainModel, list[float]]:
    """Train on one batch, and again from what was saved on the way; return model and losses.

    Raises:
        AssertionError: the resumed run has other losses or weights.
    """
    model, algorithms = build()
    optimizer = make_optimizer(model)
    losses = train(model, algorithms, optimizer, batch, range(saved_after))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    losses += train(model, algorithms, optimizer, batch, range(saved_after, steps))
    resumed, algorithms = build()
    optimizer = make_optimizer(resumed)
    resumed.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    again = train(resumed, algorithms, optimizer, batch, range(saved_after, steps))
    assert again == losses[saved_after:], f"a resumed run differs: {again}, {losses}"
    found = resumed.state_dict()
    differ = [key for key, value in model.state_dict().items() if not found[key].equal(value)]
    assert not differ, f"a resumed run has other weights: {differ}"
    return model, losses


def make_optimizer(model: PretrainModel) -> torch.optim.Optimizer:
    """Return AdamW over what is trained; at 1e-3, dinov2's first steps overshoot."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=3e-4)
