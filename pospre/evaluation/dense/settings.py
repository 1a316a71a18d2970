"""Settings of the evaluations of dense tasks."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pospre.evaluation.settings import Compared, Numbers, as_tuple
from pospre.ranges import PositiveRange, PositiveShare, Ratio

Factors = Annotated[PositiveRange, BeforeValidator(as_tuple)]


@dataclass(frozen=True, kw_only=True)
class Learned(Compared):
    """What is learned from images with dense labels, and how.

    Attributes:
        bank: folder of the images to learn from, where that is another one than the data's.
        split: what is measured, such as val; scenes in one folder have none.
        train_split: what is learned from.
        finetune: let the encoder learn, too; a detector standardises the features of a frozen one.
        layer_decay: factor of the encoder's rate from each block to the one below.
        drop_path: rate of its last block, below 1; those before have less, the first none.
        num_workers: processes that read images; 0 reads in between.
        seed: of the weights, of the crops or sizes, and of a detector's regions.
    """

    bank: str | None = None
    split: str = "val"
    train_split: str = "train"
    finetune: bool = False
    layer_decay: PositiveShare = 0.65
    drop_path: Ratio = 0.0
    num_workers: NonNegativeInt = 0
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Detection(Learned):
    """Settings of ``detection``.

    Attributes:
        size: pixels of the long side of images, a multiple of two patches (of 32 where the patch is
            14); without it as many patches as the encoder was made for.
        jitter: in training the long side is that times a factor from this range, such as 0.5,1.5;
            1,1 leaves it.
        channels: of pyramid and heads; 64 is about ten times faster on a CPU.
        regions: how many per image the heads learn from; twice as many are looked at in the end.
        iterations: steps of AdamW; the rate falls to a tenth after 8/9 and 26/27 of them.
        batch_size: images per step.
        lr: peak rate.
        weight_decay: of all but vectors.
    """

    size: PositiveInt | None = None
    jitter: Factors = (0.1, 2.0)
    channels: PositiveInt = 256
    regions: PositiveInt = 512
    iterations: PositiveInt = 1000
    batch_size: PositiveInt = 8
    lr: PositiveFloat = 0.0001
    weight_decay: NonNegativeFloat = 0.1
    layer_decay: PositiveShare = 0.7


@dataclass(frozen=True, kw_only=True)
class Segmentation(Learned):
    """Settings of ``segmentation``.

    Attributes:
        decoder: linear, or upernet.
        layers: whose tokens the decoder gets, such as 3,6,9,12; without it the last one (linear),
            or four evenly spread (upernet). Only linear ones are normalised.
        num_classes: of the masks; ADE20K and scenes have their own, classes.txt says it, and else
            it is as many as the training masks show.
        ignore: the id in masks that has no class, such as 11 of CamVid; null: all have.
        size: pixels of the short side that images are scaled to; without it they stay as they are.
        crop: side of the training crops and of the windows; the encoder's own size without it.
        inference: slide a window over the image, by two thirds of it at a time and averaging what
            overlaps, or show the whole image, to a grid of its size.
        augment: draw crops. false: learn from the same windows as are measured; a frozen encoder
            then sees each of them only once, which takes a fraction of the time.
        iterations: steps of AdamW.
        batch_size: crops per step.
        lr: peak rate; 1e-3 (linear) or 1e-4 (upernet) without it.
        weight_decay: 1e-4 (linear) or 0.05 (upernet) without it.
        channels: width of upernet.
    """

    decoder: Literal["linear", "upernet"] = "linear"
    layers: Numbers | None = None
    num_classes: PositiveInt | None = None
    ignore: NonNegativeInt | None = 255
    size: PositiveInt | None = None
    crop: PositiveInt | None = None
    inference: Literal["slide", "whole"] = "slide"
    augment: bool = True
    iterations: PositiveInt = 1000
    batch_size: PositiveInt = 16
    lr: PositiveFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    channels: PositiveInt = 512


@dataclass(frozen=True, kw_only=True)
class VideoSegmentation(Compared):
    """Settings of ``video_segmentation``.

    Attributes:
        split: a list of DAVIS, such as 2017/val; rendered tracks have none.
        size: pixels of the short side that frames are scaled to, each side then to whole patches;
            null leaves them as they are but for that.
        multiple: of this many pixels the long side then is, rounded down, as by DINO's script; null
            takes whole patches.
        neighbours: how many patches of earlier frames a patch takes its label from.
        context_frames: how many of the last frames, besides the first one.
        radius: patches in either direction within which they lie.
        temperature: T of the weights exp(cosine / T).
        num_videos: take so many, in their order; all without it.
    """

    split: str = "2017/val"
    size: PositiveInt | None = 480
    multiple: PositiveInt | None = None
    neighbours: PositiveInt = 5
    context_frames: NonNegativeInt = 7
    radius: NonNegativeInt = 12
    temperature: PositiveFloat = 0.1
    num_videos: PositiveInt | None = None
