"""What a conversion is told, and what it met."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from data_prep.images import PreparedImage

if TYPE_CHECKING:
    from data_prep.audio import PreparedClip, Statistics


@dataclass(frozen=True)
class Settings:
    """Everything beside the source that decides the bytes of the result."""

    format: str
    max_side: int | None = None
    quality: int = 90
    split: str | None = None
    val_fraction: float = 0.1
    seed: int = 0
    frames: int | None = None  # of a clip; None for images


@dataclass
class Tally:
    """What a conversion met.

    Attributes:
        statistics: of the features, where the source is audio.
        split_rule: what parted the data set, where ``Settings.split`` asks for a part of audio.
    """

    num_kept: int = 0
    num_encoded: int = 0
    width_sum: int = 0
    height_sum: int = 0
    audio_seconds: float = 0.0
    seconds: float = 0.0
    statistics: "Statistics | None" = None
    split_rule: str | None = None
    skipped: list[dict[str, str]] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        """Images or clips written."""
        return self.num_kept + self.num_encoded

    def add(self, sample: "PreparedImage | PreparedClip") -> None:
        """Count a written image or clip."""
        if isinstance(sample, PreparedImage):
            self.num_kept += sample.kept
            self.num_encoded += not sample.kept
            self.width_sum += sample.width
            self.height_sum += sample.height
            return
        assert self.statistics is not None
        self.num_encoded += 1
        self.audio_seconds += sample.seconds
        self.statistics.add(sample.features)
