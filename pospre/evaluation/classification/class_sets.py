"""Mapping of a data set's labels to the classes of a model's head, by their names."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from pospre.algorithms.supervised.supervised import Classification
from pospre.data.opening import open_reader
from pospre.data.stores.reader import Reader
from pospre.errors import UserError
from pospre.evaluation.features import open_labelled, require_labels
from pospre.evaluation.registry import Plan
from pospre.model.algorithm import method_of
from pospre.recipe.recipe import Recipe
from pospre.untrusted_json import parse_json


class HeadClasses(NamedTuple):
    """The C classes of a head, and what the labels of a data set mean to it.

    Attributes:
        names: of the classes; numbers where they are not known.
        of_label: int64 (L,): the class of each label; None: a label is the number of a class.
    """

    names: list[str]
    of_label: Tensor | None

    def numbers(self, label_B: Tensor, data: str) -> Tensor:
        """Return the classes of labels, int64 (B,); ``UserError`` if the head has no such class."""
        count = len(self.names if self.of_label is None else self.of_label)
        check_labels(label_B, count, data)
        return label_B if self.of_label is None else self.of_label.to(label_B.device)[label_B]


def check_labels(label_B: Tensor, count: int, data: str) -> None:
    """Raise a ``UserError`` if an image has no label, or one from ``count`` on."""
    require_labels(label_B, data)
    if int(label_B.max()) >= count:
        raise UserError(
            f"{data} has a label {int(label_B.max())}, but there are {count} classes, numbered "
            "from 0; give data with the classes of the training data."
        )


def match_classes(plan: Plan) -> HeadClasses:
    """Return the head's classes, and which of them the labels of the measured data mean.

    They are matched by name, and the data may have some of the classes only. By number only if
    the names of one or the other are not known, which a line says.

    Raises:
        UserError: a class of the data is not among the head's, or the numbers differ.
    """
    data, known = open_labelled(plan.data), plan.recipe.trained_on.classes
    names, own = head_names(plan.recipe), data.classes
    if own is not None and (known or {*own} <= {*names}):
        numbers = _numbers(own, names)
        unknown = [name for name in own if name not in numbers]
        if unknown:
            raise UserError(
                f"the class '{unknown[0]}' of {plan.data} is not among the {len(names)} that the "
                f"model was trained on ({_some(names)}); give data with folders of these names."
            )
        if len(own) < len(names):
            print(
                f"{plan.name}: {plan.data} has {len(own)} of the head's {len(names)} classes; "
                "all of them are possible answers",
                file=sys.stderr,
            )
        return HeadClasses(names, torch.tensor([numbers[name] for name in own]))
    if own is not None and len(own) != len(names):
        raise UserError(
            f"{plan.data} has {len(own)} classes, but the head has {len(names)}; the names of "
            "the training classes are not known, so the data needs a folder for each of them."
        )
    where = plan.data if known else "the training data"
    print(
        f"warning: {plan.name}: the classes of {where} have no names, so labels are compared by "
        "number",
        file=sys.stderr,
    )
    return HeadClasses(names if own is None else [*own], None)


def head_names(recipe: Recipe) -> list[str]:
    """Return the names of a head's classes; those without one are called by their number."""
    _, options = method_of(recipe.algorithms, Classification) or ("", {})
    known = recipe.trained_on.classes or ()
    count = options["num_classes"] or len(known)
    return [*known[:count], *map(str, range(len(known), count))]


def _numbers(own: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Return the number of each class by name; by number, if all that are found are numbers."""
    numbers = {name: number for number, name in enumerate(names)}
    if not {*own} & numbers.keys() and all(name.isdecimal() for name in own):
        numbers = {str(number): number for number in range(len(names))}
    return numbers


def _some(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:3]) + (" …" if len(names) > 3 else "")


class ClassSet(NamedTuple):
    """A data set whose classes are a subset of a model's.

    Attributes:
        path: the data set.
        right: bool (L, C): the model's C classes that are right for each of its L labels.
        possible: bool (C,): the classes that predictions are restricted to.
    """

    path: str
    right: Tensor
    possible: Tensor


def open_class_set(path: str, known: list[str], lists: str | None) -> ClassSet:
    """Return a data set with the meaning of its labels.

    A folder is matched to the class of the same name (ImageNet-A, -R and -Sketch: WordNet ids). If
    all names are numbers and no class has such a name, it is matched by number (ImageNet-V2).
    Predictions are restricted to classes with a folder, such as the 200 of ImageNet-A and -R. With
    ``lists``, a folder may match several classes (SI-Score, ObjectNet), and predictions are not
    restricted: a JSON file ``{"folder": ["class", …], …}`` with names or numbers of classes.
    """
    reader = open_labelled(path)
    if reader.classes is None:
        raise UserError(f"the labels of {path} have no names; give one folder per class.")
    what = 'JSON object of lists of classes, such as {"folder": ["n01440764", "n01443537"]}'
    kind = dict[str, list[str | int]]
    named = {} if lists is None else _read_json("lists", lists, kind, what)
    numbers = _numbers(reader.classes, known)
    right = torch.zeros(len(reader.classes), len(known), dtype=torch.bool)
    for label, folder in enumerate(reader.classes):
        for name in named.get(folder, [folder]):
            number = numbers.get(name, name) if isinstance(name, str) else name
            if not isinstance(number, int) or not 0 <= number < len(known):
                raise UserError(
                    f"the folder '{folder}' of {path} matches the class {name!r}, which is not "
                    f"among the head's {len(known)} classes ({known[0]} …); name folders like the "
                    "classes of the training data, or map them with lists=FILE.json."
                )
            right[label, number] = True
    listed = any(folder in named for folder in reader.classes)
    return ClassSet(path, right, torch.ones(len(known)).bool() if listed else right.any(0))


def outlier_classes(path: str | None, known: list[str]) -> Tensor:
    """Return bool (C,): classes with an outlier folder of the same name; all if there is none."""
    called = set() if path is None else {*(open_reader(path).classes or ())}
    among = torch.tensor([name in called for name in known])
    return among if bool(among.any()) else ~among


def read_reassessed(path: str, data: Reader, count: int) -> Tensor:
    """Return the right classes of every image of ImageNet's validation set: bool (M, C).

    The JSON file is that of Beyer et al. (2020, arXiv 2006.07159): a list of class numbers for each
    image, in the order of the last number in the files' names, counted from 1.
    """
    number = Annotated[int, Field(ge=0, lt=count)]
    what = f"JSON list with a list of class numbers, from 0 to {count - 1}, for each image"
    numbers = _read_json("reassessed", path, list[list[number]], what)
    right = torch.zeros(len(data), count, dtype=torch.bool)
    for index in range(len(data)):
        name = data.about(index)[1]
        digits = re.findall(r"\d+", name.rpartition("/")[2])
        if not digits or not 1 <= int(digits[-1]) <= len(numbers):
            raise UserError(
                f"reassessed={path} lists {len(numbers)} images by the numbers in their names, but "
                f"{data.name(index)} has none of these; give ImageNet's validation images as a "
                "folder or MDS shards."
            )
        right[index, numbers[int(digits[-1]) - 1]] = True
    return right


def _read_json(key: str, path: str, kind: Any, what: str) -> Any:
    """Return the content of setting ``key``'s file, of a type that ``what`` describes."""
    try:
        return TypeAdapter(kind).validate_python(parse_json(Path(path).read_bytes()), strict=True)
    except OSError as error:
        raise UserError(f"{key}={path} cannot be read ({error}).") from error
    except ValidationError:
        raise UserError(f"{key}={path} is not a {what}.") from None
    except ValueError as error:
        raise UserError(f"{key}={path} is not a {what} ({error}).") from error
