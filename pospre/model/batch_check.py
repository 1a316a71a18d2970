"""Check that a batch has the keys and shapes of the declared passes."""

from pospre.batch import Batch, image_key
from pospre.errors import UserError
from pospre.model.registry import Registry


def lacking(registry: Registry, key: str) -> UserError:
    """Return the error for a batch without ``key``."""
    if key in registry.writers:
        return UserError(
            f"the batch lacks '{key}', which algorithms.{registry.writers[key]} writes before the "
            "forward: call model(batch, progress=…), or pass algorithms=model.algorithms to the "
            "Trainer."
        )
    group = key.rpartition("/")[0]
    where = f", for views of the group '{group}'" if group else ""
    return UserError(
        f"the batch lacks '{key}'{where}; pospre.build_loader and pospre.from_images write it."
    )


def check_is_batch(batch: Batch) -> None:
    """Raise ``UserError`` if ``batch`` is not a batch, but for example images alone."""
    if not isinstance(batch, dict):
        raise UserError(
            "a PretrainModel takes a batch, a dict as made by pospre.from_images, not "
            f"{type(batch).__name__}. For tokens of whole images, call model.tokens(images)."
        )


def check_batch(registry: Registry, batch: Batch) -> None:
    """Raise ``UserError`` unless the passes' patches exist and views have the declared shape."""
    check_is_batch(batch)
    for declared in registry.passes.values():
        views, key = registry.views[declared.group], image_key(declared.group)
        shape = (views.count, registry.encoder.channels, *views.shape)
        if key in batch and batch[key].shape[1:] != shape:
            raise UserError(
                f"'{key}' has the shape {tuple(batch[key].shape)}, but the model needs (B, "
                f"{', '.join(map(str, shape))}): views, channels, height and width. Crop the "
                "images to this size, or make the encoder and the model for theirs."
            )
        for patches in (declared.visible, declared.context):
            if patches in registry.writers and patches not in batch:
                raise lacking(registry, patches)
