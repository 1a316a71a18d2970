"""Semantic or geometric correspondence: points of one image found in another by patch features.

Nothing is trained. A point's feature is read from the map of patch tokens (last layer, final norm)
and compared by cosine with all patches of the other image; the answer is the centre of the best
patch. In a folder of SPair-71k these are its pairs. Any other images are paired with views of
themselves by a drawn homography with changed colours: that measures invariance, not meaning.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pospre.evaluation.dense.correspondence.matching import (
    match_points,
    per_point,
    read_points,
    shares,
)
from pospre.evaluation.dense.correspondence.pairs import (
    LAYOUT,
    Pair,
    SPair,
    homography_pair,
    open_spair,
)
from pospre.evaluation.dense.images import decoding_of
from pospre.evaluation.dense.maps import FeatureMaps, check_encoder, check_side
from pospre.evaluation.dense.settings import Correspondence
from pospre.evaluation.estimates import compared, standard_error
from pospre.evaluation.features import centre_batches, check_views
from pospre.evaluation.registry import Context, Plan
from pospre.nn.sizes import pair as pair_of

FIGURES = {"pck": "max"}
OWN_DATA = True
UNITS = "pairs"
_MAIN = 0.1
_SAME_PLACE = "same_place"


class Setup(NamedTuple):
    """The pairs; None: views of images by homographies. And the side of views in pixels."""

    spair: SPair | None
    size: int


@torch.no_grad()
def evaluate(context: Context, settings: Correspondence) -> dict[str, Any]:
    """Measure PCK.

    Returns:
        ``pck``: the share of points found within 0.1 of the target's extent, averaged over pairs,
        with its standard error, the untrained model's (``initial_pck``) and the difference to it
        with its paired error. By threshold: ``per_image`` (the mean over pairs of the share of
        points with an error ≤ the threshold), ``per_point`` (all points together, error < the
        threshold), and for classes the mean over them (``…_of_classes``). ``same_place`` is the
        ``pck`` of answering with the same place. The extent is the longer side of the object's box
        (SPair-71k) or the view's side (homographies).
    """
    setup: Setup = context.opened
    models = context.models(baseline=settings.baseline)
    layer = context.model.encoder.depth if settings.layer is None else settings.layer
    maps = {prefix: FeatureMaps(model, [layer], norm=True) for prefix, model in models.items()}
    errors: dict[str, list[Tensor]] = {prefix: [] for prefix in (*models, _SAME_PLACE)}
    kinds = []
    for pair in _pairs(context, setup, settings):
        kinds.append(pair.kind)
        matches = {
            prefix: _matched(pair, each, setup.size, settings) for prefix, each in maps.items()
        }
        for prefix, points in {**matches, _SAME_PLACE: pair.source_K2}.items():
            away = (points.cpu().double() - pair.target_K2) * pair.sides_2
            errors[prefix].append(away.norm(dim=1) / pair.extent)
    main = {prefix: shares(errors[prefix], _MAIN) for prefix in models}
    results = compared("pck", main)
    results["pck_se"] = float(standard_error(main[""])) if len(kinds) > 1 else None
    for prefix in models:
        results |= _summary(prefix, errors[prefix], kinds, settings.alpha)
    return {
        **results,
        _SAME_PLACE: float(shares(errors[_SAME_PLACE], _MAIN).mean()),
        "pairs": len(kinds),
        "points": sum(map(len, errors[""])),
        "kind": "homographies: invariance, not meaning" if setup.spair is None else "SPair-71k",
        "size": setup.size,
        "layer": layer,
        **settings.values("coordinates", "match"),
    }


def check(plan: Plan[Correspondence]) -> Setup:
    """Return the pairs; raise a ``UserError`` for unsuitable data or sizes."""
    settings, data = plan.settings, Path(plan.data)
    encoder = check_encoder(plan, None if settings.layer is None else [settings.layer])
    size = settings.size or max(pair_of(plan.recipe.encoder.image_size))
    check_side("size", (size, size), encoder)
    if not (data / LAYOUT).is_dir():
        check_views(plan.recipe, plan.data)
        return Setup(None, size)
    count, seed = settings.num_samples, settings.seed
    pairs = open_spair(data, settings.split, count, seed, decoding_of(plan.recipe), settings.half)
    for name in pairs.names:
        pairs.described(name)
    return Setup(pairs, size)


def images(opened: Setup) -> int | None:
    """Return the number of SPair-71k's pairs to measure; None: there is one for each image."""
    return None if opened.spair is None else len(opened.spair.names)


def _pairs(context: Context, setup: Setup, settings: Correspondence) -> Iterator[Pair]:
    normalise = _normaliser(context)
    if setup.spair is not None:
        for name in context.track(setup.spair.names, "pairs", unit="pair"):
            yield setup.spair.pair(name, setup.size, normalise)
        return
    for batch in centre_batches(context, settings, size=setup.size):
        for index, levels in zip(
            batch["index"].tolist(), batch["view/image"][:, 0].cpu().float(), strict=True
        ):
            pair = homography_pair(levels, normalise, settings.seed, index, setup.size)
            if pair is not None:
                yield pair


def _normaliser(context: Context) -> Any:
    """Return the model's normalisation of levels, on the CPU."""
    mean, std = (getattr(context.model.augment, key).cpu() for key in ("mean", "std"))
    return lambda levels: (levels / 255 - mean) / std


def _matched(pair: Pair, maps: FeatureMaps, size: int, settings: Correspondence) -> Tensor:
    """Return where the source's points are found in the target, (K, 2)."""
    device = next(maps.model.parameters()).device
    ((source, target),) = maps(pair.images_2CHW.to(device))
    points = pair.source_K2.to(device=device, dtype=torch.float32)
    features = read_points(source, points, size, settings.coordinates)
    return match_points(
        features, target, size, match=settings.match, coordinates=settings.coordinates
    )


def _summary(
    prefix: str, errors: Sequence[Tensor], kinds: Sequence[str], alphas: Sequence[float]
) -> dict[str, Any]:
    """Return PCK by threshold, over all pairs and as the mean of the classes."""
    ways: Mapping[str, Any] = {
        "per_image": lambda some, alpha: float(shares(some, alpha).mean()),
        "per_point": per_point,
    }
    summary: dict[str, Any] = {}
    for name, way in ways.items():
        summary[f"{prefix}{name}"] = {f"{alpha:g}": way(errors, alpha) for alpha in alphas}
        if not any(kinds):
            continue
        by_class = [
            [one for one, other in zip(errors, kinds, strict=True) if other == kind]
            for kind in sorted({*kinds})
        ]
        summary[f"{prefix}{name}_of_classes"] = {
            f"{alpha:g}": fmean(way(some, alpha) for some in by_class) for alpha in alphas
        }
    return summary
