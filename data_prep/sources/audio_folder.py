"""A folder of WAV files as a source: which clips, of which class, and which are held out."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from data_prep.sources.image_folder import ImageFolder, select_split, source_file
from pospre.data.folder_reader import class_labels, looks_like_image, visible_files
from pospre.errors import UserError

# Free Spoken Digits: class, speaker and number in the name. Its first five of each are the test.
_NAMED = re.compile(r"([^_/]+)_([^_/]+)_(\d+)\.wav", re.IGNORECASE)
_NUM_TEST = 5
# Speech Commands: the official lists of files, and a folder of noise that is no word.
_TEST_LIST, _VALIDATION_LIST = "testing_list.txt", "validation_list.txt"


@dataclass(frozen=True)
class AudioFolder(ImageFolder):
    """A listed folder of WAV files: the clips in order, and the class names by label."""


def is_audio_folder(root: Path) -> bool:
    """Tell whether a folder holds WAV files and no images."""
    names = list(visible_files(root))
    return any(map(_is_wav, names)) and not any(
        looks_like_image(root, name) for name in names if not _is_wav(name)
    )


def list_audio_folder(root: Path) -> AudioFolder:
    """List the WAV files below ``root``, sorted by relative path.

    The classes are the sub-folders, those whose name begins with an underscore left out (Speech
    Commands keeps its noise in one). Where all files lie in one folder and are called
    ``class_speaker_number.wav`` (Free Spoken Digits), the names tell.
    """
    visible = list(visible_files(root))
    names = sorted(name for name in visible if _is_wav(name) and not _is_noise(name))
    classes, labels = _classes(names)
    files = tuple(source_file(root, name, label) for name, label in zip(names, labels, strict=True))
    return AudioFolder(root, files, classes, len(visible) - len(names))


def select_audio_split(
    folder: AudioFolder, split: str, val_fraction: float, seed: int
) -> tuple[AudioFolder, str]:
    """Keep the ``"train"`` or the ``"val"`` part of a folder, and say what parts it.

    A data set's own parting holds where it has one. Speech Commands: ``val`` is its
    ``testing_list.txt``, and ``train`` what stands in neither that nor ``validation_list.txt``.
    Free Spoken Digits: numbers below 5 are ``val``. Elsewhere the parts are drawn like those of
    images.

    Raises:
        UserError: the part is empty.
    """
    test = _listed(folder.root / _TEST_LIST)
    if test:
        rule, unused = _TEST_LIST, _listed(folder.root / _VALIDATION_LIST) - test
    elif _have_numbers(file.path for file in folder.files):
        rule, unused = f"number in the name below {_NUM_TEST}", set()
        test = {file.path for file in folder.files if _number(file.path) < _NUM_TEST}
    else:
        drawn = select_split(folder, split, val_fraction, seed)
        return replace(folder, files=drawn.files), f"drawn, val {val_fraction:g}"
    wanted = split == "val"
    files = tuple(
        file for file in folder.files if (file.path in test) == wanted and file.path not in unused
    )
    if not files:
        raise UserError(f"--split {split}: {rule} leaves no clip of {len(folder.files)}.")
    return replace(folder, files=files), rule


def _is_wav(name: str) -> bool:
    return name.lower().endswith(".wav")


def _is_noise(name: str) -> bool:
    return "/" in name and name.startswith("_")


def _classes(names: list[str]) -> tuple[list[str] | None, list[int]]:
    if not _have_numbers(names):
        return class_labels(names)
    found = [name.rpartition("/")[2].split("_", 1)[0] for name in names]
    classes = sorted(set(found))
    return classes, [classes.index(name) for name in found]


def _have_numbers(names: Iterable[str]) -> bool:
    """Tell whether all files lie in one folder and carry class, speaker and number."""
    split = [name.rpartition("/") for name in names]
    one_folder = len({folder for folder, _, _ in split}) == 1
    return one_folder and all(_NAMED.fullmatch(name) for _, _, name in split)


def _number(name: str) -> int:
    match = _NAMED.fullmatch(name.rpartition("/")[2])
    assert match is not None
    return int(match[3])


def _listed(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return set(path.read_text(encoding="utf-8").split())
