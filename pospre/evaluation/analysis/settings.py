"""Settings that several analyses have, checked before there is a model."""

from collections.abc import Sequence

from pospre.data.opening import open_reader
from pospre.errors import UserError
from pospre.evaluation.layers import check_grid, planned_encoder
from pospre.evaluation.registry import Plan
from pospre.model.model import PretrainModel
from pospre.nn.build import check_divides


def check_attention(plan: Plan) -> tuple[int, int]:
    """Return the grid of the views of an evaluation with settings ``layers`` and ``image_size``.

    Raises:
        UserError: a layer that has no attention, or a view size that the encoder does not take.
    """
    layers, side = plan.settings["layers"] or (), plan.settings["image_size"]
    encoder = planned_encoder(plan.recipe, layers)
    if 0 in layers:
        raise UserError("layer 0 is the embedding; the first attention is layer 1.")
    if side is None:
        return encoder.grid
    for patch in encoder.patch_size:
        check_divides(side, patch, key="image_size")
    grid = encoder.grid_of(side, side)
    check_grid(encoder, grid, f"image_size={side}")
    return grid


def check_queries(queries: Sequence[int], grid: tuple[int, int]) -> None:
    """Raise a ``UserError`` for patches that a grid does not have."""
    patches = grid[0] * grid[1]
    wrong = [query for query in queries if query >= patches]
    if wrong:
        raise UserError(
            f"queries has patch {wrong[0]}, but there are {grid[0]} × {grid[1]} patches, "
            f"numbered row by row from 0 to {patches - 1}."
        )


def three_patches(grid: tuple[int, int]) -> list[int]:
    """Return patches in the middle, in the upper left and in the lower right quarter."""
    rows, columns = grid
    shares = [(1, 2), (1, 4), (3, 4)]
    return [rows * part // whole * columns + columns * part // whole for part, whole in shares]


def chosen_layers(model: PretrainModel, layers: Sequence[int] | None) -> list[int]:
    """Return the blocks to look at in their order, all without ``layers``; the first is 1."""
    return sorted(set(layers or range(1, model.encoder.depth + 1)))


def require_two_images(plan: Plan) -> None:
    """Raise a ``UserError`` if a single image is to be measured."""
    found = min(len(open_reader(plan.data)), plan.settings["num_samples"] or 2)
    if found < 2:
        raise UserError(
            f"it compares images with one another, and of {plan.data} one is measured; give "
            "two or more."
        )
