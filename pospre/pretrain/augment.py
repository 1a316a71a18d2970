"""The device step of every view: flip and normalise."""

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class DeviceAugment(nn.Module):
    """Flip and normalise uint8 views on the device they are on, vectorised over the batch."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, image_BV3HW: Tensor, flip_BV: Tensor) -> Tensor:
        """Return normalised float32 views (B, V, 3, H, W); those marked in ``flip_BV`` mirrored."""
        mirrored = torch.where(flip_BV[..., None, None, None], image_BV3HW.flip(-1), image_BV3HW)
        return (mirrored.float() / 255 - self.mean) / self.std
