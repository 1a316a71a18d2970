"""Which images are measured, and how they are read: settings that many evaluations share."""

from dataclasses import dataclass

from pydantic import PositiveInt


@dataclass(frozen=True)
class Sampling:
    """Which images are measured, and how they are read.

    Args:
        num_samples: measure on so many images, drawn by the seed; all without it.
        batch_size: images per forward pass; it does not change the result.
        num_workers: decoding threads; the loader chooses without it.
        seed: of the drawn images, and of what else is random: masks, boxes, noise, weights.
    """

    num_samples: PositiveInt | None = None
    batch_size: PositiveInt = 64
    num_workers: PositiveInt | None = None
    seed: int = 0
