"""What is in a checkpoint: the recipe of its run, and a model that fits it."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

from pospre.data.stores.identity import Identity
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe, recorded_recipe
from pospre.training.build import build_model
from pospre.training.checkpoints.file import callback_states
from pospre.training.checkpoints.reading import Checkpoint, open_checkpoint
from pospre.training.resolve import resolve

Weights = Literal["student", "teacher"]


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


def load_model(
    uri: str, *, initial: bool = False, weights: Weights = "student"
) -> tuple[PretrainModel, Recipe]:
    """Return the model of a checkpoint, in eval mode on the CPU, and its recipe.

    Args:
        uri: a checkpoint file, a folder of them or a run folder (the newest counts), local or S3.
        initial: give the same model with the random weights of its seed, before any training.
        weights: ``teacher`` puts the teacher's weights where the trained ones are.

    Raises:
        UserError: no such checkpoint, the file is damaged or of another model, or it has no
            teacher.
    """
    return model_of(open_checkpoint(str(uri)), initial=initial, weights=weights)


def model_of(
    checkpoint: Checkpoint, *, initial: bool = False, weights: Weights = "student"
) -> tuple[PretrainModel, Recipe]:
    """Do what ``load_model`` does, with a checkpoint that was read already."""
    uri, content = checkpoint.uri, checkpoint.content
    recipe = resolve(recorded_recipe(recorded(content)[0], source=f"recipe in {uri}"))
    model = build_model(recipe)
    if not initial:
        found = content["state"]["model"]
        compare_tensors(model.state_dict(), found, uri)
        model.load_state_dict(found)
    if weights == "teacher":
        _take_teacher(model, uri)
    return model.eval(), recipe


def _take_teacher(model: PretrainModel, name: str) -> None:
    """Give every trained module that has a teacher its teacher's weights."""
    if model.teacher is None:
        raise UserError(
            f"{name} was trained without a teacher; leave out --weights teacher (the algorithm "
            "ema_teacher keeps one)"
        )
    for student, teacher in model.teachers.pairs:
        student.load_state_dict(teacher.state_dict())
