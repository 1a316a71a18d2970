"""The sections of a recipe: constructor arguments under the same names, with their bounds.

Options of the encoder, the loader and its views are declared with their code, and inherited here.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pospre.arguments import Section
from pospre.data.reading import Reading
from pospre.data.views import options
from pospre.nn.encoder_options import EncoderOptions
from pospre.recipe.values import (
    AllOrSome,
    Betas,
    Duration,
    DurationOrAuto,
    LocalOrS3,
    Numbers,
    PlainPath,
    PositiveDuration,
    PositiveNumbers,
)


# mypy does not see that sections are frozen, like these options
class RandAugment(Section, options.RandAugment):  # type: ignore[misc]
    """See there."""


class Augment(Section, options.Augment):  # type: ignore[misc]
    """Changes of a view in training."""

    rand_augment: RandAugment | None = None


class View(Section, options.ViewOptions):  # type: ignore[misc]
    """A group of views; the default size is the encoder's."""

    augment: Augment = Augment()


class Data(Section, Reading):
    """The images, and the groups of views cropped from each, by name."""

    path: str
    batch_size: int = Field(gt=0, description="samples per step, over all ranks")
    views: dict[str, View] = Field(default={"view": View()}, min_length=1)
    mean: Numbers | None = Field(
        default=None,
        description="for normalisation; None: the data set's own, that of encoder.weights, or "
        "ImageNet's",
    )
    std: PositiveNumbers | None = None


class Encoder(Section, EncoderOptions):
    """The encoder, and the weights to start from, which may also say what it is."""

    name: str = ""
    weights: str | None = Field(
        default=None,
        description="run folder, checkpoint, or a file of weights: ours, timm's, MAE's, DINOv2's, "
        "I-JEPA's, …; local or s3://; FILE,positions=none if it was trained without positions, "
        "FILE,positions=drop to leave them out. Without a name, keys that the section leaves out "
        "are as in these weights",
    )
    weights_from: Literal["student", "teacher"] = Field(
        default="student", description="which encoder of a file: the trained one, or its EMA"
    )

    @model_validator(mode="after")
    def _is_named(self) -> Self:
        if not self.name and self.weights is None:
            words = "a section with name, such as vitb16, or with weights, which show the encoder"
            raise PydanticCustomError("range", words)
        return self

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``build_encoder``."""
        return self.model_dump(exclude={"weights", "weights_from"})


class Optimizer(Section):
    """The optimiser; its peak rate is ``base_lr`` × ``data.batch_size`` / ``lr_batch``."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    base_lr: float = Field(default=1.5e-4, gt=0)
    lr_rule: Literal["linear", "sqrt", "none"] = Field(
        default="linear", description="how the rate scales with the batch; none: base_lr unchanged"
    )
    lr_batch: int = Field(default=256, gt=0, description="reference batch size of base_lr")
    betas: Betas = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(default=0.05, ge=0)
    weight_decay_end: float | None = Field(
        default=None, ge=0, description="half a cosine from weight_decay to this; None: constant"
    )
    no_decay: Annotated[tuple[str, ...], Field(strict=False)] = Field(
        default=(), description="parts of parameter names without weight decay; vectors never decay"
    )
    layer_decay: float | None = Field(
        default=None, gt=0, le=1, description="rate factor from each block to the one below"
    )
    patch_embed_lr: float = Field(
        default=1.0, ge=0, description="rate factor of the patch embedding"
    )


class Schedule(Section):
    """The learning rate per step: a warm-up from ``start_lr``, then the schedule ``name``.

    ``cosine``: half a cosine down to ``min_lr``. ``multistep``: × ``gamma`` at each of
    ``milestones``. ``step``: × ``gamma`` after every ``every``, and the warm-up holds ``start_lr``.
    ``constant``: the peak.
    """

    name: Literal["cosine", "multistep", "step", "constant"] = "cosine"
    warmup: Duration = "10ep"
    start_lr: float = Field(default=0.0, ge=0)
    min_lr: float = Field(default=0.0, ge=0)
    milestones: Annotated[tuple[PositiveDuration, ...], Field(strict=False)] = Field(
        default=(), description="counted from the start of training"
    )
    every: PositiveDuration | None = None
    gamma: float = Field(default=0.1, gt=0, le=1)
    length: PositiveDuration | None = Field(
        default=None, description="end of the cosines; None: trainer.max_duration"
    )
    fix_after: PositiveDuration | None = Field(
        default=None, description="rate and weight decay stay constant from here on"
    )
    unit: Literal["step", "epoch"] = Field(
        default="step", description="epoch: all steps of an epoch use the values of its first step"
    )
    offset: int = Field(
        default=0,
        description="units by which the schedule is ahead: 1 if the published scheduler steps "
        "before the optimiser (I-JEPA), -1 if it gets the unit just finished (timm)",
    )
    warmup_prefix: bool = Field(
        default=True,
        description="the cosine starts after the warm-up; false: at 0 (timm's default)",
    )
    warmup_endpoint: bool = Field(
        default=False,
        description="the last step of the warm-up has the peak, not the one after it (DINOv2)",
    )
    scale_floors: bool = Field(
        default=True,
        description="layer_decay and patch_embed_lr also scale start_lr and min_lr (MAE); false: "
        "these are the same for all parameters (timm)",
    )


class Fsdp(Section):
    """Options of FSDP2; checkpoints have the same content for any number of ranks."""

    shard_degree: int | None = Field(
        default=None,
        gt=0,
        description="ranks that share one copy of the model; groups of ranks have their own copies "
        "(hybrid sharding); None: all ranks share one",
    )
    reshard_after_forward: bool = True
    mixed_precision: Literal["FULL", "DEFAULT", "PURE"] = Field(
        default="FULL",
        description="FULL: only autocast casts; the others also cast all floats of the batch, "
        "including crop boxes and noise",
    )


class ClipGrad(Section):
    """Gradient clipping by a norm.

    ``norm``: over all parameters. ``per_tensor``: of each tensor separately, as in DropPos's code.
    ``per_module``: of the encoder and of each head separately, as in DINOv2's.
    """

    mode: Literal["norm", "per_tensor", "per_module"] = "norm"
    threshold: float = Field(gt=0)


class Trainer(Section):
    """Duration, device, speed, and output of the training."""

    max_duration: PositiveDuration
    precision: Literal["auto", "fp32", "amp_bf16", "amp_fp16"] = Field(
        default="auto",
        description="auto: amp_bf16 if the device computes in bf16 (GPUs since Ampere, CPUs "
        "with AVX-512-BF16), else fp32",
    )
    residual: Literal["auto", "fp32", "bf16"] = Field(
        default="auto",
        description="precision of the tokens between blocks under amp_bf16; auto: the method's "
        "(bf16 with dinov2, else fp32)",
    )
    attention: Literal["auto", "cudnn"] = Field(
        default="auto",
        description="cudnn: GPUs compute attention by cuDNN where it can; auto: by torch's choice",
    )
    float8: bool = Field(
        default=False,
        description="blocks multiply in 8 bits, on GPUs since Hopper and Ada; for large models",
    )
    device: Literal["auto", "cpu", "gpu"] = "auto"
    run_folder: PlainPath = "runs"
    overwrite: bool = False
    save_folder: LocalOrS3 | None = None
    hours_between_failures: float | None = Field(
        default=None,
        gt=0,
        description="mean of one node, with preemptions; for save_interval: auto",
    )
    save_interval: DurationOrAuto = Field(
        default="1ep",
        description="auto: from hours_between_failures and the measured cost of a save",
    )
    keep_checkpoints: AllOrSome = Field(default=3, description="local ones kept; -1 keeps all")
    keep_remote: AllOrSome = Field(
        default=-1, description="checkpoints kept in the bucket of save_folder; -1 keeps all"
    )
    keep_best: str | None = Field(
        default=None, description="figure measured during training: EVALUATION/FIGURE, as knn/top1"
    )
    autoresume: bool = True
    microbatch_size: Annotated[int, Field(gt=0)] | Literal["auto"] | None = Field(
        default=None,
        description="samples of a rank's batch that are on the device at once; auto: as many as "
        "fit, determined before the first step; None: all",
    )
    activation_checkpointing: bool | Literal["offload"] = Field(
        default=False,
        description="true: recompute blocks from their inputs in the backward pass; offload: also "
        "keep these inputs in CPU memory",
    )
    compile: bool | Literal["auto", "blocks"] = Field(
        default="auto",
        description="true: the step with its losses as one graph; blocks: every block separately; "
        "auto: on GPUs the step, under FSDP2 the blocks, on CPUs nothing",
    )
    fsdp: Fsdp | None = None
    clip_grad: ClipGrad | None = None
    log_interval: int = Field(default=10, gt=0, description="steps between lines of metrics.jsonl")
    progress_bar: bool = True
    dist_timeout: float = Field(default=300.0, gt=0, description="seconds for a collective call")
    rendezvous_timeout: float = Field(
        default=60.0, gt=0, description="seconds in which all ranks must connect"
    )
    peer_timeout: float = Field(
        default=120.0, ge=5, description="seconds of silence after which a rank counts as lost"
    )

    @field_validator("save_interval")
    @classmethod
    def _knows_failures(cls, interval: str, others: ValidationInfo) -> str:
        if interval == "auto" and others.data.get("hours_between_failures", 0) is None:
            raise PydanticCustomError(
                "failures",
                "Input should be a duration such as 1ep, or auto with trainer."
                "hours_between_failures: the mean of one node, with preemptions",
            )
        return interval


class LossSpikes(Section):
    """Arguments of ``pospre.training.callbacks.bad_steps.LossSpikes``."""

    action: Literal["warn", "stop"] = "warn"
    window: int = Field(default=100, ge=10, description="steps that a loss is compared with")
    factor: float = Field(default=10.0, gt=0, description="deviations above their median")


class Collapse(Section):
    """Arguments of ``pospre.training.callbacks.watchers.Collapse``."""

    every: int = Field(default=100, gt=0, description="steps between checks")
    share: float = Field(default=0.1, gt=0, lt=1, description="minimal share of the initial value")


class PositionShortcut(Section):
    """Arguments of ``pospre.training.callbacks.watchers.PositionShortcut``."""

    every: int = Field(default=200, gt=0, description="steps between checks")


class Stalls(Section):
    """Arguments of ``pospre.training.callbacks.stalls.Stalls``."""

    loader_share: float = Field(default=0.3, gt=0, lt=1, description="maximal share of the time")
    patience: float = Field(default=60.0, gt=0, description="seconds above it before the warning")
    silence: float = Field(default=120.0, gt=0, description="seconds without a finished step")


class Callbacks(Section):
    """Monitoring of a run, besides the stop at a loss that is not finite; null turns one off."""

    loss_spikes: LossSpikes | None = LossSpikes()
    collapse: Collapse | None = Collapse()
    position_shortcut: PositionShortcut | None = PositionShortcut()
    stalls: Stalls | None = Stalls()
    gradient_norms: bool = True


class Loggers(Section):
    """Logging besides ``metrics.jsonl``: arguments of Composer's loggers; null: none."""

    tensorboard: dict[str, Any] | None = None
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    comet: dict[str, Any] | None = None
    neptune: dict[str, Any] | None = None
