"""Settings of ``python -m pospre.embed``; this module imports neither torch nor numpy."""

from typing import Literal, get_args

from pydantic import PositiveInt

from pospre.evaluation.common_settings import Listed, Numbers, Settings

Kind = Literal["cls", "mean", "patches"]
Resize = Literal["centre", "squash", "pad", "native"]
KINDS = get_args(Kind)


class Embed(Settings):
    """Settings of ``embed``.

    Attributes:
        features: any of cls (the class token), mean (of the patch tokens) and patches (all patch
            tokens; class token and registers are never among them). Default: cls,mean, or mean for
            an encoder without class token.
        layers: blocks to read, such as 6,12; 0 is the input of the first. Default: the last block.
        norm: apply the encoder's final norm to every layer, as DINO and DINOv2 do.
        dtype: float32, or float16 with half the size. Features are computed in float32.
        format: npy; safetensors (files of at most 5 GB); or parquet (not for patches; needs
            pyarrow).
        resize: centre: the short side becomes 256/224 of the size, then the middle is taken, as in
            evaluations (views of at most 48 px show the whole image). squash: the whole image at
            the view's shape. pad: the whole image at its own shape, in a frame of the mean colour,
            whose patches are among patches and mean. native: the image in its own size, cut to
            whole patches; images are read one by one, and only for cls and mean.
        skip: exit with 0 although images could not be read; their rows are NaN.
        batch_size: images per forward pass.
        num_workers: decoding threads; default: one per core.
    """

    features: Listed[Kind] | None = None
    layers: Numbers | None = None
    norm: bool = True
    dtype: Literal["float32", "float16"] = "float32"
    format: Literal["npy", "safetensors", "parquet"] = "npy"
    resize: Resize = "centre"
    skip: bool = False
    batch_size: PositiveInt = 64
    num_workers: PositiveInt | None = None
