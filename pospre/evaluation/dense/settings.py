"""Settings of the evaluations of dense tasks."""

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)

from pospre.evaluation.common_settings import (
    Halved,
    Listed,
    Numbers,
    Sampling,
    as_tuple,
)
from pospre.ranges import PositiveRange, PositiveShare, Ratio

Factors = Annotated[PositiveRange, BeforeValidator(as_tuple)]
Sides = Annotated[tuple[PositiveInt, PositiveInt], BeforeValidator(as_tuple)]


class Trained(Halved):
    """Training on images with dense labels."""

    bank: str | None = None
    """Folder of the training images, if they are not in the measured data."""
    split: str = "val"
    """Split to measure, such as val; scenes in one folder have no splits."""
    train_split: str = "train"
    """Split to train on."""


class Learned(Trained):
    """Training of a head, and of the encoder if ``finetune``."""

    finetune: bool = False
    """Train the encoder too; a detector standardises the features of a frozen encoder."""
    layer_decay: PositiveShare = 0.65
    """Rate factor from each block of the encoder to the one below."""
    drop_path: Ratio = 0.0
    """Rate of the last block, below 1; it grows linearly from 0 in the first."""
    num_workers: NonNegativeInt = 0
    """Processes that read images; 0 reads in the main process."""
    seed: int = 0
    """Seed of the weights, of crops or sizes, and of a detector's regions."""


class Correspondence(Sampling, Halved):
    """Settings of ``correspondence``."""

    num_samples: PositiveInt | None = None
    """Number of pairs, drawn by the seed; default: all."""
    split: str = "test"
    """Split of SPair-71k: trn, val or test."""
    size: PositiveInt | None = None
    """Side of the square views in pixels, a multiple of the patch; default: the encoder's."""
    layer: NonNegativeInt | None = None
    """Block whose patch tokens are compared; default: the last."""
    alpha: Listed[PositiveFloat] = (0.05, 0.1, 0.15, 0.2)
    """Thresholds, as shares of the object's box or of the view."""
    match: Literal["argmax", "kernel"] = "argmax"
    """``argmax`` answers with the best patch's centre, ``kernel`` with a weighted mean near it."""
    coordinates: Literal["ours", "probe3d", "insid3"] = "ours"
    """``ours``, or those of published codes, which are half a patch off."""
    seed: int = 0
    """Seed of the drawn pairs, homographies and colours."""


class Depth(Trained):
    """Settings of ``depth``."""

    protocol: Literal["look", "dinov3", "dinov2", "pixio"] = "look"
    """``look`` encodes each image once, squashed to a square. The others train on crops, as the
    published code of these encoders; their figures differ by more than encoders do.
    """
    size: PositiveInt | None = None
    """Side of a look's square views in pixels, a multiple of the patch; default: the encoder's."""
    crop: Sides | None = None
    """Height and width of training crops in pixels; default: 416,544, or 256,256 (pixio)."""
    layers: Numbers | None = None
    """Layers that the head reads, such as 3,6,9,12; default: the last."""
    scale: PositiveFloat = 1000.0
    """Values per metre of depths in PNGs."""
    max_depth: PositiveFloat | None = None
    """In metres; deeper pixels have no truth. Default: the training's largest (in rendered scenes
    16, and deeper ones count as 16).
    """
    iterations: Annotated[int, Field(ge=4)] | None = None  # torch's one cycle fails for 3
    """Steps of AdamW; default: 2000 (look), 38400, or 60 epochs (pixio)."""
    batch_size: PositiveInt | None = None
    """Images or crops per step; default: 16, or 32 (pixio)."""
    lr: PositiveFloat | None = None
    """Peak rate; default: 3e-4, or 2e-4 (pixio)."""
    num_workers: NonNegativeInt = 0
    """Processes that read images for crops; 0 reads in the main process."""
    seed: int = 0
    """Seed of the head's weights, of the order of images, and of crops."""


class Detection(Learned):
    """Settings of ``detection``."""

    size: PositiveInt | None = None
    """Long side of images in pixels, a multiple of two patches (of 32 if the patch is 14); default:
    as many patches as the encoder was made for.
    """
    jitter: Factors = (0.1, 2.0)
    """Range of a factor of the long side in training, such as 0.5,1.5; 1,1 keeps it."""
    channels: PositiveInt = 256
    """Width of pyramid and heads; 64 is about ten times faster on a CPU."""
    regions: PositiveInt = 512
    """Regions per image that train the heads; inference uses twice as many."""
    iterations: PositiveInt = 1000
    """Steps of AdamW; the rate is divided by 10 after 8/9 and 26/27 of them."""
    batch_size: PositiveInt = 8
    """Images per step."""
    lr: PositiveFloat = 0.0001
    """Peak rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Weight decay of all parameters but vectors."""
    layer_decay: PositiveShare = 0.7


class Segmentation(Learned):
    """Settings of ``segmentation``."""

    decoder: Literal["linear", "upernet"] = "linear"
    """A linear layer on the patch tokens, or UperNet."""
    layers: Numbers | None = None
    """Layers that the decoder reads, such as 3,6,9,12; default: the last (linear), or four evenly
    spaced (upernet). Only linear's are normalised.
    """
    num_classes: PositiveInt | None = None
    """Number of classes of the masks; default: that of ADE20K, scenes, classes.txt or the masks to
    train on.
    """
    ignore: NonNegativeInt | None = 255
    """Mask value without a class, such as 11 for CamVid; null: none."""
    size: PositiveInt | None = None
    """Short side of scaled images in pixels; default: unscaled."""
    crop: PositiveInt | None = None
    """Side of the training crops, and of the windows to measure on, which overlap by a third;
    default: the encoder's size.
    """
    augment: bool = True
    """Train on random crops. false: on the windows used for measuring; a frozen encoder then
    encodes each once, which takes a fraction of the time.
    """
    iterations: PositiveInt = 1000
    """Steps of AdamW."""
    batch_size: PositiveInt = 16
    """Crops per step."""
    lr: PositiveFloat | None = None
    """Peak rate; default: 1e-3 (linear) or 1e-4 (upernet)."""
    weight_decay: NonNegativeFloat | None = None
    """Default: 1e-4 (linear) or 0.05 (upernet)."""
    channels: PositiveInt = 512
    """Width of upernet."""


class VideoSegmentation(Halved):
    """Settings of ``video_segmentation``."""

    split: str = "2017/val"
    """A list of DAVIS, such as 2017/val; rendered tracks have none."""
    size: PositiveInt | None = 480
    """Short side of scaled frames in pixels, both sides in whole patches; null: only that."""
    multiple: PositiveInt | None = None
    """Round the long side down to a multiple of this, as DINO's script; null: whole patches."""
    neighbours: PositiveInt = 5
    """Number of patches in earlier frames that a patch takes its label from."""
    context_frames: NonNegativeInt = 7
    """Number of last frames to use, besides the first one."""
    radius: NonNegativeInt = 12
    """Maximal distance of these patches in either direction, in patches."""
    temperature: PositiveFloat = 0.1
    """T of the weights exp(cosine / T)."""
    num_videos: PositiveInt | None = None
    """Number of videos, in order; default: all, or all of the half."""
