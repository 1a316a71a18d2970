"""Heads that are fitted, before the first step, to the tokens of published weights.

Published encoders come without heads, and tokens of a trained encoder share a direction and differ
in scale between channels. A new head keeps that direction, so all images are alike to it.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pospre.batch import Batch
from pospre.model.model import PretrainModel
from pospre.model.teacher import follow

NUM_VIEWS = 1024
_PATCHES = 16  # of each view
_SMALLEST = 1e-6


def calibrated(model: PretrainModel) -> dict[str, str]:
    """Return the pass that each method's head is fitted to, by the method's name."""
    uses = model.layout.uses
    return {name: each.calibrates for name, each in uses.items() if each.calibrates is not None}


@torch.no_grad()
def calibrate(model: PretrainModel, batches: Iterable[Batch]) -> int:
    """Fit the heads to the tokens of these samples, in closed form; return the number of views."""
    wanted, was_training = calibrated(model), model.training
    classes: dict[str, list[Tensor]] = {name: [] for name in wanted.values()}
    patches: dict[str, list[Tensor]] = {name: [] for name in wanted.values()}
    model.eval()
    for batch in batches:
        drawn = model.draw(dict(batch))
        for name in classes:
            images = model.pass_images(model.layout.passes[name], drawn)
            tokens = model.run_pass(name, images, drawn).float()
            prefix = model.encoder.num_prefix_tokens
            step = max(1, (tokens.shape[1] - prefix) // _PATCHES)
            classes[name].append(tokens[:, 0])
            patches[name].append(tokens[:, prefix::step].flatten(0, 1))
    for method, name in wanted.items():
        objective = model.objectives[method]
        objective.calibrate(torch.cat(classes[name]), torch.cat(patches[name]))
    follow(model.teachers.pairs, 0.0)
    model.train(was_training)
    return sum(len(each) for each in next(iter(classes.values()), []))


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
