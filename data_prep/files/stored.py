"""Sources whose images are files of their own, in a folder or an archive."""

import io
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from PIL import Image

from data_prep.files.archives import Entry
from data_prep.files.places import Place
from data_prep.sources.source import DamagedItem, Item, Source


@dataclass(frozen=True, slots=True)
class Stored:
    """Where an item's image lies, and what is known about it.

    Attributes:
        image: its place.
        about: the annotation: a JSON object as bytes, the place of it or of a PNG, or None.
    """

    image: Place
    about: Place | bytes | None = None


@dataclass(frozen=True)
class StoredSource(Source):
    """A source whose items have a ``Stored`` as their place."""

    def read(self, item: Item) -> bytes:
        """Return the image as it is stored."""
        image: Place = item.place.image
        return image.read()


@dataclass(frozen=True)
class MaskSource(StoredSource):
    """Images with PNG masks."""

    annotation: ClassVar[str | None] = "png"

    def annotate(self, item: Item) -> bytes | None:
        """Return the mask as it is stored: same size, values and palette."""
        mask: Place | None = item.place.about
        return None if mask is None else mask.read()


@dataclass(frozen=True)
class JsonSource(StoredSource):
    """Images with JSON objects."""

    annotation: ClassVar[str | None] = "json"

    def annotate(self, item: Item) -> bytes | None:
        """Return the JSON object, with the ``width`` and ``height`` of the original image."""
        about: Place | bytes | None = item.place.about
        if about is None:
            return None
        try:
            content = json.loads(about if isinstance(about, bytes) else about.read())
        except ValueError as error:
            raise DamagedItem(f"its annotation is no JSON: {error}") from error
        if not isinstance(content, dict):
            raise DamagedItem("its annotation is no JSON object")
        if not {"width", "height"} <= content.keys():
            content["width"], content["height"] = _size(self.read(item))
        return compact(content)


def stored_item(entry: Entry, name: str, label: int, about: Entry | bytes | None = None) -> Item:
    """Return the item of an image file; its stamp changes with the file ``about`` it as well."""
    if not isinstance(about, Entry):  # bytes come from a list, which has a stamp of its own
        return Item(name, label, entry.size, entry.stamp, Stored(entry.place, about))
    stamp = f"{entry.stamp} {about.stamp} {about.size}"
    return Item(name, label, entry.size, stamp, Stored(entry.place, about.place))


def compact(content: dict[str, Any]) -> bytes:
    """Return an object as JSON without spaces, its keys in the order given."""
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()


def _size(data: bytes) -> tuple[int, int]:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except Exception as error:  # Pillow raises nearly every kind on damaged bytes
        raise DamagedItem(f"its size cannot be read: {error}") from error
