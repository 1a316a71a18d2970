"""Reading files of a folder that another person may have filled."""

import os
import stat
from pathlib import Path


def read_inside(folder: Path, path: Path, limit: int) -> bytes:
    """Return the content of a file in ``folder`` or below.

    Args:
        folder: may be reached by links.
        path: of the file.
        limit: largest size in bytes.

    Raises:
        ValueError: it lies outside of ``folder`` (a link), is no regular file (a pipe or device
            may block or never end), is larger than ``limit``, or cannot be read.
    """
    try:
        if not path.resolve(strict=True).is_relative_to(folder.resolve()):
            raise ValueError("it is a link to outside of the folder")
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would block here
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is not a regular file")
            if status.st_size > limit:
                raise ValueError(f"its {status.st_size} bytes are more than {limit}")
            return file.read(limit)
    except (OSError, RuntimeError) as error:  # a circle of links is a RuntimeError
        raise ValueError(f"it cannot be read: {error}") from error
