"""Images of a data set in its order: one view each, and what identifies the image."""

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pospre.data.batch_filler import BatchFiller
from pospre.data.decode.decoder import DecodeError, OpenedImage
from pospre.data.loader_options import LoaderOptions
from pospre.data.stores.reader import DamagedSample
from pospre.data.threads import LoaderTiming, Stopwatch, thread_pool
from pospre.data.views.boxes import Crops, box_crops
from pospre.data.views.crop_plan import plan_views
from pospre.data.views.decode_crops import Views, plan_decoding, write_views
from pospre.data.views.options import ViewGroup
from pospre.embedding.settings import Resize
from pospre.errors import UserError
from pospre.evaluation.features import WHOLE, centre_view

_BATCHES_AHEAD = 2
_PROBES = 4
_RULES = {
    "centre": "short side to 256/224 of the size, then the middle",
    "squash": "whole image, resized to the size; its shape is not kept",
    "pad": "whole image, its shape kept, in the middle of a frame of the mean colour",
    "native": "the image's own size, cut to whole patches around its middle",
}


class Row(NamedTuple):
    """One image.

    Attributes:
        pixels: uint8 (C, H, W), or float32 features; None: it cannot be read.
        line: its line of ``images.jsonl``, with ``error`` if it cannot be read.
    """

    pixels: Tensor | None
    line: dict[str, Any]


class Images:
    """The images of a data set.

    Attributes:
        size: (height, width) of a view; with ``native`` the encoder's, which views need not have.
        rule: how an image becomes a view, in words.
        interpolation: of the resizing; empty: nothing is resized.
    """

    def __init__(
        self,
        data: str,
        size: tuple[int, int],
        patch: tuple[int, int],
        resize: Resize,
        fill: Sequence[int],
        num_workers: int | None,
        storage: Mapping[str, Any],
    ) -> None:
        """Open the data set and decode a few of its images.

        Args:
            data: its address.
            size: (height, width) of a view.
            patch: (height, width) of a patch.
            resize: rule for other shapes.
            fill: levels of the colour around a padded image, one per channel.
            num_workers: number of decoding threads.
            storage: access to the data, arguments of ``LoaderOptions``.

        Raises:
            UserError: it cannot be opened, or none of these images can be used.
        """
        self.size, self.resize = size, resize
        self._patch, self._fill = patch, np.array(fill, np.uint8)
        view = centre_view(size)
        if resize != "centre":
            view = ViewGroup(size=size, crop="full", flip_rate=0.0)
        shown_whole = resize == "centre" and max(size) <= WHOLE
        self.rule = _RULES["squash" if shown_whole else resize]
        options = LoaderOptions(
            data,
            batch_size=1,
            views=view,
            shuffle=False,
            drop_last=False,
            tolerance=0.0,
            num_workers=num_workers,
            **storage,
        )
        self.reader, self._threads = options.reader, options.threads
        self._view, self._filler = options.groups[0], BatchFiller(options, LoaderTiming())
        if self.reader.features is not None:
            self.rule = "features, which stay whole"
            if resize not in ("centre", "squash"):
                raise UserError(f"resize={resize} is for images, but {data} holds features.")
        is_whole = self.reader.features is not None or resize == "native"
        self.interpolation = "" if is_whole else self._view.interpolation
        self._probe()

    def _probe(self) -> None:
        indices = np.unique(np.linspace(0, len(self) - 1, _PROBES).astype(int))
        rows = [self.row(int(index)) for index in indices]
        if all(row.pixels is None for row in rows):
            raise UserError(
                f"{self.reader.address}: none of {len(rows)} images can be used "
                f"({rows[0].line['error']}). {self.reader.remedy}"
            )

    def __len__(self) -> int:
        return len(self.reader)

    def batches(self, wanted: Sequence[range]) -> Iterator[list[Row]]:
        """Yield the rows of these batches, decoded ahead by threads."""
        pending = deque[list[Future[Row]]]()
        with thread_pool(self._threads) as pool:
            assert pool is not None
            self.reader.expect(np.array([row for batch in wanted for row in batch], np.int64))
            try:
                for batch in wanted:
                    pending.append([pool.submit(self.row, index) for index in batch])
                    if len(pending) > _BATCHES_AHEAD:
                        yield [task.result() for task in pending.popleft()]
                while pending:
                    yield [task.result() for task in pending.popleft()]
            finally:
                self.reader.close()

    def row(self, index: int) -> Row:
        """Return an image; ``UserError`` if not even the data set can be read."""
        line: dict[str, Any] = {"row": index, "index": index, "path": None, "label": -1}
        try:
            label, path = self.reader.about(index)
            line |= {"path": path or None, "label": label}
            image, sample = self._filler.open(index, Stopwatch())
            pixels, box = self._write(image)
        except (DecodeError, DamagedSample) as error:
            name = self.reader.name(index)
            text = str(error) if isinstance(error, DamagedSample) else f"{name}: {error}"
            return Row(None, {**line, "error": text})
        digest = hashlib.sha256(sample.encoded.numpy().tobytes()).hexdigest()
        sides = {"height": image.height, "width": image.width}
        return Row(pixels, {**line, **sides, "box": box, "sha256": digest})

    def _write(self, image: OpenedImage) -> tuple[Tensor, list[float]]:
        """Return an image's view, and its x0, y0, x1 and y1 in pixels of the upright image."""
        crops, frame = self._crops(image.width, image.height)
        (height, width), (top, left) = crops.scaled[::-1], (0, 0)
        if crops.windows is not None:
            height, width = self.size
        is_image = self.reader.features is None
        shape = (1, height, width, self.reader.decoding.channels if is_image else 1)
        pixels = np.empty(shape, np.uint8 if is_image else np.float32)
        relative = np.empty((1, 4), np.float32)
        views = Views(crops, pixels, self._view.interpolation)
        write_views(
            plan_decoding(image, [views], [relative], self._filler.oversampling), Stopwatch()
        )
        if frame is not None:
            framed = np.empty((*frame, shape[-1]), np.uint8)
            framed[:] = self._fill
            top, left = (frame[0] - height) // 2, (frame[1] - width) // 2
            framed[top : top + height, left : left + width] = pixels[0]
            pixels = framed[None]
        box = _box(crops, (top, left), pixels.shape[1:3])
        return torch.from_numpy(pixels[0]).permute(2, 0, 1), box

    def _crops(self, width: int, height: int) -> tuple[Crops, tuple[int, int] | None]:
        """Return the view of an image, and the frame (height, width) around it, if any."""
        image, (rows, columns) = (width, height), self._patch
        if self.resize == "native":
            down, across = height // rows * rows, width // columns * columns
            if not down * across:
                raise DecodeError(f"it has {width} × {height} pixels, less than a patch")
            box = [(width - across) // 2, (height - down) // 2, across, down]
            return box_crops(np.array([box], np.int64), image, (down, across)), None
        if self.resize == "pad":
            scale = min(self.size[0] / height, self.size[1] / width)
            inner = (max(1, round(height * scale)), max(1, round(width * scale)))
            return box_crops(np.array([[0, 0, *image]], np.int64), image, inner), self.size
        (plan,) = plan_views([self._view], seed=0, epoch=0, index=np.zeros(1))  # nothing is drawn
        return plan.crops(0, *image), None


def _box(crops: Crops, corner: tuple[int, int], shape: tuple[int, ...]) -> list[float]:
    """Return the box of a view of this shape; ``corner`` is where the image begins in it."""
    left, top, width, height = crops.boxes[0].tolist()
    across, down = width / crops.scaled[0], height / crops.scaled[1]  # of a pixel of the view
    y, x = (-each for each in corner)
    if crops.windows is not None:
        x, y = crops.windows[0, :2].tolist()
    box = (left + x * across, top + y * down, left + (x + shape[1]) * across,
           top + (y + shape[0]) * down)  # fmt: skip
    return [round(number, 3) for number in box]
