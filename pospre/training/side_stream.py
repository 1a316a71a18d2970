"""A second queue of a GPU: it copies and draws the next batch beside the step that it computes."""

from collections.abc import Callable

import torch

from pospre.batch import Batch


class SideStream:
    """Runs functions that make a batch beside the main stream; on CPUs it calls them.

    It does not wait for the main stream, so a function must not read what that stream computes. The
    main stream waits for the batch; the CPU waits for neither.

    Args:
        device: that of the batches, ``cuda`` or ``cpu``.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream()

    def __call__(self, make: Callable[[], Batch]) -> Batch:
        """Return the batch that ``make`` returns, ready for the main stream."""
        main = self._device.current_stream()
        with self._device.stream(self._stream):
            batch = make()
        main.wait_stream(self._stream)
        for value in batch.values():
            if value.is_cuda:  # its memory is not used again before the main stream is done with it
                value.record_stream(main)
        return batch
