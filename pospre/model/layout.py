"""What methods run and write together, as ``compose`` has laid it out."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pospre.data.views.options import ViewGroup
from pospre.model.passes import EncoderPass
from pospre.model.uses import Hides, Method, Uses
from pospre.nn.encoder_interface import PatchEncoder


@dataclass(frozen=True)
class Layout:
    """The methods of a model, and what they run and write together.

    Attributes:
        encoder: the encoder of the passes.
        views: the view groups by name.
        reference: the frozen encoder of the passes that ask for it; None: there is none.
        methods: the methods by name, in the order in which they draw and their heads run.
        uses: what each declares.
        hider: the method that hides patches of ``view``; None: all are visible.
        placer: the method that places views; None: each view is its own frame.
        teacher: the method that the teacher belongs to; None: no teacher.
        writers: the method that writes each batch key.
        captions: of batch keys that mark patches.
        passes: the encoder passes by name.
    """

    encoder: PatchEncoder
    views: Mapping[str, ViewGroup]
    reference: PatchEncoder | None = None
    methods: Mapping[str, Method] = field(default_factory=dict)
    uses: Mapping[str, Uses] = field(default_factory=dict)
    hider: str | None = None
    placer: str | None = None
    teacher: str | None = None
    writers: Mapping[str, str] = field(default_factory=dict)
    captions: Mapping[str, str] = field(default_factory=dict)
    passes: Mapping[str, EncoderPass] = field(default_factory=dict)

    @property
    def hides(self) -> Hides | None:
        """The patches of ``view`` that are hidden; None: no patches."""
        return None if self.hider is None else self.uses[self.hider].hides

    @property
    def num_visible(self) -> int:
        """The number of visible patches, at most."""
        patches = self.encoder.num_patches
        return patches if self.hides is None else self.hides.visible or patches

    @property
    def averages(self) -> bool:
        """Whether the teacher also follows heads."""
        return any(each.averages for each in self.uses.values())

    @property
    def coupled(self) -> str:
        """What couples the samples of a batch, in words; empty: nothing."""
        parts: dict[str, list[str]] = {
            name: [what for what, is_coupled in uses.couples.items() if is_coupled]
            for name, uses in self.uses.items()
        }
        lines = (f"{' and '.join(what)} of {name}" for name, what in parts.items() if what)
        return " and ".join(lines)

    @property
    def frozen(self) -> dict[str, Mapping[str, int]]:
        """By method, the parts of its head that are frozen at first, and for how many epochs."""
        return {
            name: each.frozen or (self.uses[host].frozen if host is not None else {})
            for name, each in self.uses.items()
            for host in [None if each.on is None else self.named(each.on)]
        }

    def grid(self, group: str = "view") -> tuple[int, int]:
        """Return (rows, columns) of patches in a group's views."""
        if group == "view":
            return self.encoder.grid
        return self.encoder.grid_of(*self.views[group].shape)

    def seen_by_reference(self, group: str) -> str:
        """Return the group that the reference sees in place of a group: one that is of it."""
        return next((name for name, each in self.views.items() if each.of == group), group)

    def masked(self, group: str) -> float:
        """Return the share of a group's views in which patches are replaced by a mask token."""
        if group == "view" and self.hides is not None and not self.hides.left_out:
            return 1.0
        return max((each.masked.get(group, 0.0) for each in self.uses.values()), default=0.0)

    def named(self, kind: str) -> str | None:
        """Return the name of the method ``kind``, or of a class derived from it; None: absent."""
        return next((name for name, each in self.methods.items() if kind in each.names()), None)

    def method(self, kind: str) -> Method:
        """Return the method ``kind``, or of a class derived from it, which must be there."""
        name = self.named(kind)
        assert name is not None
        return self.methods[name]

    def maker_of(self, name: str) -> Method:
        """Return the method that makes the head of ``name``: one that replaces it, or itself."""
        for other, uses in self.uses.items():
            if uses.replaces_head and uses.on is not None and self.named(uses.on) == name:
                return self.methods[other]
        return self.methods[name]

    def mixer(self, group: str, *, training: bool = True) -> Method | None:
        """Return the method that changes the pixels of a view group; None: none does."""
        name = self.writers.get(f"{group}/pixels")
        if name is None or not (training or self.uses[name].mixes_always):
            return None
        return self.methods[name]
