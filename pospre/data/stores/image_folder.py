"""What a folder contains: images, in which order, of which classes, and what is left out."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from PIL import Image

from pospre.data.decode.formats import RAW, foreign_format, own_format
from pospre.data.stores.files import is_added, is_hidden, odd_file, refuse_unlisted
from pospre.errors import UserError

# formats that Pillow lists but cannot read by itself (stubs, or a foreign program is needed)
_UNREADABLE_FORMATS = frozenset({"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"})

# raw files of cameras; many are TIFFs, of which Pillow would read the thumbnail
_RAW = re.compile(
    r".+\.(?:3fr|arw|cr2|cr3|dcr|dng|erf|fff|gpr|iiq|kdc|mef|mos|mrw|nef|nrw|orf|pef|raf|rw2|rwl"
    r"|sr2|srf|srw|x3f)",
    re.IGNORECASE,
)
# further pictures, of which Pillow reads some with a plug-in
_FOREIGN_ENDINGS = (".heic", ".heif", ".hif", ".jxl", ".exr", ".dcm")

ARRAYS = ".npy"

_NUM_START = 1024
_NUM_NAMED = 8  # classes


@dataclass
class Listing:
    """The visible files of a folder, and what was left out; filled by ``visible_files``.

    Attributes:
        images: paths of the images, relative, with forward slashes, sorted.
        others: paths of the other visible files.
        folders: names of the visible folders directly in it, sorted.
        added: files and folders that systems, editors and cameras have added; not searched.
        again: links to folders that were already read.
    """

    images: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)

    def left_out(self, used: Sequence[str]) -> list[str]:
        """Say what is not used that may be missed, one line a kind, if the files ``used`` are."""
        stray = [name for name in used if "/" not in name]
        filled = {name.split("/", 1)[0] for name in used}
        empty = [name for name in self.folders if name not in filled]
        kinds = {
            "skipped what systems, editors or cameras add": self.added,
            "skipped links to folders that are already read": self.again,
            "skipped pictures that Pillow cannot read": [n for n in self.others if _is_foreign(n)],
            "folders that are no classes, as they are empty or hold other files": (
                [] if stray else empty
            ),
            "images beside the sub-folders, so these are no classes and all labels are -1": (
                stray if len(stray) < len(used) else []
            ),
        }
        return [
            f"{what} ({len(names)}): {_first_of(names)}" for what, names in kinds.items() if names
        ]


def list_folder(root: Path) -> Listing:
    """List the images below a folder.

    A file counts if its extension belongs to a format that Pillow reads, or its first bytes are
    those of a common image format. If there are none, ``.npy`` files count: arrays (H, W), (H, W,
    C) or (C, H, W). Hidden files and folders are ignored, and those that systems, editors and
    cameras add; links are followed.

    Raises:
        UserError: there is no image, or a folder cannot be read.
    """
    listing = Listing()
    for name in visible_files(root, listing):
        (listing.images if looks_like_image(root, name) else listing.others).append(name)
    if not listing.images:
        listing.images = [name for name in listing.others if name.lower().endswith(ARRAYS)]
        listing.others = [name for name in listing.others if not name.lower().endswith(ARRAYS)]
    if not listing.images:
        seen = ""
        if listing.others:
            named = explained(root, min(listing.others))
            seen = f" ({len(listing.others)} other files, for instance {named})"
        raise UserError(
            f"{root} has no images{seen}; give a folder of JPEG, PNG … files (in class "
            "sub-folders or flat), a .beton file or an MDS directory."
        )
    listing.images.sort()
    return listing


def list_images(root: Path) -> list[str]:
    """Return the images below a folder; see ``list_folder``."""
    return list_folder(root).images


def class_labels(names: list[str]) -> tuple[list[str] | None, list[int]]:
    """Return the class names and the label of every image.

    The classes are the sorted top-level sub-folders, and a label is an index among them. If an
    image is outside the sub-folders, there are no classes (None) and all labels are −1.
    """
    if any("/" not in name for name in names):
        return None, [-1] * len(names)
    folders = [name.split("/", 1)[0] for name in names]
    classes = sorted(set(folders))
    labels = {name: label for label, name in enumerate(classes)}
    return classes, [labels[folder] for folder in folders]


def describe_classes(classes: Sequence[str], labels: Sequence[int]) -> str:
    """Name classes, with the number of their samples if the labels are known."""
    counts = Counter(labels)
    named = [f"{name} ({counts[label]})" if labels else name for label, name in enumerate(classes)]
    if len(named) > _NUM_NAMED:
        named = [*named[: _NUM_NAMED - 1], "…", named[-1]]
    return ", ".join(named)


def visible_files(root: Path, listing: Listing | None = None) -> Iterator[str]:
    """Yield the relative path of each visible file, and note in ``listing`` what is passed over.

    Of several links to one folder, each is followed if they are (in) different folders of the root,
    such as classes. A link to a folder above it is not followed.

    Raises:
        UserError: a folder cannot be read.
    """
    listing = listing or Listing()
    seen: dict[str, set[str]] = {}  # per folder of the root
    top = os.path.realpath(root)
    for folder, subfolders, names in os.walk(root, onerror=refuse_unlisted, followlinks=True):
        relative = Path(folder).relative_to(root).as_posix()
        prefix = "" if relative == "." else f"{relative}/"
        real, visited = os.path.realpath(folder), seen.setdefault(prefix.split("/")[0], {top})
        if real in visited and prefix:
            listing.again.append(relative)
            subfolders.clear()
            continue
        visited.add(real)
        listing.added += (prefix + name for name in (*subfolders, *names) if is_added(name))
        subfolders[:] = sorted(n for n in subfolders if not (is_hidden(n) or is_added(n)))
        if not prefix:
            listing.folders += subfolders
        yield from (prefix + n for n in names if not (is_hidden(n) or is_added(n)))


def _first_of(names: Sequence[str]) -> str:
    return min(names) if len(names) == 1 else f"{min(names)} and {len(names) - 1} more"


@cache
def _image_extensions() -> frozenset[str]:
    Image.init()
    return frozenset(
        extension
        for extension, name in Image.registered_extensions().items()
        if name in Image.OPEN and name not in _UNREADABLE_FORMATS
    )


def looks_like_image(root: Path, name: str) -> bool:
    """Return whether a file is an image, by its extension or else by its first bytes.

    Raises:
        UserError: these cannot be read; a broken link may stand for a folder of images.
    """
    if _is_raw(name):
        return False
    if os.path.splitext(name)[1].lower() in _image_extensions():  # fast: there may be millions
        return True
    try:
        return own_format(_start(root / name)) is not None
    except OSError as error:
        refuse_unlisted(error)


def explained(root: Path, name: str) -> str:
    """Return a file's name, and its format if it is known but cannot be read."""
    what = odd_file(root / name) or foreign_format(file_start(root / name))
    if what is None and _is_raw(name):
        what = RAW
    return name if what is None else f"{name}: {what}"


def _is_raw(name: str) -> bool:
    return _RAW.fullmatch(name) is not None


def _is_foreign(name: str) -> bool:
    return _is_raw(name) or name.lower().endswith(_FOREIGN_ENDINGS)


def file_start(path: Path) -> bytes:
    """Return a file's first kilobyte; empty if it cannot be read or is not a regular file."""
    try:
        return _start(path)
    except OSError:
        return b""


def _start(path: Path) -> bytes:
    if odd_file(path) is not None:
        return b""
    with path.open("rb", buffering=0) as file:
        return file.read(_NUM_START)
