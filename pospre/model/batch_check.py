"""What a batch must hold for the passes that are declared, and the errors where it does not."""

from pospre.batch import Batch, image_key
from pospre.errors import UserError
from pospre.model.registry import Registry


def lacking(registry: Registry, key: str) -> UserError:
    """Return the error of a batch without ``key``, of an algorithm's or of a loader's."""
    if key in registry.writers:
        return UserError(
            f"the batch lacks '{key}', which algorithms.{registry.writers[key]} writes before the "
            "forward: call model(batch, progress=…), or give the Trainer "
            "algorithms=model.algorithms."
        )
    group = key.rpartition("/")[0]
    where = f", of the views of the group '{group}'" if group else ""
    return UserError(
        f"the batch lacks '{key}'{where}; pospre.build_loader writes it, and pospre.from_images."
    )


def check_is_batch(batch: Batch) -> None:
    """Raise ``UserError`` if ``batch`` is none, such as images alone."""
    if not isinstance(batch, dict):
        raise UserError(
            "a PretrainModel takes a batch, a dict as pospre.from_images makes it, and got "
            f"{type(batch).__name__}; the tokens of whole images are model.tokens(images)."
        )


def check_batch(registry: Registry, batch: Batch) -> None:
    """Raise ``UserError`` unless the passes' patches are there, and views are as declared."""
    check_is_batch(batch)
    for declared in registry.passes.values():
        views, key = registry.views[declared.group], image_key(declared.group)
        shape = (views.count, registry.encoder.channels, *views.shape)
        if key in batch and batch[key].shape[1:] != shape:
            raise UserError(
                f"'{key}' has the shape {tuple(batch[key].shape)}, but the model was made for "
                f"(B, {', '.join(map(str, shape))}): views, channels, height and width. Cut "
                "the images to that size, or make encoder and model for theirs."
            )
        for patches in (declared.visible, declared.context):
            if patches in registry.writers and patches not in batch:
                raise lacking(registry, patches)
