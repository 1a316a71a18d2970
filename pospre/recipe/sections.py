"""The sections of how a run trains: constructor arguments under the same names, with bounds."""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from pospre.arguments import Section
from pospre.nn.lora_options import LoraOptions
from pospre.ranges import Size
from pospre.recipe.values import (
    AllOrSome,
    Betas,
    Duration,
    DurationOrAuto,
    LocalOrS3,
    PlainPath,
    PositiveDuration,
    ShareOrDuration,
)


class Optimizer(Section):
    """The optimiser; its peak rate is ``base_lr`` × ``data.batch_size`` / ``lr_batch``."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw decouples weight decay from the gradient; adam and sgd add it."""
    base_lr: float = Field(default=1.5e-4, gt=0)
    """Peak rate of ``lr_batch`` samples."""
    lr_rule: Literal["linear", "sqrt", "none"] = "linear"
    """How the rate scales with the batch; none: base_lr unchanged."""
    lr_batch: int = Field(default=256, gt=0)
    """Reference batch size of base_lr."""
    betas: Betas = (0.9, 0.95)
    """β1 and β2 of Adam."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam's step."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of sgd."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Weight decay of all parameters but vectors."""
    weight_decay_end: float | None = Field(default=None, ge=0)
    """Half a cosine from weight_decay to this; None: constant."""
    no_decay: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Parts of names of further parameters without weight decay."""
    layer_decay: float | None = Field(default=None, gt=0, le=1)
    """Rate factor from each block to the one below."""
    patch_embed_lr: float = Field(default=1.0, ge=0)
    """Rate factor of the patch embedding."""
    lora_lr: float = Field(default=1.0, gt=0)
    """Rate factor of LoRA's pairs."""


class Schedule(Section):
    """The learning rate per step: a warm-up from ``start_lr``, then the schedule ``name``."""

    name: Literal["cosine", "multistep", "step", "constant"] = "cosine"
    """``cosine``: half a cosine down to ``min_lr``; ``multistep``: × ``gamma`` at each of
    ``milestones``; ``step``: × ``gamma`` after each interval ``every``, and the warm-up holds
    ``start_lr``; ``constant``: the peak.
    """
    warmup: Duration = "10ep"
    """Linear rise from ``start_lr`` to the peak."""
    start_lr: float = Field(default=0.0, ge=0)
    """Rate at the start of the warm-up."""
    min_lr: float = Field(default=0.0, ge=0)
    """Rate at the end of the cosine."""
    milestones: Annotated[tuple[PositiveDuration, ...], Field(strict=False)] = ()
    """Counted from the start of training."""
    every: PositiveDuration | None = None
    """Interval of ``step``."""
    gamma: float = Field(default=0.1, gt=0, le=1)
    """Factor of ``step`` and ``multistep``."""
    length: PositiveDuration | None = None
    """End of the cosines; None: trainer.max_duration."""
    fix_after: PositiveDuration | None = None
    """Rate and weight decay stay constant from here on."""
    unit: Literal["step", "epoch"] = "step"
    """epoch: all steps of an epoch use the values of its first step."""
    offset: int = 0
    """Units by which the schedule is ahead: 1 if the published scheduler steps before the optimiser
    (I-JEPA), -1 if it gets the unit just finished (timm).
    """
    warmup_prefix: bool = True
    """The cosine starts after the warm-up; false: at 0 (timm's default)."""
    warmup_endpoint: bool = False
    """The last step of the warm-up has the peak, not the one after it (DINOv2)."""
    scale_floors: bool = True
    """Scale start_lr and min_lr by layer_decay and patch_embed_lr too (MAE), not the peak alone."""


class Trained(Section):
    """The tensors that train in a stage: always heads, and what is named here.

    Heads are the parts of methods, and all tensors of the encoder that ``encoder.weights`` does not
    give. ``heads`` is short for ``{}``, ``all`` for ``{all: true}``.
    """

    last: int | None = Field(default=None, gt=0)
    """Number of last blocks; the final norm trains with them."""
    norms: bool = False
    """Every LayerNorm of the encoder."""
    lora: bool = False
    """The pairs of section ``lora``."""
    all: bool = False
    """Everything; with ``lora`` all pairs, norms, heads, and blocks that a stage trains whole."""

    @model_validator(mode="before")
    @classmethod
    def _words(cls, value: Any) -> Any:
        if value in ("heads", "all"):
            return {"all": value == "all"}
        if not isinstance(value, dict | Trained):
            raise PydanticCustomError("range", "Input should be heads, all, or {last: 4}")
        return value


class Lora(Section, LoraOptions):
    """Low-rank pairs beside frozen weights, in blocks that no stage trains whole."""


class Stage(Section):
    """A part of the run in which some tensors train, and all others are frozen."""

    until: ShareOrDuration | None = None
    """Its end: a duration, or a share of the whole run; the last stage has none."""
    train: Trained = Trained(all=True)
    """What trains: ``heads``, ``all``, or ``{last: 4, norms: true, lora: true}``."""
    ramp: ShareOrDuration | None = None
    """For how long the rate of tensors that begin to train rises; None: for 2 % of the run, but at
    least 50 steps, and at most the stage.
    """
    restart: bool = False
    """Begin the schedule anew: its steps count from the start of this stage, and its cosine ends
    with it. Moments stay; weight decay is still that of the whole run.
    """
    sizes: dict[str, Size] = Field(default={})
    """Sizes of views in this stage by their group, as {global: 336}; others as in data.views."""


class Fsdp(Section):
    """Options of FSDP2; checkpoints have the same content for any number of ranks."""

    shard_degree: int | None = Field(default=None, gt=0)
    """Ranks that share a copy of the model; every such group has its own (hybrid sharding). None:
    all share one.
    """
    reshard_after_forward: bool = True
    """Free a block's gathered weights between forward and backward: less memory, more traffic."""
    mixed_precision: Literal["FULL", "DEFAULT", "PURE"] = "FULL"
    """FULL: only autocast casts; the others also cast all floats of the batch, including crop boxes
    and noise.
    """


class ClipGrad(Section):
    """Gradient clipping by a norm."""

    mode: Literal["norm", "per_tensor", "per_module"] = "norm"
    """``norm``: over all parameters; ``per_tensor``: of each tensor, as in DropPos's code;
    ``per_module``: of the encoder and of each head, as in DINOv2's.
    """
    threshold: float = Field(gt=0)
    """Largest norm."""


class Trainer(Section):
    """Duration, device, speed, and output of the training."""

    max_duration: PositiveDuration
    """Length of the training, such as 100ep or 5000ba."""
    precision: Literal["auto", "fp32", "amp_bf16", "amp_fp16"] = "auto"
    """``auto``: amp_bf16 if the device computes in bf16 (GPUs since Ampere, CPUs with
    AVX-512-BF16), else fp32.
    """
    residual: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the tokens between blocks under amp_bf16; auto: the method's (bf16 with dinov2,
    else fp32).
    """
    attention: Literal["auto", "cudnn"] = "auto"
    """``cudnn``: GPUs compute attention by cuDNN where it can; ``auto``: by torch's choice."""
    float8: bool = False
    """Blocks multiply in 8 bits, on GPUs since Hopper and Ada; for large models."""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """Where to train; auto: a GPU if there is one."""
    run_folder: PlainPath = "runs"
    """Local folder of the runs' folders."""
    overwrite: bool = False
    """Start again, although the run's folder holds a run."""
    save_folder: LocalOrS3 | None = None
    """Bucket for copies of the checkpoints, s3://bucket/folder; null: none."""
    hours_between_failures: float | None = Field(default=None, gt=0)
    """Mean of one node, with preemptions; for save_interval: auto."""
    save_interval: DurationOrAuto = "1ep"
    """auto: from hours_between_failures and the measured cost of a save."""
    keep_checkpoints: AllOrSome = 3
    """Number of local checkpoints kept; -1 keeps all."""
    keep_remote: AllOrSome = -1
    """Number of checkpoints kept in the bucket of save_folder; -1 keeps all."""
    keep_best: str | None = None
    """Figure measured during training: EVALUATION/FIGURE, as knn/top1."""
    autoresume: bool = True
    """Continue the run that is in the folder; false: refuse to."""
    microbatch_size: Annotated[int, Field(gt=0)] | Literal["auto"] | None = None
    """Samples of a rank's batch that are on the device at once; auto: as many as fit, determined
    before the first step; None: all.
    """
    activation_checkpointing: bool | Literal["offload"] = False
    """true: recompute blocks from their inputs in the backward pass; offload: also keep these
    inputs in CPU memory.
    """
    compile: bool | Literal["auto", "blocks"] = "auto"
    """true: the step with its losses as one graph; blocks: every block separately; auto: on GPUs
    the step, under FSDP2 the blocks, on CPUs nothing.
    """
    fsdp: Fsdp | None = None
    """Shard the model over ranks, {} with the defaults; null: every rank holds it all (DDP)."""
    clip_grad: ClipGrad | None = None
    """Clipping of gradients; null: none."""
    log_interval: int = Field(default=10, gt=0)
    """Steps between lines of metrics.jsonl."""
    progress_bar: bool = True
    """Draw a progress bar on a terminal."""
    dist_timeout: float = Field(default=300.0, gt=0)
    """Seconds for a collective call."""
    rendezvous_timeout: float = Field(default=60.0, gt=0)
    """Seconds in which all ranks must connect."""
    peer_timeout: float = Field(default=120.0, ge=5)
    """Seconds of silence after which a rank counts as lost."""

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
