"""What a checkpoint records of its run, and whether its tensors fit a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pospre.data.stores.identity import Identity
from pospre.errors import UserError
from pospre.run.checkpoints.file import callback_states


def recorded(content: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Return the recipe and the number of samples that a checkpoint's content records."""
    record = callback_states(content)["RecipeRecord"]
    return record["recipe"], record["num_samples"]


def recorded_identity(content: dict[str, Any]) -> Identity:
    """Return what told the data set of a run from others; empty if it records none."""
    found: Identity = callback_states(content)["RecipeRecord"].get("data", {})
    return found


def recorded_fingerprints(content: dict[str, Any]) -> dict[str, str]:
    """Return those of what the environment gave to a recipe, by dotted key; empty without."""
    found: dict[str, str] = callback_states(content)["RecipeRecord"].get("fingerprints", {})
    return found


def compare_tensors(expected: Mapping[str, Tensor], found: Mapping[str, Tensor], name: str) -> None:
    """Raise a ``UserError`` naming the first tensor of ``found`` that does not fit ``expected``."""
    for key, tensor in expected.items():
        if key not in found:
            raise UserError(f"{name} is of another model: it lacks the tensor '{key}'")
        if found[key].shape != tensor.shape:
            raise UserError(
                f"{name} is of another model: tensor '{key}' has shape "
                f"{tuple(found[key].shape)}, the recipe's model wants {tuple(tensor.shape)}"
            )
    for key in found:
        if key not in expected:
            raise UserError(
                f"{name} is of another model: its tensor '{key}' is not in the recipe's model"
            )
