"""A run's reference: opened from published weights, kept in the run's folder, and read from there.

Who continues a run must compare with the same encoder as before. So the first start stores its
tensors as they are used, every checkpoint has their hash, and a resumed run reads the copy.
"""

import json
import os
from dataclasses import asdict, replace
from typing import Any, get_args

import torch
from composer.utils import dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from pospre.atomic_file import write_atomic
from pospre.collectives import from_rank_zero, print_once
from pospre.command_line import weights_hint
from pospre.errors import UserError
from pospre.model.model import PretrainModel
from pospre.model.reference import Reference
from pospre.nn.build import build_encoder
from pospre.nn.positions.scheme import Resampling
from pospre.nn.positions.table import Table
from pospre.nn.sizes import pair
from pospre.nn.weights.address import bare_address
from pospre.nn.weights.timm_models import PREFIX
from pospre.object_store import Bucket, is_remote
from pospre.recipe.inputs import Encoder
from pospre.recipe.recipe import Recipe
from pospre.run.checkpoints.folders import checkpoints_of
from pospre.run.checkpoints.reading import open_checkpoint, recorded_section
from pospre.run.folder import REFERENCE, starts_over
from pospre.run.resume import compare_tensors
from pospre.training.build import model_of
from pospre.training.foreign import Shown, open_foreign
from pospre.training.start_encoder import with_encoder
from pospre.training.weight_files import Keys, is_weights_file
from pospre.untrusted_json import parse_object

START = "start"
_KEYS = Keys("reference.weights = ", "reference.weights_from")


def with_encoders(recipe: Recipe) -> Recipe:
    """Return a recipe whose encoder has a name, and whose reference is described.

    Raises:
        UserError: weights cannot be read, do not show an encoder, or contradict a key.
    """
    recipe = with_encoder(recipe)
    if recipe.reference is None or recipe.reference.encoder is not None:
        return recipe
    given_shape = None
    if not starts_over(recipe):
        sections = (recorded_section(each.uri, "reference") for each in checkpoints_of(recipe))
        given_shape = next((section["encoder"] for section in sections if section), None)
    if given_shape is None:
        opened, name = _opened(recipe)
        options = opened.encoder.options
        given_shape = asdict(replace(options, name=name or options.name))
    kept = recipe.reference.model_copy(update={"encoder": Encoder.model_validate(given_shape)})
    return recipe.model_copy(update={"reference": kept})


def open_reference(recipe: Recipe, *, resumes: bool) -> PretrainModel | None:
    """Return the recipe's reference as a model without methods, if there is one.

    Args:
        recipe: see ``with_encoders``.
        resumes: read the copy in the run's folder, if there is one.

    Raises:
        UserError: the weights cannot be read, or are not those that the run began with.
    """
    options = recipe.reference
    if options is None:
        return None
    content = from_rank_zero(lambda: _stored(recipe)) if resumes and options.store else None
    if content is None:
        return _opened(recipe)[0]
    reference = _restored(content, recipe)
    address = _source(recipe)[0]
    file = address.partition(",")[2] if address.startswith(PREFIX) else address
    path = bare_address(file)
    if is_remote(path):
        return reference
    if not os.path.lexists(path):
        print_once(f"reference: {path} is gone; the run continues with its own copy")
    elif (now := _hash(_opened(recipe)[0])) != (before := _hash(reference)):
        raise UserError(
            f"reference.weights = {options.weights}: {path} has changed since the run began: the "
            f"hash of its tensors is {now}, and was {before}. Put the earlier file back; or move "
            "this one away, as the run has its own copy; or choose another run_name"
        )
    return reference


def store_reference(recipe: Recipe, reference: Reference | None) -> None:
    """Write the tensors of a new run's reference into its folder and its bucket, on rank 0."""
    if reference is None or recipe.reference is None or not recipe.reference.store:
        return
    if dist.get_global_rank() > 0:
        return
    encoder, about = reference.module, {}
    if isinstance(encoder.positions, Table):
        about = {"grid": encoder.positions.grid, "resampling": encoder.positions.resampling}
    tensors = {key: each.detach().contiguous() for key, each in encoder.state_dict().items()}
    tensors |= {key: getattr(reference.augment, key).flatten() for key in ("mean", "std")}
    content = save(tensors, {"table": json.dumps(about)})
    write_atomic(recipe.run_path() / REFERENCE, content)
    if is_remote(recipe.checkpoint_folder()):
        with Bucket(recipe.checkpoint_folder()) as bucket:
            bucket.put(REFERENCE, content)


def _source(recipe: Recipe) -> tuple[str, Any]:
    """Return the address of the reference's weights, and which encoder is meant."""
    options, encoder = recipe.reference, recipe.encoder
    assert options is not None
    if options.weights != START:
        return options.weights, options.weights_from
    if encoder.weights is None:
        raise UserError(
            "reference.weights = start is the encoder that encoder.weights gives, but there are "
            "none: it would be a copy of random weights. Set encoder.weights."
        )
    return encoder.weights, encoder.weights_from


def _opened(recipe: Recipe) -> tuple[PretrainModel, str]:
    """Return the published encoder as a model, and its name if that is not its options'."""
    address, which = _source(recipe)
    if address.startswith(PREFIX) and "," not in address:
        raise UserError(
            f"reference.weights = {address} has random weights. Give {address},FILE for those of a "
            "file."
        )
    if not address.startswith(PREFIX) and not is_weights_file(address):
        if not os.path.lexists(address) and not is_remote(address):
            raise UserError(
                f"reference.weights = {address} does not exist. Give start, a file of weights, or "
                f"a run{weights_hint(address)}."
            )
        return model_of(open_checkpoint(address), weights=which)[0], ""
    with torch.random.fork_rng(devices=[]):
        foreign = open_foreign(address, which, _KEYS, shown=Shown(channels=recipe.encoder.channels))
        if not foreign.model.encoder.positions.takes_any_grid:  # its table gets that of the views
            shown = Shown(pair(recipe.encoder.image_size), channels=recipe.encoder.channels)
            foreign = open_foreign(address, which, _KEYS, shown=shown)
    return foreign.model, foreign.name


def _hash(model: PretrainModel) -> str:
    return Reference.of(model).sha256


def _stored(recipe: Recipe) -> bytes | None:
    """Return the copy in the run's folder or its bucket; None: there is none."""
    path = recipe.run_path() / REFERENCE
    if path.is_file():
        return path.read_bytes()
    if is_remote(recipe.checkpoint_folder()):
        with Bucket(recipe.checkpoint_folder()) as bucket:
            return bucket.find(REFERENCE)
    return None


def _restored(content: bytes, recipe: Recipe) -> PretrainModel:
    """Return the model of a stored copy; ``UserError`` if it is damaged, or another encoder."""
    assert recipe.reference is not None and recipe.reference.encoder is not None
    name = str(recipe.run_path() / REFERENCE)
    with torch.random.fork_rng(devices=[]):
        encoder = build_encoder(**recipe.reference.encoder.arguments())
    try:
        tensors = load(content)
        header = parse_object(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = parse_object(header["__metadata__"]["table"])
        pixels: dict[str, Tensor] = {key: tensors.pop(key) for key in ("mean", "std")}
        if about and isinstance(encoder.positions, Table):
            rows, columns = about["grid"]
            encoder.positions.make_room((int(rows), int(columns)))
            assert about["resampling"] in get_args(Resampling)
            encoder.positions.resampling = about["resampling"]
    except (SafetensorError, ValueError, LookupError, TypeError, AssertionError) as error:
        raise UserError(
            f"{name} is damaged ({error}). Delete it: the run then reads reference.weights again"
        ) from error
    compare_tensors(encoder.state_dict(), tensors, name)
    encoder.load_state_dict(tensors)
    numbers = {key: each.tolist() for key, each in pixels.items()}
    return PretrainModel(encoder, mean=numbers["mean"], std=numbers["std"])
