"""The results of any evaluation as text, under the names that its JSON has."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pospre.evaluation.figures import error_of
from pospre.evaluation.registry import (
    DIFFERENCE,
    OVER_START,
    START,
    UNTRAINED,
    default_settings,
    figures_of,
    summary,
)
from pospre.output import format_table

_WIDTH = 98
_LONGEST = 4  # numbers in a cell; longer lists are only in the JSON


def results_table(name: str, results: Mapping[str, Any]) -> str:
    """Return the results of evaluation ``name``: its lists, then its figures, then all others.

    A list of mappings is a table. Figures are the numbers that are neither counts nor settings,
    with standard errors and, if measured, the untrained model's and the difference to it.
    """
    settings = default_settings(name)
    own = {key: value for key, value in results.items() if not _belongs(key, results)}
    figures = [
        key for key, value in own.items() if isinstance(value, float) and key not in settings
    ]
    main = [key for key in figures_of(name) if key in figures]
    rows = [
        [
            *(key, _cell(results, key), _cell(results, f"{START}{key}"), _over_start(results, key)),
            *(_cell(results, each) for each in (f"{UNTRAINED}{key}", f"{key}{DIFFERENCE}")),
        ]
        for key in [*main, *(key for key in figures if key not in main)]
    ]
    lists = {key: value for key, value in results.items() if _is_table(value)}
    rest = {key: own[key] for key in own if key not in figures and key not in lists}
    header = ["figure", "value", "start", "gain over it", "untrained", "difference"]
    shown = [n for n in range(len(header)) if n < 2 or any(row[n] != "–" for row in rows)]
    header, *rows = ([line[n] for n in shown] for line in (header, *rows))
    tables = [list_table(key, value) for key, value in lists.items() if len(_columns(value)) > 1]
    title = f"{name}: {summary(name)}"
    return "\n\n".join([*tables, format_table(title, header, rows, _notes(rest))])


def _belongs(key: str, results: Mapping[str, Any]) -> bool:
    """Return whether a value is part of another row: an error, or the untrained model's."""
    other = key.removesuffix("_se").removesuffix(DIFFERENCE).removesuffix(OVER_START)
    other = other.removeprefix(UNTRAINED).removeprefix(START)
    return key == "standard_error" or (other != key and other in results)


def _over_start(results: Mapping[str, Any], key: str) -> str:
    """Return the difference to the start with its paired error."""
    change = results.get(f"{key}{OVER_START}")
    if change is None:
        return "–"
    return f"{change['difference']:+.3g}" + (
        "" if change["se"] is None else f" ± {change['se']:.2g}"
    )


def _is_table(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def list_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of mappings; what does not fit into a cell is left out.

    If there are several rows per layer, layers are the columns, without standard errors.
    """
    keys = _columns(rows)
    layers = sorted({row["layer"] for row in rows}) if "layer" in keys else []
    if 1 < len(layers) < len(rows):
        return _by_layer(title, rows, keys, layers)
    return format_table(title, keys, [[_cell(row, key) for key in keys] for row in rows])


def _by_layer(
    title: str, rows: Sequence[Mapping[str, Any]], keys: Sequence[str], layers: Sequence[int]
) -> str:
    """Return a table with a line per figure and labels, the values that are no numbers."""
    labels = [key for key in keys if all(isinstance(row.get(key), str | list) for row in rows)]
    lines: dict[tuple[str, ...], dict[int, str]] = {}
    for row in rows:
        shared = [_text(row[key]) for key in labels]
        for key in keys:
            if isinstance(row.get(key), float):
                lines.setdefault((*shared, key), {})[row["layer"]] = f"{row[key]:.3f}"
    cells = [[*line, *(by.get(layer, "–") for layer in layers)] for line, by in lines.items()]
    header = [*labels, "figure", f"layer {layers[0]}", *map(str, layers[1:])]
    return format_table(title, header, cells)


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(
        key
        for row in rows
        for key, value in row.items()
        if _fits(value) and not key.endswith("_se") and key != "standard_error"
    )
    return [*keys]


def _fits(value: object) -> bool:
    if isinstance(value, list):
        return len(value) <= _LONGEST and not any(isinstance(each, Mapping) for each in value)
    return not isinstance(value, Mapping)


def _cell(row: Mapping[str, Any], key: str) -> str:
    """Return a value, with its standard error if it has one."""
    error = error_of(row, key)
    return _text(row.get(key)) + ("" if error is None else f" ± {error:.2g}")


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_text(each)}" for key, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _notes(rest: Mapping[str, Any]) -> list[str]:
    """Return lines: lists, mappings and sentences one each, all others together."""
    known = {key: value for key, value in rest.items() if value not in (None, [], {})}
    several = {
        key: value
        for key, value in known.items()
        if isinstance(value, list | Mapping) or str(value).endswith(".")
    }
    single = {key: value for key, value in known.items() if key not in several}
    lines = [f"{key}: {_text(value)}" for key, value in several.items()]
    return [textwrap.fill(line, _WIDTH) for line in (*lines, _text(single)) if line]
