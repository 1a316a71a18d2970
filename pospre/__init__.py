"""Position-aware self-supervised pre-training: the names below, and ``python -m pospre.train``.

====================  =============================================================================
``PretrainModel``     an encoder, or a timm ViT, with its algorithms; a ``ComposerModel``
``MAE``               the algorithms with their options: ``MAE(mask_ratio=0.75)``; the others:
                      ``SimMIM`` ``IJEPA`` ``DINOv2`` ``LeJEPA`` ``Supervised`` ``DropPos``
                      ``MP3`` ``MaskedPosition`` ``CropField`` ``StoP`` ``LUT`` ``EmaTeacher``
                      ``Gram`` ``Distill`` ``DIET`` ``PaKA`` ``SP`` ``LOCA`` ``PART``
``build_encoder``     an encoder by name: ``vits16``, ``timm:vit_small_patch16_224``, …
``wrap_encoder``      the encoder of a ``timm.create_model`` model, with its weights
``add_lora``          LoRA pairs beside an encoder's weights; ``merge_lora`` puts them in
``load_run``          the trained model of a run
``load_weights``      load the encoder of a checkpoint or file into the model
``calibrate``         fit new heads to published weights, or to the reference, as runs do
``parameter_groups``  optimiser groups: layer decay, no weight decay for vectors
``Stages``            which tensors train when, with ramps, as a recipe's stages
``build_loader``      batches of views from a folder, ``.beton`` or MDS shards
``ViewGroup``         the views that this loader crops from every image
``from_images``       a batch from the images of any other loader
``DeviceAugment``     flips and normalises a loader's views if the model does not
``measure``           an evaluation by name, of a run, a file, our model or a timm ViT
``PretrainAlgorithm`` base class of your own algorithms, with an ``Objective`` over the tokens of
                      encoder passes; it declares what it ``Uses``: each ``Pass``, what it ``Hides``
``PositionObjective`` kinds of objectives that evaluations measure, by their ``Answers``; and
                      ``PixelObjective``. A ``PlaceObjective`` may also answer by ``ViewAnswers``
                      or ``Relations``; all of them are asked about blank images in training
``Places``            where tokens are, for editors that move or forget them
``Scheme``            base class of your own position schemes, made of ``TransformerDims``
``TaskDescription``   a method's task, at the top of a run's page
``UserError``         raised for users' mistakes; its message names the remedy
====================  =============================================================================

They are imported on first use, so that ``--help`` does not wait for torch.
"""

import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pospre.installed import check_installed

if TYPE_CHECKING:  # for editors and type checkers, which do not see late imports
    from pospre.algorithms.crop_field import CropField as CropField
    from pospre.algorithms.diet import DIET as DIET
    from pospre.algorithms.dinov2.dinov2 import DINOv2 as DINOv2
    from pospre.algorithms.distill.distill import Distill as Distill
    from pospre.algorithms.droppos import DropPos as DropPos
    from pospre.algorithms.ema_teacher import EmaTeacher as EmaTeacher
    from pospre.algorithms.gram import Gram as Gram
    from pospre.algorithms.ijepa.ijepa import IJEPA as IJEPA
    from pospre.algorithms.lejepa.lejepa import LeJEPA as LeJEPA
    from pospre.algorithms.loca import LOCA as LOCA
    from pospre.algorithms.lut.lut import LUT as LUT
    from pospre.algorithms.mae import MAE as MAE
    from pospre.algorithms.masked_position import MaskedPosition as MaskedPosition
    from pospre.algorithms.mp3 import MP3 as MP3
    from pospre.algorithms.paka import PaKA as PaKA
    from pospre.algorithms.part import PART as PART
    from pospre.algorithms.simmim import SimMIM as SimMIM
    from pospre.algorithms.sp import SP as SP
    from pospre.algorithms.stop.stop import StoP as StoP
    from pospre.algorithms.supervised.supervised import Supervised as Supervised
    from pospre.augment.device import DeviceAugment as DeviceAugment
    from pospre.batch import from_images as from_images
    from pospre.data.loader import build_loader as build_loader
    from pospre.data.views.options import ViewGroup as ViewGroup
    from pospre.errors import UserError as UserError
    from pospre.evaluation.run import measure as measure
    from pospre.model.algorithm import PretrainAlgorithm as PretrainAlgorithm
    from pospre.model.calibration import calibrate as calibrate
    from pospre.model.model import PretrainModel as PretrainModel
    from pospre.model.objective import Objective as Objective
    from pospre.model.objective import PixelObjective as PixelObjective
    from pospre.model.position_task import Answers as Answers
    from pospre.model.position_task import PlaceObjective as PlaceObjective
    from pospre.model.position_task import PositionObjective as PositionObjective
    from pospre.model.position_task import Relations as Relations
    from pospre.model.position_task import ViewAnswers as ViewAnswers
    from pospre.model.stages import Stages as Stages
    from pospre.model.task_description import TaskDescription as TaskDescription
    from pospre.model.uses import Hides as Hides
    from pospre.model.uses import Pass as Pass
    from pospre.model.uses import Uses as Uses
    from pospre.nn.build import build_encoder as build_encoder
    from pospre.nn.lora import add_lora as add_lora
    from pospre.nn.lora import merge_lora as merge_lora
    from pospre.nn.places import Places as Places
    from pospre.nn.positions.scheme import Scheme as Scheme
    from pospre.nn.positions.scheme import TransformerDims as TransformerDims
    from pospre.nn.weights.timm_models import wrap_encoder as wrap_encoder
    from pospre.training.build import load_run as load_run
    from pospre.training.optimizer.optim import parameter_groups as parameter_groups
    from pospre.training.start_weights import load_weights as load_weights

check_installed()

__version__ = "0.2.0"

# the module of each name, from the lines above: named once
_LINE = r"^    from (pospre\.\S+) import (\w+) as \2$"
_HOMES = {name: home for home, name in re.findall(_LINE, Path(__file__).read_text("utf-8"), re.M)}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pospre' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
