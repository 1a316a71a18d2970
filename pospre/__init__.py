"""Position-aware self-supervised pre-training: the names below, and ``python -m pospre.train``.

====================  =============================================================================
``build_encoder``     an encoder by name: ``vits16``, ``timm:vit_small_patch16_224``, …
``wrap_encoder``      the encoder of a model that ``timm.create_model`` made, with its weights
``PretrainModel``     the encoder and what algorithms attach to it; a ``ComposerModel``
``attach``            an algorithm by name: ``attach(model, "droppos", sigma_start=2.0)``
``parameter_groups``  rates and weight decays for an optimiser: layer decay, no decay of vectors
``prepare``           before a forward without Composer: schedules, and masks into the batch
``after_step``        after the optimiser's step without Composer: moves the teacher
``build_loader``      batches of views from a folder, ``.beton`` or MDS shards
``ViewGroup``         what such a loader cuts out of every image
``from_images``       a batch of the images of any other loader
``DeviceAugment``     flips and normalises a loader's views where the model does not
``load_weights``      a checkpoint's or a file's encoder into the model
``measure``           an evaluation by name, of a run, a file, a model of ours or a ViT of timm
``UserError``         what a mistake raises; its message names the remedy
====================  =============================================================================

They are imported when they are first used, so that ``--help`` does not wait for torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from pospre.installed import check_installed

if TYPE_CHECKING:  # for editors and type checkers, which cannot see what is imported late
    from pospre.augment.device import DeviceAugment as DeviceAugment
    from pospre.batch import from_images as from_images
    from pospre.data.loader import build_loader as build_loader
    from pospre.data.views.plan import ViewGroup as ViewGroup
    from pospre.errors import UserError as UserError
    from pospre.evaluation.measure import measure as measure
    from pospre.model.algorithm import after_step as after_step
    from pospre.model.algorithm import attach as attach
    from pospre.model.algorithm import prepare as prepare
    from pospre.model.model import PretrainModel as PretrainModel
    from pospre.nn.build import build_encoder as build_encoder
    from pospre.nn.timm_models import wrap_encoder as wrap_encoder
    from pospre.training.optimizer.groups import parameter_groups as parameter_groups
    from pospre.training.start_weights import load_weights as load_weights

# Before torch loads OpenMP: its threads else spin while they wait for each other, at the cost of
# whoever shares the cores with them (another run, other ranks, the loader's own threads).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

check_installed()

__version__ = "0.1.0"

_HOMES = {
    "build_encoder": "nn.build",
    "wrap_encoder": "nn.timm_models",
    "PretrainModel": "model.model",
    "attach": "model.algorithm",
    "parameter_groups": "training.optimizer.groups",
    "prepare": "model.algorithm",
    "after_step": "model.algorithm",
    "build_loader": "data.loader",
    "ViewGroup": "data.views.plan",
    "from_images": "batch",
    "DeviceAugment": "augment.device",
    "load_weights": "training.start_weights",
    "measure": "evaluation.measure",
    "UserError": "errors",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pospre' has no attribute '{name}'")
    return getattr(importlib.import_module(f"pospre.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
