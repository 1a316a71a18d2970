"""Loads the model of a checkpoint."""

from typing import Literal

from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.recipe.recipe import Recipe, recorded_recipe
from pospre.run.checkpoints.reading import Checkpoint, open_checkpoint
from pospre.run.resume import recorded
from pospre.run.same_run import compare_tensors
from pospre.training.build import build_model
from pospre.training.resolve import resolve

Weights = Literal["student", "teacher"]


def load_model(
    uri: str, *, initial: bool = False, weights: Weights = "student"
) -> tuple[PretrainModel, Recipe]:
    """Return the model of a checkpoint, in eval mode on the CPU, and its recipe.

    Args:
        uri: a checkpoint, a folder of them or a run folder (the newest counts), local or S3.
        initial: return the same model with its initial random weights instead.
        weights: ``teacher`` loads the teacher's weights in the place of the trained ones.

    Raises:
        UserError: no such checkpoint, the file is damaged or of another model, or it has no
            teacher.
    """
    return model_of(open_checkpoint(str(uri)), initial=initial, weights=weights)


def model_of(
    checkpoint: Checkpoint, *, initial: bool = False, weights: Weights = "student"
) -> tuple[PretrainModel, Recipe]:
    """Do the same as ``load_model`` for a checkpoint that is already in memory."""
    uri, content = checkpoint.uri, checkpoint.content
    recipe = resolve(recorded_recipe(recorded(content).recipe, source=f"recipe in {uri}"))
    model = build_model(recipe)
    if not initial:
        found = content["state"]["model"]
        compare_tensors(model.state_dict(), found, uri)
        model.load_state_dict(found)
    if weights == "teacher":
        _take_teacher(model, uri)
    return model.eval(), recipe


def _take_teacher(model: PretrainModel, name: str) -> None:
    """Load the teacher's weights into every trained module that has a teacher."""
    if model.teacher is None:
        raise UserError(
            f"{name} was trained without a teacher; leave out --weights teacher (the algorithm "
            "ema_teacher keeps one)"
        )
    for student, teacher in model.teachers.pairs:
        student.load_state_dict(teacher.state_dict())
