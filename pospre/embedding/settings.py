"""Settings of ``python -m pospre.embed``; this module imports neither torch nor numpy."""

from typing import Literal, get_args

from pydantic import PositiveInt

from pospre.evaluation.common_settings import Listed, Numbers, Settings

Kind = Literal["cls", "mean", "patches"]
Resize = Literal["centre", "squash", "pad", "native"]
KINDS = get_args(Kind)


class Embed(Settings):
    """Settings of ``embed``."""

    features: Listed[Kind] | None = None
    """Any of ``cls`` (class token), ``mean`` (of the patch tokens) and ``patches`` (all of them,
    without class token and registers). Default: cls,mean, or mean without a class token.
    """
    layers: Numbers | None = None
    """Blocks to read, such as 6,12; 0 is the input of the first. Default: the last block."""
    norm: bool = True
    """Apply the encoder's final norm to every layer, as DINO and DINOv2 do."""
    dtype: Literal["float32", "float16"] = "float32"
    """float16 has half the size; features are computed in float32."""
    format: Literal["npy", "safetensors", "parquet"] = "npy"
    """``safetensors``: files of at most 5 GB; ``parquet``: not for patches, needs pyarrow."""
    resize: Resize = "centre"
    """``centre``: the short side becomes 256/224 of the size, then the middle is taken, as in
    evaluations (views of at most 48 px show the whole image). ``squash``: the whole image at the
    view's shape. ``pad``: the whole image at its own shape, in a frame of the mean colour, whose
    patches are among patches and mean. ``native``: the image in its own size, cut to whole patches;
    one by one, and only for cls and mean.
    """
    skip: bool = False
    """Exit with 0 although images could not be read; their rows are NaN."""
    batch_size: PositiveInt = 64
    """Images per forward pass."""
    num_workers: PositiveInt | None = None
    """Decoding threads; default: one per core."""
