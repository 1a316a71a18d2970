"""Features of a WAV file for storage: 40 MFCCs for every 10 ms of its first second.

They follow the keyword spotting of TC-ResNet (Choi et al. 2019) and MP3: 16 kHz, windows of 30 ms,
power spectrum of 512 points, 64 mel bands from 80 to 7600 Hz, log(x + 1e-6), DCT, the first 40
coefficients. Computed in float64, so that all machines store the same float32.
"""

import io
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import soundfile
from scipy.fft import dct
from scipy.signal import resample_poly

from data_prep.files.archives import DamagedItem

RATE = 16000
NUM_COEFFICIENTS = 40

_WINDOW, _HOP, _FFT = 480, 160, 512
_BANDS, _RANGE = 64, (80, 7600)  # Hz
_LARGEST_RATIO = 1000  # the resampler's table grows with the ratio of the two rates


@dataclass(frozen=True)
class PreparedClip:
    """A clip ready to store: features (frames, 40), float32, and the length of the whole file."""

    features: np.ndarray
    seconds: float

    @property
    def num_bytes(self) -> int:
        """Bytes in the data set."""
        return self.features.nbytes


def prepare_clip(data: bytes, num_frames: int) -> PreparedClip:
    """Return the features of a WAV file; ``DamagedItem`` if it cannot be used.

    Channels are averaged, and other rates resampled. Only the first second is used; shorter clips
    are padded with silence.
    """
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as sound:
            rate, length = sound.samplerate, sound.frames
            _check(rate, length)
            samples = sound.read(frames=rate, dtype="float32", always_2d=True).mean(axis=1)
    except soundfile.LibsndfileError as error:
        raise DamagedItem(str(error.error_string)) from error
    if not len(samples):
        raise DamagedItem("the file ends before its first sample")
    if not np.isfinite(samples).all():
        raise DamagedItem("it has samples that are not finite")
    return PreparedClip(clip_features(samples, rate, num_frames), length / rate)


def clip_features(samples: np.ndarray, rate: int, num_frames: int) -> np.ndarray:
    """Return the MFCCs (num_frames, 40) of a mono clip's first second, float32.

    98 frames are this second; 100 have 20 ms of silence after it. ``rate`` is in Hz.
    """
    wave = samples.astype(np.float64)
    if rate != RATE:
        shared = math.gcd(rate, RATE)
        wave = resample_poly(wave, RATE // shared, rate // shared)
    padded = np.zeros(_WINDOW + _HOP * (num_frames - 1))
    wave = wave[: min(RATE, len(padded))]
    padded[: len(wave)] = wave
    frames = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)[::_HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_WINDOW) / _WINDOW)
    power = np.abs(np.fft.rfft(frames * hann, _FFT)) ** 2
    # einsum: a BLAS would start threads in every worker, and sum otherwise on another CPU
    bands = np.einsum("fk,kb->fb", power, _mel_bands())
    cepstra = dct(np.log(bands + 1e-6), norm="ortho")
    return cepstra[:, :NUM_COEFFICIENTS].astype(np.float32)


def _check(rate: int, length: int) -> None:
    if not length:
        raise DamagedItem("it has no samples")
    if max(rate, RATE) // math.gcd(rate, RATE) > _LARGEST_RATIO:
        raise DamagedItem(f"its rate of {rate} Hz cannot be resampled to {RATE} Hz")


@cache
def _mel_bands() -> np.ndarray:
    """Return the triangular weights of each frequency in each band: (257, 64).

    Their corners are evenly spaced in mel, 2595·log10(1 + f / 700).
    """
    low, high = (2595 * math.log10(1 + hertz / 700) for hertz in _RANGE)
    corners = 700 * (10 ** (np.linspace(low, high, _BANDS + 2) / 2595) - 1)
    hertz = np.linspace(0, RATE / 2, _FFT // 2 + 1)[:, None]
    width = np.diff(corners)
    rising = (hertz - corners[:-2]) / width[:-1]
    falling = (corners[2:] - hertz) / width[1:]
    return np.maximum(0, np.minimum(rising, falling))
