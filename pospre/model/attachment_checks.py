"""Checks after all algorithms are attached: no missing parts, no leaked answers."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from pospre.errors import UserError
from pospre.model.needs import check_teacher
from pospre.model.registry import Registry
from pospre.nn.positions import schemes_that

if TYPE_CHECKING:  # circular import
    from pospre.model.model import PretrainModel


def check_complete(model: PretrainModel) -> None:
    """Raise ``UserError`` if no algorithm has a loss, or a part is unused."""
    if not len(model.objectives.named):
        raise UserError(
            "algorithms: none of those listed has a loss. Add a host, or another algorithm with a "
            "loss; pospre/algorithms/README.md lists them."
        )
    _check_read(model.registry, list(model.objectives))
    _check_editors(model.registry, model.contents.named, model.places.named)
    check_places(model)
    for algorithm in model.algorithms:
        check_teacher(model, algorithm.needs(model.encoder))
        algorithm.check_company(model)


def _check_read(registry: Registry, objectives: list[str]) -> None:
    """Raise ``UserError`` for objectives without a pass, and views that nothing reads."""
    for name in objectives:
        if not any(name in readers for readers in registry.readers.values()):
            raise UserError(
                f"algorithms: the objective '{name}' reads no encoder pass. Its algorithm must "
                f"declare one (add_pass) or join another's (join_pass) under the name '{name}'."
            )
    read = {declared.group for declared in registry.passes.values()}
    for group in (name for name in registry.views if name not in read):
        raise UserError(
            f"data.views.{group} is not read by any algorithm listed; only "
            f"{', '.join(sorted(read))} is. Remove it, or add an algorithm that needs it."
        )


def check_places(model: PretrainModel) -> None:
    """Raise ``UserError`` if the encoder gets what an objective must predict."""
    registry = model.registry
    positions, source = registry.encoder.positions, registry.place_source
    for name in model.objectives:
        predicted = model.objectives[name].predicts
        if name in registry.editors.values():
            if predicted is None:
                raise UserError(
                    f"algorithms.{name} changes the places of an encoder pass, so its "
                    "objective must say what it predicts: predicts = 'places', 'view_places' "
                    "or 'content' (see pospre/model/objective.py)."
                )
        elif predicted in ("places", "view_places") and source is not None:
            raise UserError(
                f"algorithms.{name} predicts places, but {source} gives the encoder the place "
                "of every patch, and thus the answer. Use one of the two, or hide those "
                "places with an editor of places, as droppos does."
            )
        elif predicted == "places" and positions.can_forget:
            raise UserError(
                f"algorithms.{name} predicts the places of patches, but encoder.positions = "
                f"{positions.name} gives them to the encoder. Set encoder.positions: "
                f"{schemes_that('can_forget', False)}; or hide them with an editor of places, "
                "as droppos does."
            )


def _check_editors(registry: Registry, contents: Container[str], places: Container[str]) -> None:
    """Raise ``UserError`` if a pass names an editor that the model does not have."""
    for name, declared in registry.passes.items():
        parts = (
            ("contents", declared.content, contents),
            ("places", declared.places, places),
        )
        for place, asked, added in parts:
            for editor in (each for each in asked if each not in added):
                raise UserError(
                    f"algorithms: the encoder pass '{name}' names the editor '{editor}' in its "
                    f"{place}, but model.{place}.named does not have it."
                )
