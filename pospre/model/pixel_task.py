"""Common code of objectives that predict the pixels of hidden patches (MAE, SimMIM)."""

from torch import Tensor

from pospre.batch import HIDDEN, Batch
from pospre.model.objective import Objective, Outputs
from pospre.nn.decoder import patchify
from pospre.nn.masking import gather_tokens
from pospre.nn.vit import Encoder


class PixelObjective(Objective):
    """An objective whose ``forward`` returns ``predicted`` and ``target``, each (B, N−K, F).

    They have F values for each patch of ``view/hidden``, in the units of the loss. The evaluation
    ``reconstructions`` only needs these.

    Args:
        encoder: its patches are predicted.
        norm_pix: whether pixels are normalised within each patch.
    """

    def __init__(self, encoder: Encoder, *, norm_pix: bool = False) -> None:
        super().__init__()
        self.patch_size, self.norm_pix = encoder.patch_size, norm_pix
        self.num_prefix = encoder.num_prefix_tokens

    def target(self, batch: Batch) -> Tensor:
        """Return the hidden patches in the units of the loss."""
        patches = patchify(batch["view/pixels"][:, 0], self.patch_size)
        target = gather_tokens(patches, batch[HIDDEN])
        if not self.norm_pix:
            return target
        mean = target.mean(-1, keepdim=True)
        variance = target.var(-1, keepdim=True)  # unbiased, as published
        return (target - mean) / (variance + 1e-6).sqrt()

    def painted(self, outputs: Outputs, true: Tensor) -> Tensor:
        """Return the prediction in pixels, with each true patch's mean and deviation."""
        predicted = outputs["predicted"].float()
        if self.norm_pix:
            predicted = predicted * true.std(-1, keepdim=True) + true.mean(-1, keepdim=True)
        return predicted
