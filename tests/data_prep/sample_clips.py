"""Small WAV files, good and bad, for the tests of speech."""

import io
from pathlib import Path

import numpy as np
import soundfile


def chirp(number: int = 0, rate: int = 16000, seconds: float = 0.6) -> np.ndarray:
    """A tone that rises, with a little noise: float32 mono, different for every number."""
    time = np.arange(round(rate * seconds)) / rate
    start = 300 + 150 * (number % 7)
    tone = 0.5 * np.sin(2 * np.pi * (start + 600 * time) * time)
    noise = np.random.default_rng(number).normal(scale=0.01, size=len(time))
    return (tone + noise).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16000, subtype: str = "PCM_16") -> bytes:
    """The samples, (N,) or (N, channels), as the bytes of a WAV file."""
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, rate, subtype=subtype, format="WAV")
    return buffer.getvalue()


def write_clips(root: Path, clips_per_class: int = 6, classes: tuple[str, ...] = ("no", "yes")):
    """Write ``<class>/<number>.wav`` and return the folder."""
    for place, name in enumerate(classes):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(clips_per_class):
            clip = chirp(number + 100 * place, seconds=0.4 + 0.1 * number)
            (root / name / f"{number}.wav").write_bytes(wav(clip))
    return root
