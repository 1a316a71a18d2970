"""Settings of the evaluations of dense tasks."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from pospre.evaluation.common_settings import Compared, Listed, Numbers, Sampling, as_tuple
from pospre.ranges import PositiveRange, PositiveShare, Ratio

Factors = Annotated[PositiveRange, BeforeValidator(as_tuple)]


class Learned(Compared):
    """Training on images with dense labels.

    Attributes:
        bank: folder of the training images, if they are not in the measured data.
        split: split to measure, such as val; scenes in one folder have no splits.
        train_split: split to train on.
        finetune: train the encoder too; a detector standardises the features of a frozen encoder.
        layer_decay: rate factor from each block of the encoder to the one below.
        drop_path: rate of the last block, below 1; it grows linearly from 0 in the first.
        num_workers: processes that read images; 0 reads in the main process.
        seed: seed of the weights, of crops or sizes, and of a detector's regions.
    """

    bank: str | None = None
    split: str = "val"
    train_split: str = "train"
    finetune: bool = False
    layer_decay: PositiveShare = 0.65
    drop_path: Ratio = 0.0
    num_workers: NonNegativeInt = 0
    seed: int = 0


class Correspondence(Sampling, Compared):
    """Settings of ``correspondence``.

    Attributes:
        num_samples: number of pairs, drawn by the seed; default: all.
        split: of SPair-71k: trn, val or test.
        size: side of the square views in pixels, a multiple of the patch; default: the encoder's.
        layer: block whose patch tokens are compared; default: the last.
        alpha: thresholds, as shares of the object's box or of the view.
        match: argmax answers with the best patch's centre; kernel with a weighted mean around it.
        coordinates: of ours, or those of published codes, which are half a patch off: probe3d,
            insid3.
        seed: seed of the drawn pairs, homographies and colours.
    """

    split: str = "test"
    size: PositiveInt | None = None
    layer: NonNegativeInt | None = None
    alpha: Listed[PositiveFloat] = (0.05, 0.1, 0.15, 0.2)
    match: Literal["argmax", "kernel"] = "argmax"
    coordinates: Literal["ours", "probe3d", "insid3"] = "ours"


class Depth(Compared):
    """Settings of ``depth``.

    Attributes:
        bank: folder of the training images, if they are not in the measured data.
        split: split to measure, such as val; scenes in one folder have no splits.
        train_split: split to train on.
        size: side of the square views in pixels, a multiple of the patch; default: the encoder's.
        scale: values per metre of depths in PNGs.
        max_depth: largest depth in metres; deeper pixels have no truth. Default: the training's
            largest (rendered scenes: 16, and deeper ones count as 16).
        iterations: steps of AdamW.
        batch_size: images per step.
        lr: peak rate of the cycle.
        seed: seed of the head's weights and of the order of images.
    """

    bank: str | None = None
    split: str = "val"
    train_split: str = "train"
    size: PositiveInt | None = None
    scale: PositiveFloat = 1000.0
    max_depth: PositiveFloat | None = None
    iterations: PositiveInt = 2000
    batch_size: PositiveInt = 16
    lr: PositiveFloat = 0.0003
    seed: int = 0


class Detection(Learned):
    """Settings of ``detection``.

    Attributes:
        size: long side of images in pixels, a multiple of two patches (of 32 if the patch is 14);
            default: as many patches as the encoder was made for.
        jitter: in training the long side is multiplied by a factor from this range, such as
            0.5,1.5; 1,1 keeps it.
        channels: width of pyramid and heads; 64 is about ten times faster on a CPU.
        regions: regions per image that train the heads; inference uses twice as many.
        iterations: steps of AdamW; the rate is divided by 10 after 8/9 and 26/27 of them.
        batch_size: images per step.
        lr: peak rate.
        weight_decay: for all parameters except vectors.
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


class Segmentation(Learned):
    """Settings of ``segmentation``.

    Attributes:
        decoder: linear or upernet.
        layers: layers whose tokens the decoder gets, such as 3,6,9,12; default: the last one
            (linear), or four evenly spaced (upernet). Only linear's are normalised.
        num_classes: of the masks; default: that of ADE20K, scenes or classes.txt, or else the
            number of classes in the training masks.
        ignore: mask value without a class, such as 11 for CamVid; null: none.
        size: short side of scaled images in pixels; default: unscaled.
        crop: side of the training crops, and of the windows to measure on, which overlap by a
            third; default: the encoder's size.
        augment: train on random crops. false: train on the windows used for measuring; a frozen
            encoder then encodes each once, which takes a fraction of the time.
        iterations: steps of AdamW.
        batch_size: crops per step.
        lr: peak rate; default: 1e-3 (linear) or 1e-4 (upernet).
        weight_decay: default: 1e-4 (linear) or 0.05 (upernet).
        channels: width of upernet.
    """

    decoder: Literal["linear", "upernet"] = "linear"
    layers: Numbers | None = None
    num_classes: PositiveInt | None = None
    ignore: NonNegativeInt | None = 255
    size: PositiveInt | None = None
    crop: PositiveInt | None = None
    augment: bool = True
    iterations: PositiveInt = 1000
    batch_size: PositiveInt = 16
    lr: PositiveFloat | None = None
    weight_decay: NonNegativeFloat | None = None
    channels: PositiveInt = 512


class VideoSegmentation(Compared):
    """Settings of ``video_segmentation``.

    Attributes:
        split: a list of DAVIS, such as 2017/val; rendered tracks have none.
        size: short side of scaled frames in pixels, with both sides rounded to whole patches; null:
            only rounded.
        multiple: round the long side down to a multiple of this many pixels, as in DINO's script;
            null: whole patches.
        neighbours: number of patches in earlier frames that a patch takes its label from.
        context_frames: number of last frames to use, besides the first one.
        radius: maximal distance of these patches in either direction, in patches.
        temperature: T of the weights exp(cosine / T).
        num_videos: number of videos, in order; default: all.
    """

    split: str = "2017/val"
    size: PositiveInt | None = 480
    multiple: PositiveInt | None = None
    neighbours: PositiveInt = 5
    context_frames: NonNegativeInt = 7
    radius: NonNegativeInt = 12
    temperature: PositiveFloat = 0.1
    num_videos: PositiveInt | None = None
