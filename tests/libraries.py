"""Libraries that need more than pip, and are not on every machine."""

from pathlib import Path

import pytest

from pospre.data.stores.ffcv import import_ffcv
from pospre.errors import UserError


def needs_ffcv() -> None:
    """Skip a test, or a module of tests, where FFCV cannot be imported."""
    try:
        import_ffcv(Path("photos.beton"))
    except UserError as error:
        pytest.skip(str(error), allow_module_level=True)
