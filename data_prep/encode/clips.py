"""Features of a WAV file for storage: 40 MFCCs for every 10 ms of its first second.

They follow the keyword spotting of TC-ResNet (Choi et al. 2019) and MP3: 16 kHz, windows of 30 ms,
power spectrum of 512 points, 64 mel bands from 80 to 7600 Hz, log(x + 1e-6), DCT, the first 40
coefficients. torchaudio computes the features; soundfile reads the files.
"""

import io
import math
from dataclasses import dataclass
from functools import cache

import numpy as np
import soundfile
import torch
from torchaudio.transforms import MFCC, Resample

from data_prep.files.archives import DamagedItem
from pospre.data.threads import one_thread

RATE = 16000
NUM_COEFFICIENTS = 40

_WINDOW, _HOP, _FFT = 480, 160, 512
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
    # forked processes cannot use torch's thread pool of the parent
    with one_thread(), torch.no_grad():
        wave = torch.from_numpy(samples)
        if rate != RATE:
            wave = _resampler(rate)(wave)
        # a window is centred in the transformed points
        before = (_FFT - _WINDOW) // 2
        padded = torch.zeros(2 * before + _WINDOW + _HOP * (num_frames - 1))
        wave = wave[: min(RATE, len(padded) - before)]
        padded[before : before + len(wave)] = wave
        return _mfcc()(padded).T.contiguous().numpy()


def _check(rate: int, length: int) -> None:
    if not length:
        raise DamagedItem("it has no samples")
    if max(rate, RATE) // math.gcd(rate, RATE) > _LARGEST_RATIO:
        raise DamagedItem(f"its rate of {rate} Hz cannot be resampled to {RATE} Hz")


@cache
def _mfcc() -> MFCC:
    spectrum = {
        "n_fft": _FFT,
        "win_length": _WINDOW,
        "hop_length": _HOP,
        "center": False,
        "n_mels": 64,
        "f_min": 80.0,
        "f_max": 7600.0,
    }
    return MFCC(RATE, NUM_COEFFICIENTS, log_mels=True, melkwargs=spectrum)


@cache
def _resampler(rate: int) -> Resample:
    return Resample(rate, RATE)
