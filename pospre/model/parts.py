"""The modules of a layout: heads, editors and the teacher, each with weights of its own."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from pospre.model.layout import Layout
from pospre.model.objective import Objective, ObjectiveSet
from pospre.model.passes import EditSet
from pospre.model.teacher import Frozen, TeacherManager


class Parts(NamedTuple):
    """The modules of a model beside its encoder."""

    contents: EditSet
    places: EditSet
    objectives: ObjectiveSet
    teacher: Frozen | None
    teachers: TeacherManager


def make_parts(layout: Layout, seed: int) -> Parts:
    """Make the parts of all methods; the weights of each depend on seed and method alone.

    A learned table of the encoder's positions gets the size that a method declares.
    """
    encoder, owner = layout.encoder, layout.teacher
    for name, uses in layout.uses.items():
        if uses.table is not None:
            with _weights_of(seed, name):
                encoder.positions.enlarge(uses.table.grid, resampling=uses.table.resampling)
    teachers = TeacherManager(owner, None if owner is None else layout.uses[owner].teacher)
    teacher = None if owner is None else teachers.copy(encoder)
    parts = Parts(EditSet(), EditSet(), ObjectiveSet(), teacher, teachers)
    passes = layout.passes.values()
    for name, method in layout.methods.items():
        with _weights_of(seed, name):
            if any(name in each.content for each in passes):
                parts.contents.named[name] = method.content_editor(encoder)
            if any(name in each.places for each in passes):
                parts.places.named[name] = method.place_editor(encoder)
            if method.objective is not None:
                head: Objective = layout.maker_of(name).head(encoder, layout)
                parts.objectives.named[name] = head
                for student, taught in head.mirrored():
                    teachers.mirror(student, taught)
    return parts


@contextmanager
def _weights_of(seed: int, name: str) -> Iterator[None]:
    """Let torch's generator draw weights that depend on the seed and the method alone."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int.from_bytes(digest, "big", signed=True))
        yield
