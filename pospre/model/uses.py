"""What a method declares: plain data, made without sight of the other methods."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from torch import Tensor, nn

from pospre.batch import Batch, field_box_key
from pospre.model.progress import Progress
from pospre.model.teacher import Momentum
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.masking import PatchMasking
from pospre.nn.positions.scheme import Resampling

Predicts = Literal["places", "view_places", "content"]
ALL, SEEN = "all", "seen"


@dataclass(frozen=True)
class Hides:
    """The patches of ``view`` that a method hides: ``view/visible`` and ``view/hidden``.

    Attributes:
        visible: number of visible patches per sample; None: varies.
        shuffled: both lists are in random order, so any prefix is a random subset; of cells that
            are hidden as one, any prefix of whole cells.
        left_out: the encoder does not get hidden patches. Otherwise the method also writes
            ``view/masked`` and replaces them by a mask token.
        unless_host: only if no host hides patches.
        options: options of the method that have no effect if a host does.
        masking: draws them before ``write``; None: ``write`` does.
    """

    visible: int | None
    shuffled: bool = True
    left_out: bool = True
    unless_host: bool = False
    options: tuple[str, ...] = ()
    masking: PatchMasking | None = None

    @classmethod
    def by(cls, masking: PatchMasking, **options: Any) -> "Hides":
        """Return the declaration of patches that ``masking`` draws."""
        shuffled = not masking.in_rows
        return cls(masking.num_visible, shuffled=shuffled, masking=masking, **options)


@dataclass(frozen=True)
class Pass:
    """One run of the encoder over all views of a group, whose tokens a method reads.

    Methods that declare a pass of the same name over the same patches share it.

    Attributes:
        group: the view group.
        over: the patches to encode: ``all``; ``seen``, those that are visible if a method leaves
            out hidden ones; or those of a batch key, (B, K) or (B, V, K).
        context: batch key of those among them that give keys and values; None: all.
        teacher: run the teacher instead of the trained encoder, without gradient.
        grad: whether gradients flow through the trained encoder here.
        needs_patches: whether the method reads patch tokens, not prefix tokens alone.
        class_token: the option for which it reads the class token, such as ``lut.pool =
            class_token``; None: it does not.
        edits_content: its ``content_editor`` changes patch embeddings here.
        edits_places: its ``place_editor`` changes places here.
        optional: left out if the data have no such view group.
        joins: take the patches of another method's pass of this name.
        or_all: with ``joins``, if no other method runs such a pass: all patches.
        reference: run the reference encoder instead, over all patches of whole, unmasked views, and
            without changed colours. It sees the group that is ``of`` this one, if there is one.
        rolls: with ``reference``, so many copies of each view are shifted around by whole patches,
            and their tokens, shifted back, are averaged.
        twin_of: the pass of another group whose editors also apply here.
        if_left_out: declared only if hidden patches are left out (True), or only if they are masked
            (False); None: always.
    """

    group: str = "view"
    over: str = ALL
    context: str | None = None
    teacher: bool = False
    grad: bool = True
    needs_patches: bool = True
    class_token: str | None = None
    edits_content: bool = False
    edits_places: bool = False
    optional: bool = False
    joins: bool = False
    or_all: bool = False
    reference: bool = False
    rolls: int = 0
    twin_of: str | None = None
    if_left_out: bool | None = None


class TableSize(NamedTuple):
    """The size that a learned table of positions gets, and how it is resampled to it."""

    grid: tuple[int, int]
    resampling: Resampling


@dataclass(frozen=True, kw_only=True)
class Uses:
    """All that a method declares of itself.

    Attributes:
        views: number of views per sample by view group; None: one or more.
        hides: the patches of ``view`` that it hides.
        sees: patches of ``view`` that the encoder must get: ``all`` with their content; ``shown``,
            none replaced by a mask token; ``part``, some of them hidden. None: any.
        on: the method that it extends.
        replaces_head: its head takes the place of that method's.
        passes: the encoder passes that its head reads, by name. Usual names: ``student``,
            ``teacher``, ``global``, ``local``, ``affinity``.
        keys: batch keys that it writes, with the caption of pictures in which the key's patches
            are marked, or no caption. ``*/`` stands for every view group. Who writes
            ``*/field_box`` places the views. Who writes ``g/pixels`` changes them in ``mix``.
        mixes_always: it changes them in evaluation too, because its task is about changed views.
        predicts: ``places`` of patches in their view; ``view_places`` of views in the image or in
            each other; or ``content``, anything else. Required if it edits places.
        masked: by view group, the share of views in which it replaces patches by a mask token.
        calibrates: the passes to whose tokens its head is fitted before the first step, the first
            that there is; those of the trained encoder only if it starts from published weights.
        teacher: momentum of the teacher that it has; None: it has none of its own.
        averages: the teacher also follows the heads of other methods.
        widths: by part of its head, such as ``decoder``: width and attention heads, which must
            divide it.
        table: the size that it gives to a learned table of positions.
        couples: what couples the samples of a batch, as plurals, and whether it does with these
            options: gradients accumulated over microbatches or ranks then differ from those of one
            batch.
        entropies: largest possible value of logged metrics that are entropies of targets, by name.
            Runs check that these are neither 0 nor largest.
        agreements: by the logged share of agreement with a teacher's prototypes, the logged
            cross-entropy with them, and its value if all are alike to the student, ln K. Runs check
            these at the end of a stage of heads.
        frozen: number of initial epochs with learning rate 0, by the start of a parameter's name
            within the head. Without it, a method on another has the other's.
        half_residual: the published code keeps tokens in half precision between blocks. Runs under
            amp_bf16 then keep them in bf16, unless ``trainer.residual`` overrides it.
        hint: the remedy at the end of errors about other methods.
    """

    views: Mapping[str, int | None] = field(default_factory=lambda: {"view": 1})
    hides: Hides | None = None
    sees: Literal["all", "shown", "part"] | None = None
    on: str | None = None
    replaces_head: bool = False
    passes: Mapping[str, Pass] = field(default_factory=dict)
    keys: Mapping[str, str | None] = field(default_factory=dict)
    mixes_always: bool = False
    predicts: Predicts | None = None
    masked: Mapping[str, float] = field(default_factory=dict)
    calibrates: tuple[str, ...] = ()
    teacher: Momentum | None = None
    averages: bool = False
    widths: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    table: TableSize | None = None
    couples: Mapping[str, bool] = field(default_factory=dict)
    entropies: Mapping[str, float] = field(default_factory=dict)
    agreements: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    frozen: Mapping[str, int] = field(default_factory=dict)
    half_residual: bool = False
    hint: str = "Leave one of them out."

    @property
    def groups(self) -> set[str]:
        """The view groups that it reads."""
        return {*self.views, *(each.group for each in self.passes.values())}

    @property
    def places_views(self) -> bool:
        """Whether it places the views of every pass."""
        return any(key.endswith(field_box_key("")) for key in self.keys)


class Method(Protocol):
    """A method, as ``compose`` and the model call it; see ``PretrainAlgorithm``."""

    is_host: ClassVar[bool]
    objective: ClassVar[Any]

    @classmethod
    def module_name(cls) -> str:
        """Return the name used in recipes."""

    @classmethod
    def names(cls) -> set[str]:
        """Return its name and those of the methods that it is derived from."""

    def check_encoder(self, encoder: PatchEncoder) -> None:
        """Raise ``UserError`` if its options do not fit one another, or this encoder."""

    def check_used(self, option: str, used: bool, other: str) -> None:
        """Raise ``UserError`` if an option is set, but has no effect."""

    def uses(self, encoder: PatchEncoder) -> Uses:
        """Return what it declares."""

    def check(self, layout: Any) -> None:
        """Raise ``UserError`` if it does not work in this ``Layout``."""

    def head(self, encoder: PatchEncoder, layout: Any) -> Any:
        """Return its objective; None: no loss."""

    def content_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that edits embeddings."""

    def place_editor(self, encoder: PatchEncoder) -> nn.Module:
        """Return the module that edits places."""

    def mix(self, pixels_BVCHW: Tensor, batch: Batch, encoder: PatchEncoder) -> Tensor:
        """Return changed views."""

    def write(self, batch: Batch, model: Any) -> None:
        """Write its keys."""

    def schedule(self, model: Any, progress: Progress) -> None:
        """Set what changes over training."""
