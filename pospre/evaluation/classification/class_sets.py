"""Which of a model's classes the folders of another data set stand for."""

import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pospre.data.opening import open_reader
from pospre.data.stores.reader import Reader
from pospre.errors import UserError
from pospre.evaluation.features import open_labelled


class ClassSet(NamedTuple):
    """A data set whose classes are some of a model's.

    Attributes:
        path: where it is.
        right: bool (L, C): which of the model's C classes are right for each of its L labels.
        possible: bool (C,): which of them an answer is taken from.
    """

    path: str
    right: Tensor
    possible: Tensor


def open_class_set(path: str, known: list[str], lists: str | None) -> ClassSet:
    """Return a data set with what its labels stand for.

    A folder stands for the class of its name (ImageNet-A, -R and -Sketch: WordNet ids), or, where
    all names are numbers and no class is called so, for the class of that number (ImageNet-V2);
    answers are taken from the classes that have a folder, as the 200 of ImageNet-A and -R. Folders
    that ``lists`` names stand for several classes (SI-Score, ObjectNet), and answers are taken from
    all.

    Args:
        path: the data set, one folder for each class.
        known: the model's class names by number.
        lists: JSON file, ``{"folder": ["class", …], …}``, names or numbers of classes.

    Raises:
        UserError: there are no labels, a folder stands for no class, or the file is no such JSON.
    """
    reader = open_labelled(path)
    if reader.classes is None:
        raise UserError(f"the labels of {path} have no names; give one folder per class.")
    what = 'JSON object of lists of classes, such as {"folder": ["n01440764", "n01443537"]}'
    kind = dict[str, list[str | int]]
    named = {} if lists is None else _read_json("lists", lists, kind, what)
    numbers = {name: number for number, name in enumerate(known)}
    if not set(reader.classes) & numbers.keys() and all(n.isdecimal() for n in reader.classes):
        numbers = {str(number): number for number in range(len(known))}
    right = torch.zeros(len(reader.classes), len(known), dtype=torch.bool)
    for label, folder in enumerate(reader.classes):
        for name in named.get(folder, [folder]):
            number = numbers.get(name, name) if isinstance(name, str) else name
            if not isinstance(number, int) or not 0 <= number < len(known):
                raise UserError(
                    f"the folder '{folder}' of {path} stands for the class {name!r}, which is none "
                    f"of the {len(known)} that the head knows ({known[0]} …); name folders as the "
                    "training data's classes, or say in lists=FILE.json what they stand for."
                )
            right[label, number] = True
    listed = any(folder in named for folder in reader.classes)
    return ClassSet(path, right, torch.ones(len(known)).bool() if listed else right.any(0))


def outlier_classes(path: str | None, known: list[str]) -> Tensor:
    """Return bool (C,): the known classes that outliers' folders are called; all if none is."""
    called = set() if path is None else {*(open_reader(path).classes or ())}
    found = torch.tensor([name in called for name in known])
    return found if bool(found.any()) else ~found


def read_reassessed(path: str, data: Reader, count: int) -> Tensor:
    """Return which classes are right for every image of ImageNet's validation set: bool (M, C).

    Args:
        path: JSON file of Beyer et al. (2020, arXiv 2006.07159): a list of numbers of classes for
            each image, in the order of the numbers in the files' names.
        data: the images; the last number in a file's name, from 1, is the image's.
        count: of classes, C.

    Raises:
        UserError: the file is no such list, or an image's number is not in it.
    """
    number = Annotated[int, Field(ge=0, lt=count)]
    what = f"JSON list with a list of numbers of classes, from 0 to {count - 1}, for each image"
    found = _read_json("reassessed", path, list[list[number]], what)
    right = torch.zeros(len(data), count, dtype=torch.bool)
    for index in range(len(data)):
        name = data.about(index)[1]
        digits = re.findall(r"\d+", name.rpartition("/")[2])
        if not digits or not 1 <= int(digits[-1]) <= len(found):
            raise UserError(
                f"reassessed={path} lists {len(found)} images by the numbers in their "
                f"names, and {data.name(index)} has none of these; give ImageNet's validation "
                "images as a folder or MDS shards."
            )
        right[index, found[int(digits[-1]) - 1]] = True
    return right


def _read_json(key: str, path: str, kind: Any, what: str) -> Any:
    """Return what is in the file of setting ``key``, of a type that ``what`` has in words."""
    try:
        return TypeAdapter(kind).validate_json(Path(path).read_bytes(), strict=True)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read ({error}).") from error
    except ValidationError:
        raise UserError(f"{key}={path} is no {what}.") from None
