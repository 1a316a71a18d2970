"""Keyword spotting: some words, "unknown" for all others, and "silence" cut from noise.

These are Google's 12 labels for Speech Commands (Warden 2018), on which TC-ResNet and MP3 are
trained. Each of the two further classes has as many clips as a keyword on average. Their content is
a counter-based draw from the names, the same for all workers and parts.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data_prep.files.archives import DamagedItem
from data_prep.sources._labels import labels_of
from data_prep.sources.source import Item, draws_of_names
from data_prep.splits import Split
from pospre.data.stores.files import odd_file
from pospre.errors import UserError

NOISE = "_background_noise_"
USUAL = "yes,no,up,down,left,right,on,off,stop,go"  # with the two classes below, the usual 12
_OTHERS = ("unknown", "silence")
_STEPS = 100  # possible starts of a piece per second of noise


@dataclass(frozen=True, slots=True)
class Piece:
    """A second of noise."""

    path: Path
    start: int  # hundredths of a second

    def read(self) -> bytes:
        """Return it as a WAV file; errors are as in ``Location.read``."""
        import soundfile

        buffer = io.BytesIO()
        try:
            with self.path.open("rb") as file, soundfile.SoundFile(file) as sound:
                sound.seek(self.start * sound.samplerate // _STEPS)
                samples = sound.read(sound.samplerate, dtype="float32", always_2d=True)
                soundfile.write(buffer, samples, sound.samplerate, subtype="FLOAT", format="WAV")
        except soundfile.LibsndfileError as error:
            raise DamagedItem(str(error.error_string)) from error
        return buffer.getvalue()


def parse_keywords(text: str) -> str:
    """Return the words of ``--keywords``, comma-separated; ``"12"`` means the usual ten."""
    words = (USUAL if text == "12" else text).split(",")
    if "" in words or len(set(words)) < len(words) or set(words) & set(_OTHERS):
        raise UserError(
            f"--keywords {text}: give 12, or different words separated by commas, without "
            f"{' and '.join(_OTHERS)}, which are made from other clips."
        )
    return ",".join(words)


def keyword_classes(keywords: str, classes: Sequence[str] | None, root: Path) -> list[str]:
    """Return the classes of keyword spotting for a folder with these ``classes``."""
    words = keywords.split(",")
    missing = [word for word in words if word not in (classes or ())]
    if missing:
        raise UserError(
            f"--keywords: {', '.join(missing)} is not a class of {root}; choose from "
            f"{', '.join(classes or ()) or 'its sub-folders: there are none'}."
        )
    return [*words, *_OTHERS]


def spot(
    words: Sequence[Item],
    before: Sequence[str],
    after: Sequence[str],
    noise: list[Item],
    split: Split,
) -> tuple[Item, ...]:
    """Return the keywords' clips with their new labels, and those drawn for the further classes.

    ``words`` are the clips of one split, whose labels are of the classes ``before``; ``after`` are
    ``keyword_classes``, ``noise`` is ``pieces`` to draw from by the split's seed.
    """
    labels = labels_of(after[: -len(_OTHERS)])
    known = [replace(w, label=labels[before[w.label]]) for w in words if before[w.label] in labels]
    if not known:
        raise UserError(
            f"--keywords {','.join(labels)}: none of the {len(words)} clips of this split is one "
            "of them; choose other words, or another --split."
        )
    count = math.ceil(len(known) / len(labels))
    others = [w for w in words if before[w.label] not in labels]
    drawn = [
        replace(item, label=label)
        for label, candidates in enumerate((others, noise), start=len(labels))
        for item in _draw(candidates, count, split.seed)
    ]
    return tuple(sorted([*known, *drawn], key=lambda item: item.name))


def pieces(root: Path, files: Sequence[Item], split: Split) -> list[Item]:
    """List the seconds of noise available to a split, starting every hundredth of a second.

    The share ``val_fraction`` at the end of every file is held out, the rest is for training, so
    pieces of the two never overlap.
    """
    silences = []
    for file in files:
        path = root / file.name
        length, size = _measure(path)
        boundary = length - round(length * split.val_fraction)
        first = 0 if split.name in ("train", None) else boundary
        end = boundary if split.name == "train" else length
        silences += [
            Item(f"{file.name}@{start / _STEPS:.2f}s", -1, size, file.stamp, Piece(path, start))
            for start in range(first, end - _STEPS + 1)
        ]
    if not silences:
        share = f" (--split {split.name}, --val-fraction {split.val_fraction:g})"
        raise UserError(
            f"--keywords: {root / NOISE} has no second of noise"
            f"{share if split.name else ''}, from which silence is cut; put longer WAV files there."
        )
    return silences


def _measure(path: Path) -> tuple[int, int]:
    """Return the length of a file in hundredths of a second, and the bytes of a piece."""
    import soundfile

    remedy = "Repair it or move it away: silence is cut from it."
    odd = odd_file(path)
    if odd is not None:
        raise UserError(f"{path} cannot be read: it is {odd}. {remedy}")
    try:
        sound = soundfile.info(path)
    except soundfile.LibsndfileError as error:
        raise UserError(f"{path} cannot be read: {error.error_string}. {remedy}") from error
    return sound.frames * _STEPS // sound.samplerate, 4 * sound.samplerate * sound.channels


def _draw(candidates: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Return ``count`` of the candidates, or all if there are fewer."""
    numbers = draws_of_names([item.name for item in candidates], seed, "keywords")
    return [candidates[number] for number in np.argsort(numbers, kind="stable")[:count]]
