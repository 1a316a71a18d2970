"""The stages of a recipe, and the optimiser and schedule that follow them."""

from torch.optim import Optimizer

from pospre.data.loader import ViewLoader
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.stages import Stages
from pospre.nn.encoder_interface import PatchEncoder
from pospre.recipe.inputs import Encoder
from pospre.recipe.recipe import Recipe
from pospre.recipe.sections import Stage
from pospre.schedules import duration_steps
from pospre.training.optimizer.optim import build_optimizer
from pospre.training.optimizer.schedule import StepSchedule, build_schedule

_NEW = {"fit": "positions.", "fade": "positions.new."}
"""Where the tensors of an encoder are that no weights give, by ``encoder.keep``."""


def build_rates(
    recipe: Recipe, loader: ViewLoader, model: PretrainModel, stages: Stages | None
) -> tuple[Optimizer, StepSchedule]:
    """Return the optimiser, which holds all tensors that train in some stage, and its schedule."""
    batch_size, options = recipe.data.batch_size, recipe.optimizer
    if recipe.encoder.keep is not None:  # decay would take back what was fitted
        undecayed = (*options.no_decay, "encoder.positions.")
        options = options.model_copy(update={"no_decay": undecayed})
    optimizer = build_optimizer(model, options, batch_size=batch_size, stages=stages)
    schedule = build_schedule(
        optimizer,
        recipe.schedule,
        rates=recipe.optimizer,
        max_duration=recipe.trainer.max_duration,
        steps_per_epoch=len(loader),
        batch_size=batch_size,
        stages=stages,
    )
    return optimizer, schedule


def build_stages(model: PretrainModel, recipe: Recipe, steps_per_epoch: int) -> Stages | None:
    """Return the stages of a recipe as if it began; None if it has neither them nor LoRA."""
    if not recipe.stages and recipe.lora is None:
        return None
    is_frozen = recipe.lora is not None or not all(stage.train.all for stage in recipe.stages)
    if is_frozen and recipe.encoder.weights is None:
        key = "stages" if recipe.stages else "lora"
        raise UserError(
            f"{key}: parts of the encoder are frozen, but encoder.weights is null, and all weights "
            f"are random. Give the weights to continue from, or remove {key}"
        )
    batch_size = recipe.data.batch_size
    total_steps = duration_steps(
        recipe.trainer.max_duration, steps_per_epoch=steps_per_epoch, batch_size=batch_size
    )
    return Stages(
        model,
        recipe.stages or [Stage()],
        total_steps=total_steps,
        steps_per_epoch=steps_per_epoch,
        batch_size=batch_size,
        fresh=_expected_fresh(model.encoder, recipe.encoder),
    )


def _expected_fresh(encoder: PatchEncoder, options: Encoder) -> list[str]:
    """Return timm's names of the tensors that weights will not give, as far as a recipe tells."""
    starts = [_NEW[options.keep]] if options.keep else []
    starts += ["reg_token", "register_gate"] if options.gated_registers else []
    names = [name for name, _ in encoder.named_parameters() if name.startswith(tuple(starts))]
    return list(map(encoder.timm_name_of, names))
