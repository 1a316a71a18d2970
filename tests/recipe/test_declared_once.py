"""Options of encoders, loaders, views and augmentation: declared once, beside the code."""

from dataclasses import MISSING, fields
from inspect import get_annotations, signature
from typing import Any

import pytest

from pospre.data.loader import build_loader
from pospre.data.loader_options import LoaderOptions
from pospre.data.opening import Source, open_reader
from pospre.data.reading import Reading
from pospre.data.views import augment_options, options
from pospre.nn.build import build_encoder
from pospre.nn.encoder_options import EncoderOptions
from pospre.recipe import inputs, monitoring, sections
from pospre.training.callbacks.bad_steps import LossSpikes
from pospre.training.callbacks.stalls import Stalls
from pospre.training.callbacks.watchers import Collapse, PositionShortcut
from pospre.training.optimizer.optim import parameter_groups


@pytest.mark.parametrize(
    ("section", "declaration", "own"),
    [
        (inputs.Encoder, EncoderOptions, {"name", *inputs.OF_WEIGHTS}),  # or weights
        (inputs.Data, Reading, {"path", "batch_size", "views", "mean", "std"}),
        (inputs.View, options.ViewOptions, {"augment"}),  # sections of their own
        (inputs.Augment, augment_options.Augment, {"rand_augment"}),
        (inputs.RandAugment, augment_options.RandAugment, set()),
    ],
)
def test_a_section_takes_over_every_option(section: Any, declaration: Any, own: set[str]) -> None:
    assert {*get_annotations(section)} == own
    declared = {field.name: field for field in fields(declaration)}
    assert declared.keys() | own == section.model_fields.keys()
    for name in declared.keys() - own:
        found = section.model_fields[name]
        assert found.is_required() == (declared[name].default is MISSING)
        assert found.is_required() or found.default == declared[name].default


@pytest.mark.parametrize(
    ("function", "declaration"),
    [(build_encoder, EncoderOptions), (build_loader, LoaderOptions), (open_reader, Source)],
)
def test_a_function_takes_what_is_declared(function: Any, declaration: Any) -> None:
    assert signature(function).parameters == signature(declaration).parameters
    for field in fields(declaration):
        assert f"    {field.name}: " in function.__doc__, field.name


@pytest.mark.parametrize(
    ("taker", "section", "count"),
    [
        (Collapse, monitoring.Collapse, 2),
        (LossSpikes, monitoring.LossSpikes, 3),
        (PositionShortcut, monitoring.PositionShortcut, 1),
        (Stalls, monitoring.Stalls, 3),
        (parameter_groups, sections.Optimizer, 5),
    ],
)
def test_what_is_used_without_a_recipe_has_its_defaults(
    taker: Any, section: Any, count: int
) -> None:
    given = signature(taker).parameters
    shared = [name for name in section.model_fields if name in given]
    assert len(shared) == count
    for name in shared:
        assert given[name].default == section.model_fields[name].default, name
