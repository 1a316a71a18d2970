"""What pixels and features are normalised by: given, or noted by the data set."""

from pospre.data.stores.reader import Features, Reader
from pospre.errors import UserError
from pospre.recipe.recipe import Recipe

_MEASURE = "python -m data_prep.statistics"


def with_statistics(recipe: Recipe, reader: Reader) -> Recipe:
    """Return the recipe with what a data set notes about its numbers written out.

    So checkpoints hold it, and other data, such as those held out, are normalised alike.

    Raises:
        UserError: the encoder is for images and the data are features; or images of other than
            three channels have no mean and standard deviation.
    """
    channels, features = recipe.encoder.channels, reader.features
    if features is not None and channels != 1:
        raise UserError(
            f"encoder.channels = {channels}, but {reader.address} holds features, which have 1"
        )
    data = recipe.data
    given = {"mean": data.mean, "std": data.std}
    noted = features or reader.noted
    # of other channels than were stored, they say nothing
    if isinstance(noted, Features) or (noted is not None and channels == noted.channels != 3):
        given = {key: given[key] or getattr(noted, key) or None for key in given}
    count = channels if features is None else features.shape[1]
    for key, numbers in given.items():
        if numbers is not None and len(numbers) not in (1, count):
            raise UserError(f"data.{key} has {len(numbers)} numbers; give one, or {count}")
    if features is None and channels != 3 and None in given.values():
        raise UserError(
            f"data.mean and data.std: {reader.address} holds images and notes none for "
            f"encoder.channels = {channels}; give {channels} number(s) each (`{_MEASURE} "
            f"{reader.address} --channels {channels}` measures them), or convert with --channels "
            f"{channels}."
        )
    return recipe.model_copy(update={"data": data.model_copy(update=given)})
