"""The content of a checkpoint, read from the bytes of its files without executing any of them."""

import io
import pickle
from collections.abc import Mapping
from typing import Any

from pospre.errors import UserError
from pospre.run.checkpoints import tensors, torch_file
from pospre.run.checkpoints.files import METADATA, REST, DamagedCheckpoint, verify


def assemble(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the whole content of a checkpoint, on the CPU.

    Args:
        files: the manifest, and every file that it lists.
        name: of the checkpoint, for errors.

    Raises:
        DamagedCheckpoint: a file differs from what was written, or holds more than plain data.
        UserError: it is no checkpoint of this package.
    """
    verify(files, name)
    content = _rest(files[REST], f"{name}/{REST}")
    try:
        for key, tensor in tensors.load(files).items():
            *path, last = key.split("/")
            place = content["state"]
            for step in path:
                place = place.setdefault(step, {})
            place[last] = tensor
    except (ValueError, TypeError, AttributeError) as error:
        raise DamagedCheckpoint(
            f"{name} is damaged, or its {METADATA} holds more than what describes tensors "
            "(nothing in it was executed)"
        ) from error
    return content


def _rest(data: bytes, name: str) -> dict[str, Any]:
    """Return everything but the tensors of the model and the optimiser."""
    try:
        content = torch_file.load(io.BytesIO(data))
    except pickle.UnpicklingError as error:
        raise DamagedCheckpoint(
            f"{name} is of no checkpoint of pospre.train: it holds more than plain data and "
            f"tensors ({error}; nothing in it was executed)"
        ) from error
    except ValueError as error:
        raise DamagedCheckpoint(f"{name} is damaged ({error})") from error
    if not isinstance(content, dict) or "RecipeRecord" not in callback_states(content):
        raise UserError(f"{name} is of no checkpoint of pospre.train (it holds no recipe)")
    return content


def callback_states(content: dict[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks in a checkpoint's content."""
    state = content.get("state")
    return state.get("callbacks", {}) if isinstance(state, dict) else {}
