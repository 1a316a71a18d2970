"""How far features are from those of the weights that training started from, block by block.

The same images go through both encoders; tokens have the final norm. For the class token and for
patches: ``cosine`` to the start; ``centred``, the same after subtracting each encoder's mean token
(the mean alone makes any two similar); unbiased linear ``cka`` of one vector per image;
``procrustes``, the cosine after the best rotation; ``kept``, the share of the start's five nearest
neighbours that are still nearest (images for the class token, patches of the image for patches).
For patches also ``gram`` (DINOv3's), and of each encoder alone ``r2`` of a patch's place, ``norm``
(largest length over the median) and ``blur`` (cosine between patches of an image); for both
``rank`` (RankMe). Means and maps are fitted on half of the images, the rest is read on the others.
A start with another grid of patches is compared at the places of the encoder's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.errors import UserError
from pospre.evaluation.analysis.settings import Drift
from pospre.evaluation.analysis.similarity import (
    Sums,
    cosine,
    kept,
    rotation,
    similarities,
    unbiased_cka,
)
from pospre.evaluation.features import centre_batches, check_images
from pospre.evaluation.layers import chosen_layers, layer_tokens, planned_encoder
from pospre.evaluation.registry import START, Context, Plan
from pospre.model.comparison import on_grid
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.positions.fading import Fading
from pospre.training.callbacks.watchers import effective_rank

FIGURES = {
    **dict.fromkeys(("class_cosine", "patch_cosine", "patch_kept", "patch_rank"), "max"),
    **dict.fromkeys(("patch_gram", "patch_r2", "patch_blur"), "min"),
}
KINDS = ("class", "patch")
_LEAST = 16
_READABLE = 0.2  # R² of the place, of positions that took the place of others


class _Layer:
    """What is gathered of one layer: sums to fit from, and then figures of each further image."""

    def __init__(self, grids: Mapping[str, tuple[int, int]]) -> None:
        self.grids = grids
        self.places_N2 = {name: _places(grid) for name, grid in grids.items()}
        self.places: dict[str, Sums] = {}
        self.turns = {"class": Sums(), "patch": Sums()}
        self.vectors: dict[tuple[str, str], list[Tensor]] = {}
        self.values: dict[str, list[Tensor]] = {}
        self._maps: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def keep(self, tokens: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Keep one vector per image, by model and kind."""
        for name, kinds in tokens.items():
            for kind, each in kinds.items():
                self.vectors.setdefault((name, kind), []).append(each.mean(1).cpu())

    def fit(self, tokens: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add images to fit means, rotations and probes of places to."""
        for name, kinds in tokens.items():
            patches_BND = kinds["patch"]
            places_BN2 = self.places_N2[name].expand(len(patches_BND), -1, -1).to(patches_BND)
            self.places.setdefault(name, Sums()).add(
                patches_BND.flatten(0, 1), places_BN2.flatten(0, 1)
            )
        beside = self._beside(tokens[START])
        for kind, own in tokens[""].items():
            self.turns[kind].add(own.flatten(0, 1), beside[kind].flatten(0, 1))

    def read(self, tokens: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Measure images with what was fitted."""
        beside = self._beside(tokens[START])
        for kind, own in tokens[""].items():
            start = beside[kind]
            mean, other, turn = self._map(kind)
            centred, wanted = own - mean, start - other
            self._note(f"{kind}_cosine", cosine(own, start).mean(1))
            self._note(f"{kind}_centred", cosine(centred, wanted).mean(1))
            self._note(f"{kind}_procrustes", cosine(centred @ turn, wanted).mean(1))
        for name, kinds in tokens.items():
            self._read_patches(name, kinds["patch"])
        own, start = (similarities(each["patch"]) for each in (tokens[""], beside))
        self._note("patch_gram", (own - start).square().mean((1, 2)))
        self._note("patch_kept", kept(own, start))

    def _beside(self, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the start's tokens, its patches read at the places of the encoder's."""
        patches = on_grid(start["patch"], self.grids[START], self.grids[""])
        return {**start, "patch": patches}

    def _map(self, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        if kind not in self._maps:
            sums = self.turns[kind]
            parts = (*sums.means, rotation(*sums.centred()))
            self._maps[kind] = tuple(each.float() for each in parts)  # type: ignore[assignment]
        return self._maps[kind]

    def _read_patches(self, name: str, patches_BND: Tensor) -> None:
        weights, bias = (each.float() for each in self.places[name].ridge())
        places_N2 = self.places_N2[name].to(patches_BND)
        residual = (patches_BND @ weights + bias - places_N2).square().sum((1, 2))
        self._note(f"{name}patch_residual", residual)
        length = patches_BND.norm(dim=-1)
        self._note(f"{name}patch_norm", length.amax(1) / length.median(1).values)
        count = patches_BND.shape[1]
        total = F.normalize(patches_BND, dim=-1).sum(1).square().sum(1)
        self._note(f"{name}patch_blur", (total - count) / (count * (count - 1)))

    def _note(self, name: str, value_B: Tensor) -> None:
        self.values.setdefault(name, []).append(value_B.double().cpu())

    def figures(self) -> dict[str, float]:
        """Return all figures of the layer."""
        means = {key: float(torch.cat(batches).mean()) for key, batches in self.values.items()}
        for name, places_N2 in self.places_N2.items():
            spread = float((places_N2 - places_N2.mean(0)).square().sum())
            means[f"{name}patch_r2"] = 1 - means.pop(f"{name}patch_residual") / spread
        for (name, kind), parts in self.vectors.items():
            own_MD = torch.cat(parts)
            means[f"{name}{kind}_rank"] = effective_rank(own_MD)
            if name == START:
                other_MD = torch.cat(self.vectors["", kind])
                means[f"{kind}_cka"] = unbiased_cka(other_MD, own_MD)
            if name == START and kind == "class":
                both = (similarities(each[None]) for each in (other_MD, own_MD))
                means["class_kept"] = float(kept(*both))
        return means


@torch.no_grad()
def evaluate(context: Context, settings: Drift) -> dict[str, Any]:
    """Measure every block.

    Returns:
        ``rows``, the figures of every layer (see above); those of the last layer; the start's own
        (``start_…``) and the untrained encoder's (``initial_…``); and ``repositioned``. Of a run
        also ``student_moved`` and ``teacher_moved``: how far the weights are from the start's, as a
        share of these.
    """
    if context.start is None:
        raise UserError(
            "it compares with the weights that training started from; this model has none "
            "(a recipe's encoder.weights, or --start FILE)"
        )
    models = context.models(baseline=settings.baseline)
    _check_alike(models[START].encoder, context.model.encoder)
    grids = {name: each.encoder.grid_of(*context.image_size) for name, each in models.items()}
    kinds = KINDS[not context.model.encoder.has_class_token :]
    numbers = chosen_layers(settings.layers, context.model.encoder.depth, first=1)
    layers = {number: _Layer(grids) for number in numbers}
    to_fit, count = context.opened // 2, 0
    for batch in centre_batches(context, settings):
        size = len(batch["index"])
        cut = min(max(0, to_fit - count), size)
        count += size
        read = {
            name: _by_layer(model, model.images(batch)[:, 0], numbers)
            for name, model in models.items()
        }
        for number, layer in layers.items():
            tokens = {name: read[name][number] for name in models}
            layer.keep(tokens)
            if cut:
                layer.fit(_rows(tokens, slice(cut)))
            if cut < size:
                layer.read(_rows(tokens, slice(cut, None)))
    figures = {number: layer.figures() for number, layer in layers.items()}
    return {
        **figures[numbers[-1]],
        **{f"{name}_moved": distance for name, distance in context.moved.items()},
        "repositioned": repositioned(context.model.encoder, models[START].encoder),
        "rows": [_row(number, kind, figures[number]) for number in numbers for kind in kinds],
        "images": count,
        "grid": list(grids[""]),
    }


def _check_alike(start: PatchEncoder, own: PatchEncoder) -> None:
    """Raise a ``UserError`` unless the blocks and tokens of both belong together."""
    theirs, ours = (
        f"depth {each.depth}, width {each.embed_dim} and "
        f"{'a' if each.has_class_token else 'no'} class token"
        for each in (start, own)
    )
    if theirs != ours:
        raise UserError(
            f"the start has {theirs}, and the model {ours}, so they cannot be compared block by "
            "block. Give as --start the weights that its training started from"
        )


def check(plan: Plan[Drift]) -> int:
    """Return the number of images; raise a ``UserError`` for too few, or layers that are not."""
    if planned_encoder(plan.recipe, plan.settings.layers).num_patches < 2:
        raise UserError("it compares the patches of an image, and this encoder sees only one.")
    if 0 in (plan.settings.layers or ()):
        raise UserError("layer 0 is the embedding; the first block is layer 1.")
    return check_images(plan, _LEAST)


def missing(plan: Plan[Drift], opened: int) -> dict[str, str]:
    """Return why there is no figure of the class token, if the encoder has none."""
    why = "the encoder has no class token; use drift/patch_cosine"
    return {} if planned_encoder(plan.recipe).has_class_token else {"class_cosine": why}


def alarms(results: Mapping[str, Any]) -> list[str]:
    """Return a line for each sign of trouble."""
    keys = ("rank", "norm", "blur", "r2")
    start, own = ({key: results[f"{one}patch_{key}"] for key in keys} for one in (START, ""))
    blur, r2 = own["blur"] - start["blur"], own["r2"] - start["r2"]
    gram, near, patch = (results[f"patch_{key}"] for key in ("gram", "kept", "cosine"))
    images = results.get("class_kept", 1.0)
    student = results.get("student_moved", 0.0)
    teacher = results.get("teacher_moved", student)
    signs = [
        (
            own["rank"] < 0.5 * start["rank"],
            f"features collapse: rank {own['rank']:.3g}, in the start {start['rank']:.3g}",
        ),
        (gram > 0.05, f"patches lose their relations: Gram {gram:.3f} (a mirror image: 0.025)"),
        (
            patch < 0.6 and results.get("class_cosine", 0.0) > 0.8,
            f"patches have left the start, and the class token has not: cosine {patch:.2f}",
        ),
        (blur > 0.1, f"patches of an image become alike: cosine up by {blur:.2f}"),
        (
            own["norm"] > 2 * start["norm"],
            "a few patches are far longer than the others: outliers in the norm",
        ),
        (r2 > 0.2, f"patches tell their place more than in the start: R² up by {r2:.2f}"),
        (
            near < 0.5,
            f"patches have new neighbours: {near:.0%} of the start's nearest are still nearest",
        ),
        (
            images < 0.5,
            f"images have new neighbours by their class tokens: {images:.0%} of the start's "
            "nearest are still nearest",
        ),
        (
            teacher == 0 < student,
            f"the teacher does not follow: the student's weights have moved by {student:.1e}",
        ),
        (
            teacher > student,
            f"the teacher is ahead of the student: weights moved by {teacher:.1e}, the student's "
            f"by {student:.1e}",
        ),
        (
            results["repositioned"] is not None and own["r2"] > _READABLE,
            f"{results['repositioned']} tells places again: R² {own['r2']:.2f}; "
            "distill.target=debiased teaches patches without them",
        ),
    ]
    return [text for is_wrong, text in signs if is_wrong]


def repositioned(own: PatchEncoder, start: PatchEncoder) -> str | None:
    """Return positions that took the place of the start's, but can also tell places, or None."""
    scheme = own.positions
    if isinstance(scheme, Fading):
        if scheme.share < 1:
            return None
        scheme = scheme.new
    return None if scheme.is_cyclic or scheme.name == start.positions.name else scheme.name


def _row(number: int, kind: str, figures: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of a layer's class token, or of its patches."""
    own = {key.replace(f"{kind}_", ""): value for key, value in figures.items() if kind in key}
    return {"layer": number, "tokens": kind, **own}


def _by_layer(
    model: PretrainModel, images_BCHW: Tensor, numbers: Sequence[int]
) -> dict[int, dict[str, Tensor]]:
    """Return the class token (B, 1, D), if there is one, and the patches (B, N, D) by layer."""
    encoder = model.encoder
    prefix, tokens_of = encoder.num_prefix_tokens, {}
    for number, tokens in zip(numbers, layer_tokens(model, images_BCHW, numbers), strict=True):
        tokens = tokens.float()
        cls = {"class": tokens[:, :1]} if encoder.has_class_token else {}
        tokens_of[number] = {**cls, "patch": tokens[:, prefix:]}
    return tokens_of


def _rows(tokens: Mapping[str, Mapping[str, Tensor]], rows: slice) -> dict[str, dict[str, Tensor]]:
    return {
        name: {kind: each[rows] for kind, each in kinds.items()} for name, kinds in tokens.items()
    }


def _places(grid: tuple[int, int]) -> Tensor:
    """Return row and column of every patch, (N, 2)."""
    rows, columns = (torch.arange(side, dtype=torch.float32) for side in grid)
    return torch.cartesian_prod(rows, columns)
