"""Reading YAML as expected: ``1e-4`` is a number, repeated keys are errors, ${ENV:default}."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from pospre.errors import UserError
from pospre.text_lists import decode_text

VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::([^{}]*))?\}")
_KEY_PART = re.compile(r"(?:(?<=^algorithms\.)|(?<=^encoder\.positions\.))[\w.]+:[^.]+|[^.]+")
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")
_GLUED = re.compile(r"\w+:(?:[^A-Za-z_].*|true|false|null)")  # package.module:Class is one key
_RANGE = re.compile(r"-?\d+\.\.-?\d+")
_NOT_IN_PATHS = re.compile("[\0\ud800-\udfff]")
LARGEST = 1 << 18  # bytes of a recipe
_BITS = 63  # of an integer: larger ones overflow later
_QUOTED = 40  # characters of a value in a message
_MOST_VALUES = 100_000  # of a text, including repetitions by aliases


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, but ``1e-4`` is a float and repeated keys are errors.

    It also refuses texts that are short but expand without limit by nested aliases.
    """

    def get_single_node(self) -> yaml.Node | None:
        root = super().get_single_node()
        _count_values(root, {})
        return root

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        line = node.start_mark.line + 1
        try:
            value = super().construct_object(node, deep=deep)
        except (UserError, yaml.YAMLError):
            raise
        except (ValueError, ArithmeticError, LookupError, AttributeError):
            # from PyYAML's constructors, which assume valid text
            text, kind = str(node.value), node.tag.rpartition(":")[2]
            raise UserError(
                f"line {line}: {text[:_QUOTED]}{'…' * (len(text) > _QUOTED)} is not a valid "
                f"{kind}; put text in quotes"
            ) from None
        if isinstance(value, int) and value.bit_length() > _BITS:
            raise UserError(f"line {line}: an integer of more than {_BITS} bits")
        if isinstance(value, str) and _NOT_IN_PATHS.search(value):
            raise UserError(f"line {line}: a text with a NUL character or half of a UTF-16 pair")
        return value

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                line = key_node.start_mark.line + 1
                raise UserError(f"line {line}: a key must be plain text (a variable is ${{NAME}})")
            if node.flow_style and not value_node.value and _GLUED.fullmatch(key_node.value):
                line, right = key_node.start_mark.line + 1, key_node.value.replace(":", ": ", 1)
                raise UserError(
                    f"line {line}: '{key_node.value}' needs a space after the colon: {{{right}}}"
                )
            if key_node.value in seen:
                line = key_node.start_mark.line + 1
                raise UserError(f"key '{key_node.value}' is given twice (line {line})")
            seen.add(key_node.value)
        return node


def _count_values(node: yaml.Node | None, known: dict[yaml.Node, int]) -> int:
    """Return the number of values in a node; ``known`` are those counted before.

    Raises:
        UserError: they are too many, or it contains an alias of itself.
    """
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if node not in known:
        known[node] = _MOST_VALUES + 1  # found again by an alias of itself
        parts = node.value
        if isinstance(node, yaml.MappingNode):
            parts = [part for _, part in parts]
        known[node] = 1 + sum(_count_values(part, known) for part in parts)
    if known[node] > _MOST_VALUES:
        raise UserError(
            f"line {node.start_mark.line + 1}: more than {_MOST_VALUES} values (each use of an "
            "alias *name counts), or an alias of itself; a recipe has a few dozen"
        )
    return known[node]


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str, source: str) -> Any:
    """Return the value of a YAML text; ``source`` names it in errors."""
    try:
        return yaml.load(text, Loader=_Loader)  # a subclass of the safe loader
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the scanner raises the last two
        raise UserError(f"{source} is not valid YAML: {error}") from None
    except RecursionError:
        raise UserError(f"{source} is nested too deeply for a recipe") from None


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, as written (no variables resolved)."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
        if len(content) > LARGEST:
            raise UserError(f"{path} is not a recipe: it has more than {LARGEST >> 10} KiB of text")
        return parse_mapping(decode_text(content), path)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"recipe {path} does not exist") from None
    except (OSError, ValueError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from None


def parse_mapping(text: str, path: Path) -> dict[str, Any]:
    """Return the mapping in the text of a YAML file, as written (no variables resolved)."""
    data = parse(text, f"recipe {path}")
    if not isinstance(data, dict):
        raise UserError(f"recipe {path} must hold sections such as 'data:' and 'encoder:'")
    return data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Write ``key.sub=value`` items into ``data``; values are parsed as YAML.

    ``algorithms.mae=null`` removes MAE, as in a recipe that extends another one.
    """
    for item in overrides:
        key, equals, text = item.partition("=")
        if key[:1] in ("+", "~"):
            right = f"{key[1:]}=null" if key[0] == "~" else item.lstrip("+")
            raise UserError(f"'{item}': keys are written without '{key[0]}', as {right}")
        if _RANGE.fullmatch(text):
            raise UserError(
                f"override {item}: a run has one value; python -m pospre.sweep RECIPE {key}=0,1,2 "
                "trains one run for each"
            )
        if not equals or not key or "" in key.split("."):
            raise UserError(
                f"'{item}' is not an override; write for instance trainer.max_duration=2ep"
            )
        *parents, last = key_parts(key)
        section = data
        for parent in parents:
            if section.get(parent) is None:
                section[parent] = {}
            section = section[parent]
            if not isinstance(section, dict):
                raise UserError(f"override {item}: '{parent}' is a value and has no keys")
        value = parse(text, f"override {item}")
        if parents:
            write(section, last, value, within=parents[-1])
        else:
            section[last] = value


def key_parts(key: str) -> list[str]:
    """Return the parts of a dotted key; ``package.module:Class`` of ``algorithms`` is one."""
    return _KEY_PART.findall(key)


def write(section: dict[str, Any], key: str, value: Any, *, within: str) -> None:
    """Write a value into the section ``within``; null removes a section.

    Under ``callbacks`` null is kept, because it turns off a callback that is on by default.
    """
    if value is None and isinstance(section.get(key), dict) and within != "callbacks":
        del section[key]
    else:
        section[key] = value


def variables(value: Any) -> list[str]:
    """Describe for each variable in a value whether the environment or its default sets it."""
    names = [match[1] for match in VARIABLE.finditer(str(value))]
    return [f"{'environment' if name in os.environ else 'default of'} ${name}" for name in names]


def set_variables(value: Any) -> list[str]:
    """Return the names of the variables in a value that the environment sets."""
    names = (match[1] for match in VARIABLE.finditer(str(value)))
    return [name for name in dict.fromkeys(names) if name in os.environ]


def resolve_variables(value: Any, key: str = "") -> Any:
    """Return ``value`` with every ``${NAME}`` or ``${NAME:default}`` in its strings filled in.

    A string that is a single variable gets the YAML type of its content.
    """
    if isinstance(value, dict):
        return {k: resolve_variables(v, f"{key}.{k}" if key else str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [resolve_variables(item, f"{key}[{i}]") for i, item in enumerate(value)]
    if not isinstance(value, str) or "${" not in value:
        return value

    def fill(match: re.Match[str]) -> str:
        text = os.environ.get(match[1], match[2])
        if text is None:
            raise UserError(
                f"{key}: environment variable {match[1]} is not set and '{value}' has no default; "
                f"export {match[1]}=… or pass {key}=… on the command line"
            )
        return text

    filled = VARIABLE.sub(fill, value)
    return parse(filled, f"{key} ('{value}')") if VARIABLE.fullmatch(value) else filled
