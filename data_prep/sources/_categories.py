"""Common code of COCO and iNaturalist: a JSON of images, annotations and categories per split."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from data_prep.files.tree import Tree
from pospre.errors import UserError

WHAT = "the images and their categories"


@contextmanager
def expecting(where: str, keys: str) -> Iterator[None]:
    """Turn errors of code that reads a JSON into a message about its form.

    Raises:
        UserError: names ``where`` and the expected ``keys``.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{where} is not as expected, with {keys} ({type(error).__name__}: {error})."
        ) from error


def read_split(
    tree: Tree, path: str, train: str
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Return a split's JSON, the training split's categories by id, and a stamp of both files.

    Raises:
        UserError: a file is missing or not JSON; the split has a category that the training split
            lacks or names differently.
    """
    content = tree.json(path, WHAT)
    with expecting(f"{tree.root}: {path}", "images, annotations and categories"):
        own = content.get("categories", [])
        of_train = own if train == path else tree.json(train, WHAT).get("categories") or own
        categories = {category["id"]: category for category in of_train}
        # a split may list only the categories that occur in it
        for category in own:
            number, name = category["id"], category["name"]
            if number not in categories or categories[number]["name"] != name:
                told = f"calls {categories[number]['name']!r}" if number in categories else "lacks"
                raise UserError(
                    f"{tree.root}: {path}: the training split {told} the category {number} "
                    f"({name!r})."
                )
        in_order = sorted(of_train, key=lambda category: category["id"])
    stamp = " ".join(tree.need(name, WHAT).stamp for name in sorted({path, train}))
    return content, in_order, stamp
