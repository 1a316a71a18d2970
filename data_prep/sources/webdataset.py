"""WebDataset: tars in which a sample's files share a name (0001.jpg, 0001.cls, 0001.json)."""

import re
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from data_prep.files.archives import Entry, tar_entries
from data_prep.files.tree import Tree, files_below
from data_prep.sources._labels import RawLabel, class_names, label_of, labels_of
from data_prep.sources.source import Item, Source, image_item, one_of_each_ending
from data_prep.splits import Split, files_of
from pospre.errors import UserError
from pospre.text_lists import decode_text
from pospre.untrusted_json import parse_json

_IMAGES = ("jpg", "jpeg", "png", "webp", "ppm", "pgm", "bmp", "tif", "tiff")
_ABOUT = ("cls", "json")
_JSON_LABELS = ("label", "cls", "class")
_PEEK = 20


def detects(tree: Tree) -> bool:
    """Detect by the first files of the first tar: an image and another file of the same name."""
    tars = tree.shallow(".tar")
    if not tars or re.match(r"ILSVRC|n\d{8}", tars[0].name):
        return False
    try:
        samples = _samples(tars[0], tar_entries(tars[0], limit=_PEEK))
    except UserError:
        return False
    return any(_image(files) and len(files) > 1 for files in samples.values())


def load(tree: Tree, split: Split) -> Source:
    """List the samples of the chosen split's tars; labels are in ``.cls``, else in ``.json``."""
    tars = files_below(tree.root, ".tar")
    bar = tqdm(tars.items(), unit="file", desc="index", disable=None)
    shards = [_Shard(path, name) for name, path in bar]
    # the classes of all splits, so that labels have the same meaning in each
    classes = class_names((label for shard in shards for label in shard.labels), tree.root)
    chosen, rule = files_of(split, shards, tree.root)
    items = tuple(item for shard in chosen for item in shard.items(classes))
    others = [name for shard in chosen for name in shard.others]
    examples = one_of_each_ending(others)
    return Source(tree.root, items, classes, len(others), rule, ignored=examples).drawn(split)


class _Shard:
    """A tar: its samples with an image, their labels, and ``others``, names of unused files."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        samples = _samples(path, tar_entries(path))
        self.samples = {key: files for key, files in samples.items() if _image(files)}
        self.labels = [self._label(key, files) for key, files in self.samples.items()]
        self.others = [
            f"{name}/{entry.name}"
            for key, files in samples.items()
            for kind, entry in files.items()
            if key not in self.samples or kind not in (_image(files), *_ABOUT)
        ]

    def items(self, classes: list[str] | None) -> Iterator[Item]:
        """Yield the samples as items."""
        labels = labels_of(classes)
        for (key, files), raw in zip(self.samples.items(), self.labels, strict=True):
            kind = _image(files)
            label = label_of(raw, labels, f"{self.path}: sample {key}")
            yield image_item(files[kind], f"{self.name}/{key}.{kind}", label)

    def _label(self, key: str, files: dict[str, Entry]) -> RawLabel:
        where = f"{self.path}: sample {key}"
        if "cls" in files:
            try:
                text = decode_text(files["cls"].location.read()).strip()
            except ValueError as error:
                raise UserError(f"{where} has an invalid .cls: {error}.") from error
            return int(text) if re.fullmatch(r"-?\d{1,18}", text) else text
        if "json" not in files:
            return None
        try:
            content = parse_json(files["json"].location.read())
        except ValueError as error:
            raise UserError(f"{where} has an invalid .json: {error}.") from error
        if not isinstance(content, dict):
            raise UserError(f"{where} has a .json that is not an object.")
        label = next((content[name] for name in _JSON_LABELS if name in content), None)
        if label is not None and not isinstance(label, int | str):
            raise UserError(f"{where}: its label is {label!r}, not a number or a name.")
        return label


def _samples(path: Path, entries: list[Entry]) -> dict[str, dict[str, Entry]]:
    """Group files by name: the extension begins at the first dot after the last slash."""
    samples: dict[str, dict[str, Entry]] = {}
    for entry in entries:
        folder, slash, name = entry.name.rpartition("/")
        key, _, extension = name.partition(".")
        sample = samples.setdefault(folder + slash + key, {})
        if sample.setdefault(extension.lower(), entry) is not entry:
            raise UserError(f"{path} has {entry.name} twice; each sample needs its own name.")
    return samples


def _image(files: dict[str, Entry]) -> str:
    """Return the extension of a sample's image, or an empty text."""
    return next((kind for kind in _IMAGES if kind in files), "")
