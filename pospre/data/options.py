"""What a loader is asked for: refused where it cannot be, with what would do."""

from dataclasses import replace

from pospre.data.batches import BAD_SAMPLES
from pospre.data.stores.reader import Reader
from pospre.data.views.plan import ViewGroup
from pospre.errors import UserError, suggestion


def check_options(
    batch_size: int, num_workers: int | None, repeats: int, bad_samples: str, tolerance: float
) -> None:
    """Raise a UserError about a number or policy that makes no sense."""
    if batch_size < 1:
        raise UserError(f"batch_size is {batch_size}; it must be at least 1.")
    if num_workers is not None and num_workers < 0:
        raise UserError(
            f"num_workers is {num_workers}; it counts decoding threads, 0 for none of their own."
        )
    if repeats < 1:
        raise UserError(f"repeats is {repeats}; each sample comes at least once.")
    if bad_samples not in BAD_SAMPLES:
        hint = suggestion(bad_samples, BAD_SAMPLES)
        raise UserError(f"bad_samples '{bad_samples}' is unknown.{hint}")
    if tolerance < 0:
        raise UserError(f"tolerance is {tolerance}; give grey levels of 255, 0 for none.")


def whole_view(group: ViewGroup, reader: Reader) -> ViewGroup:
    """Return a group of whole, unflipped views, as features are neither cropped nor mirrored."""
    assert reader.features is not None
    shape = reader.features.shape
    if group.shape != shape:
        raise UserError(
            f"{reader.address} holds features of {shape[0]} x {shape[1]}, but the views of "
            f"'{group.name}' are {group.shape[0]} x {group.shape[1]}. Set encoder.image_size: "
            f"{list(shape)}."
        )
    if not group.augment.is_off:
        raise UserError(
            f"{reader.address} holds features, but data.views.{group.name}.augment changes images. "
            "Leave it out."
        )
    return replace(group, crop="full", flip_rate=0.0)
