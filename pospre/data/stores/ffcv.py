"""One .beton file (FFCV's format), read with FFCV's own types and Reader.

FFCV trusts the file: if its writer was killed, it returns samples of arbitrary memory. So the whole
structure is checked when the file is opened, which takes milliseconds per 100,000 samples.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from pospre.data.stores.description import (
    LABELS,
    Identity,
    hash_of,
    hash_of_labels,
    read_sidecar,
    unpack_sums,
)
from pospre.data.stores.files import ByteRange, SampleBytes, read_bytes
from pospre.data.stores.reader import Reader, Sample
from pospre.errors import UserError, to_install

_JPEG, _RAW = 0, 1  # ffcv.fields.rgb_image.IMAGE_MODES
_MAX_FIELDS = 64


class FfcvReader(Reader):
    """Reads the fields ``image`` (RGBImageField, JPEG or raw) and ``label`` (IntField or none)."""

    _bytes: SampleBytes

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = "ffcv"
        self.remedy = (
            f"Copy it again, or convert again with "
            f"`python -m data_prep.convert SRC {path} --format ffcv`."
        )
        self.num_bytes: int = path.stat().st_size
        self._ffcv = import_ffcv(path)
        self._check_header()
        self._open()
        sidecar_path = path.with_name(path.name + ".json")
        self.classes = None
        description = read_sidecar(sidecar_path, "ffcv", len(self), self.remedy)
        if description is not None:
            if description.bytes != self.num_bytes:
                self._refuse(f"has {self.num_bytes} bytes, {sidecar_path.name} says otherwise")
            self.classes, self.noted = description.classes, description.noted
            self.checksums = unpack_sums(description, f"{sidecar_path}", self.remedy)
            if description.labels_sha256 not in (None, hash_of_labels(self._labels)):
                self._refuse(f"is damaged: its labels differ from those in {sidecar_path.name}")
        self._bytes = SampleBytes(self._byte_range)

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> Sample:
        """Return a sample's JPEG bytes (or raw pixels) and label."""
        data = self._bytes.read(index)
        if self._images["mode"][index] == _RAW:
            image = self._images[index]
            data = data.view(int(image["height"]), int(image["width"]), 3)
        return Sample(data, int(self._labels[index]))

    def labels(self) -> Sequence[int]:
        """Return all labels, from memory."""
        return [int(label) for label in self._labels]

    def about(self, index: int) -> tuple[int, str]:
        """Return a sample's label; the file has no names."""
        return int(self._labels[index]), ""

    def _own_identity(self) -> Identity:
        shapes = [self._images[key].tobytes() for key in ("height", "width", "mode")]
        images = hash_of([*shapes, self._sizes.tobytes()])
        return {LABELS: hash_of_labels(self._labels), "sizes of the stored images": images}

    def name(self, index: int) -> str:
        """Return the file and the sample's index."""
        return f"{self.path}, sample {index}"

    def _byte_range(self, index: int) -> ByteRange:
        return ByteRange(self.path, int(self._images["data_ptr"][index]), int(self._sizes[index]))

    def _refuse(self, why: str) -> NoReturn:
        raise UserError(f"{self.path} {why}. {self.remedy}")

    def _check_header(self) -> None:
        """Check the header against the file's size before FFCV follows its pointers."""
        types = self._ffcv.types
        header_type = types.HeaderType
        if self.num_bytes < header_type.itemsize:
            self._refuse("is not a .beton file: it is shorter than a header")
        header = read_bytes(self.path, 0, header_type.itemsize).numpy().view(header_type)[0]
        if header["version"] != types.CURRENT_VERSION:
            self._refuse(
                f"is not a .beton file of version {types.CURRENT_VERSION} (it starts with version "
                f"{header['version']})"
            )
        if not 0 < header["num_fields"] <= _MAX_FIELDS:
            self._refuse(f"is damaged: its header counts {header['num_fields']} fields")
        if header["num_samples"] == 0:
            self._refuse("has no samples")
        table = int(header["alloc_table_ptr"])
        if table == 0:
            self._refuse("was not finished: its writer stopped before the metadata")
        least = self._ffcv.fields.RGBImageField().metadata_type.itemsize
        if int(header["num_samples"]) * least > min(table, self.num_bytes):
            self._refuse(f"is damaged: it counts {header['num_samples']} samples, too many to fit")
        table_bytes = self.num_bytes - table
        if table_bytes <= 0 or table_bytes % types.ALLOC_TABLE_TYPE.itemsize:
            self._refuse("is truncated: its allocation table is not where the header says")

    def _open(self) -> None:
        """Read the metadata with FFCV, and keep image offsets, sizes and labels."""
        try:
            stock = self._ffcv.reader.Reader(str(self.path))
        except (AssertionError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{self.path} has damaged fields ({error}). {self.remedy}") from error
        image, label = stock.handlers.get("image"), stock.handlers.get("label")
        if not isinstance(image, self._ffcv.fields.RGBImageField) or not (
            label is None or isinstance(label, self._ffcv.fields.IntField)
        ):
            fields = {name: type(field).__name__ for name, field in stock.handlers.items()}
            self._refuse(f"has the fields {fields}; needed: image RGBImageField, label IntField")
        if len(stock.metadata) != stock.num_samples:
            self._refuse("is truncated within its metadata")
        columns = dict(zip(stock.field_names, stock.metadata.dtype.names, strict=True))
        self._images = stock.metadata[columns["image"]]
        self._labels = (
            stock.metadata[columns["label"]].reshape(-1)
            if label is not None
            else np.full(len(self._images), -1)
        )
        self._sizes = self._allocated_sizes(stock)

    def _allocated_sizes(self, stock: Any) -> np.ndarray:
        """Find every image in the allocation table; return sizes in bytes, int64 (N,)."""
        data_start = self._ffcv.types.HeaderType.itemsize + stock.field_descriptors.nbytes
        data_start += stock.metadata.nbytes
        data_end = int(stock.header["alloc_table_ptr"])
        table = np.sort(stock.alloc_table, order="ptr")
        pointers = self._images["data_ptr"]
        row = np.minimum(np.searchsorted(table["ptr"], pointers), len(table) - 1)
        sizes = table["size"][row].astype(np.int64)
        pixels = self._images["height"].astype(np.int64) * self._images["width"]
        self.max_pixels = int(pixels.max())
        bad = (
            (table["ptr"][row] != pointers)
            | (pointers < data_start)
            | (pointers + sizes.astype(np.uint64) > data_end)
            | (sizes == 0)
            | (pixels == 0)
            | ~np.isin(self._images["mode"], (_JPEG, _RAW))
            | ((self._images["mode"] == _RAW) & (sizes != 3 * pixels))
        )
        if bad.any():
            self._refuse(
                f"has empty or inconsistent metadata: {int(bad.sum())} of {len(bad)} samples, "
                f"first sample {int(bad.argmax())}, point to no image"
            )
        return sizes


def import_ffcv(path: Path) -> Any:
    """Import FFCV, which needs system libraries; if one is missing, say how to read ``path``."""
    # FFCV sets torch to one thread for the whole program. It fills a numba dict with two names,
    # which takes 2 s to compile; a plain dict suffices, because FFCV reads it in Python
    num_threads = torch.get_num_threads()
    typed: Any = importlib.import_module("numba.typed")
    compiled_dict = typed.Dict
    try:
        typed.Dict = dict
        import ffcv.fields
        import ffcv.reader
        import ffcv.types

        return ffcv
    except (ImportError, OSError) as error:
        raise UserError(
            f"{path} needs FFCV, which cannot be imported here ({error}): "
            f"{to_install('ffcv')}; or use an MDS directory or an image folder."
        ) from error
    finally:
        typed.Dict = compiled_dict
        torch.set_num_threads(num_threads)
