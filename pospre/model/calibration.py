"""Heads that are fitted, before the first step, to the tokens of published weights.

Published encoders come without heads, and tokens of a trained encoder share a direction and differ
in scale between channels. A new head keeps that direction, so all images are alike to it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.model.model import PretrainModel
from pospre.model.objective import Sampled
from pospre.model.teacher import follow
from pospre.nn.masking import gather_tokens

NUM_VIEWS = 1024
_PATCHES = 16  # of each view
_SMALLEST = 1e-6


def calibrated(model: PretrainModel, *, from_weights: bool = True) -> dict[str, str]:
    """Return the pass that each method's head is fitted to, by the method's name.

    Not ``from_weights``, the trained encoder's tokens are random, and only the reference's count.
    """
    laid = model.layout.passes
    first = {
        name: next((key for key in uses.calibrates if key in laid), None)
        for name, uses in model.layout.uses.items()
    }
    return {
        name: key
        for name, key in first.items()
        if key is not None and (from_weights or laid[key].reference)
    }


@torch.no_grad()
def calibrate(model: PretrainModel, batches: Iterable[Batch], *, from_weights: bool = True) -> int:
    """Fit the heads to the tokens of these samples, in closed form; return the number of views."""
    wanted, was_training = calibrated(model, from_weights=from_weights), model.training
    parts: dict[str, list[Sampled]] = {name: [] for name in wanted.values()}
    counts = dict.fromkeys(parts, 0)
    model.eval()
    for batch in batches:
        drawn = model.draw(dict(batch))
        for name in parts:
            images = model.pass_images(model.layout.passes[name], drawn)
            tokens = model.run_pass(name, images, drawn).float()
            parts[name].append(_sample(model, name, images, tokens, counts[name]))
            counts[name] += len(tokens)
    for method, name in wanted.items():
        classes, patches, places, grids = zip(*parts[name], strict=True)
        sampled = Sampled(torch.cat(classes), torch.cat(patches), torch.cat(places), grids[0])
        model.objectives[method].calibrate(sampled)
    follow(model.teachers.pairs, 0.0)
    model.train(was_training)
    return next(iter(counts.values()), 0)


def _sample(
    model: PretrainModel, name: str, images: Tensor, tokens_RTD: Tensor, before: int
) -> Sampled:
    """Return the class tokens and some patches of views, after so many views ``before``."""
    encoder = model.encoder
    if model.layout.passes[name].reference:
        assert model.reference is not None
        encoder = model.reference.module
    patches = tokens_RTD[:, encoder.num_prefix_tokens :]
    count = min(_PATCHES, patches.shape[1])
    first = torch.arange(count) * (patches.shape[1] // count)
    places = (first + torch.arange(before, before + len(patches))[:, None]) % patches.shape[1]
    places = places.to(patches.device)
    grid = encoder.grid_of(*images.shape[-2:])
    chosen = gather_tokens(patches, places).flatten(0, 1)
    return Sampled(tokens_RTD[:, 0], chosen, places.flatten(), grid)


def centre(layers: nn.Sequential, inputs_RD: Tensor) -> None:
    """Change an MLP of which these are inputs: standardised channels go in, and mean 0 comes out.

    The mean and deviation of the inputs become part of the first layer, and the mean of the outputs
    of the bias of the last one: no parameter is added.
    """
    first, last = layers[0], layers[-1]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    mean, deviation = inputs_RD.mean(0), inputs_RD.std(0).clamp_min(_SMALLEST)
    first.weight.div_(deviation)
    first.bias.sub_(first.weight @ mean)
    last.bias.sub_(layers(inputs_RD).mean(0))
