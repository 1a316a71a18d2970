"""A folder of WAV files by class: Speech Commands, Free Spoken Digits, or any."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from data_prep.files.tree import Tree
from data_prep.sources.image_folder import file_item, own_split
from data_prep.sources.keywords import NOISE, keyword_classes, pieces, spot
from data_prep.sources.source import Source, one_of_each_ending
from data_prep.splits import Split
from pospre.data.stores.image_folder import Listing, class_labels, looks_like_image, visible_files
from pospre.errors import UserError, needing
from pospre.text_lists import read_list

# Free Spoken Digits: class, speaker and number in the name. The first five of each are the test set
_NAMED = re.compile(r"([^_/]+)_([^_/]+)_(\d+)\.wav", re.IGNORECASE)
_NUM_TEST = 5
# Speech Commands: the official lists of files, and a folder of noise that is not a word
_TEST_LIST, _VALIDATION_LIST = "testing_list.txt", "validation_list.txt"


def detects(tree: Tree) -> bool:
    """Detect a folder with WAV files and without images."""
    path = tree.root
    if not path.is_dir():
        return False
    has_clips = False
    for name in visible_files(path):
        if _is_wav(name):
            has_clips = True
        elif looks_like_image(path, name):  # usually the first file: there may be millions
            return False
    return has_clips


def load(tree: Tree, split: Split) -> Source:
    """List the WAV files of the chosen split below the root, sorted by relative path.

    The classes are the sub-folders, except those whose name begins with an underscore (Speech
    Commands has its noise in one). If all files are in one folder and named
    ``class_speaker_number.wav`` (Free Spoken Digits), the names give the class. Splits of the
    folder's own are those of ``own_splits``. With keywords there are two more classes, see
    ``data_prep.sources.keywords``, and clips not drawn for them are left out.
    """
    path = tree.root
    with needing("speech", f"{path}, a folder of WAV files,"):
        import_module("soundfile")
    chosen = own_split(path, split, _clips) if path.is_dir() else None
    if chosen is None:
        folder = _clips(path)
        chosen = folder if split.name is None else _select(folder, split)
    return chosen if split.keywords is None else _with_keywords(chosen, split)


def _clips(path: Path) -> Source:
    """List all WAV files below a folder."""
    listing = Listing()
    visible = list(visible_files(path, listing)) if path.is_dir() else []
    listing.folders = [name for name in listing.folders if not name.startswith("_")]
    noise = {name for name in visible if "/" in name and name.startswith("_")}
    names = sorted(name for name in visible if _is_wav(name) and name not in noise)
    if not names:
        raise UserError(f"{path} has no WAV files; give the folder that contains the clips.")
    classes, labels = _classes(names)
    items = tuple(file_item(path, name, label) for name, label in zip(names, labels, strict=True))
    others = one_of_each_ending(set(visible).difference(names))
    return Source(
        path,
        items,
        classes,
        len(visible) - len(names),
        ignored=others,
        left_out=tuple(listing.left_out(names)),
        is_audio=True,
    )


def _with_keywords(folder: Source, split: Split) -> Source:
    assert split.keywords is not None
    root, before = folder.root, folder.classes
    classes = keyword_classes(split.keywords, before, root)
    visible = visible_files(root)
    names = sorted(name for name in visible if _is_wav(name) and name.startswith(f"{NOISE}/"))
    noise = pieces(root, [file_item(root, name, -1) for name in names], split)
    return replace(
        folder,
        items=spot(folder.items, before or (), classes, noise, split),
        classes=classes,
        num_ignored=folder.num_ignored - len(names),
    )


def _select(folder: Source, split: Split) -> Source:
    """Keep the chosen split of a folder.

    A data set's own splits are used if it has any. Speech Commands: ``val`` is its
    ``testing_list.txt``, and ``train`` is everything that neither this nor ``validation_list.txt``
    lists. Free Spoken Digits: numbers below 5 are ``val``. Otherwise splits are drawn as for
    images.
    """
    test = _listed(folder.root / _TEST_LIST)
    unused = _listed(folder.root / _VALIDATION_LIST) - test
    rule, digits = _TEST_LIST, _spoken_digits([item.name for item in folder.items])
    if not test and digits is None:
        return folder.drawn(split)
    if not test and digits is not None:
        rule, unused = f"number in the name below {_NUM_TEST}", set()
        pairs = zip(folder.items, digits, strict=True)
        test = {item.name for item, name in pairs if int(name[3]) < _NUM_TEST}
    wanted = split.name != "train"  # the held-out files are both val and test
    items = tuple(
        item for item in folder.items if (item.name in test) == wanted and item.name not in unused
    )
    if not items:
        raise UserError(f"--split {split.name}: {rule} leaves no clip of {len(folder.items)}.")
    return replace(folder, items=items, split_rule=rule)


def _is_wav(name: str) -> bool:
    return name.lower().endswith(".wav")


def _classes(names: list[str]) -> tuple[list[str] | None, list[int]]:
    digits = _spoken_digits(names)
    if digits is None:
        return class_labels(names)
    classes = sorted({name[1] for name in digits})
    return classes, [classes.index(name[1]) for name in digits]


def _spoken_digits(names: list[str]) -> list[re.Match[str]] | None:
    """Return class, speaker and number of each file, if all are in one folder and have them."""
    matches = [_NAMED.fullmatch(name.rpartition("/")[2]) for name in names]
    is_one_folder = len({name.rpartition("/")[0] for name in names}) == 1
    return [name for name in matches if name] if is_one_folder and all(matches) else None


def _listed(path: Path) -> set[str]:
    if not path.is_file():
        return set()
    return set(read_list(path))
