"""The content of a checkpoint, read from the bytes of its files and checked.

A hash shows only that a file is complete. Content that training does not write is found here, while
an older checkpoint can still replace this one, not later in a library. Numpy, for example, would
read memory at any address that a state names.
"""

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from composer.core import Timestamp
from safetensors.torch import load
from torch import Tensor

from pospre.run.checkpoints.files import STATE, TENSORS, DamagedCheckpoint, verify
from pospre.run.checkpoints.plain_state import restored

_SECTIONS = ("data", "encoder", "algorithms", "trainer")
_WORDS = 624  # of numpy's random state, a Mersenne twister


def assemble(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """Return the whole content of a checkpoint, on the CPU.

    ``files`` are the manifest, and every file that it lists. ``DamagedCheckpoint`` if a file
    differs from what was written, or what was written is no checkpoint of this package.
    """
    verify(files, name)
    try:
        tensors = {file: load(data) for file, data in files.items() if file.endswith(TENSORS)}
        content = restored(files[STATE], tensors)
    except Exception as error:  # a dozen kinds, of whatever another content leads to
        why = f"{type(error).__name__}: {error}"
        raise DamagedCheckpoint(f"{name} is damaged: its content is not valid ({why})") from error
    if "RecipeRecord" not in callback_states(content):
        raise DamagedCheckpoint(f"{name} is no checkpoint of pospre.train: it has no recipe")
    return content


def callback_states(content: dict[str, Any]) -> dict[str, Any]:
    """Return the states of callbacks in a checkpoint's content."""
    state = content.get("state")
    states = state.get("callbacks") if isinstance(state, dict) else None
    return states if isinstance(states, dict) else {}


def check_state(content: dict[str, Any], name: str) -> None:
    """Raise ``DamagedCheckpoint`` if a part of the content is not what training writes."""
    record, ranks = callback_states(content)["RecipeRecord"], content.get("rng")
    parts = {**content["state"], "recipe": record, "rng": ranks}
    for part, is_sound in _CHECKS.items():
        try:
            is_odd = not is_sound(parts[part])
        except Exception:  # whatever comes of a key that is missing, or of another kind
            is_odd = True
        if is_odd:
            raise DamagedCheckpoint(f"no run can resume from {name}: its '{part}' is not valid")


def _is_record(record: Any) -> bool:
    recipe = record["recipe"]
    is_length = isinstance(recipe["trainer"]["max_duration"], str)
    hashes = [record["data"], record["fingerprints"]]
    is_whole = record.keys() == {
        *("recipe", "num_samples", "data", "fingerprints", "classes", "starts", "fresh"),
        "reference",
    }
    return (
        is_whole
        and all(isinstance(recipe[key], dict) for key in _SECTIONS)
        and (
            is_length
            and type(record["num_samples"]) is int
            and all(
                type(what) is type(value) is str for each in hashes for what, value in each.items()
            )
            and isinstance(record["classes"], list | None)
            and all(type(name) is str for name in [*(record["classes"] or []), *record["fresh"]])
            and all(type(start) is int for start in record["starts"])
            and isinstance(record["reference"], str | None)
        )
    )


def _is_model(tensors: Any) -> bool:
    return all(type(key) is str and isinstance(each, Tensor) for key, each in tensors.items())


def _is_clock(clock: Any) -> bool:
    usual, given = Timestamp().state_dict(), clock["Timestamp"]
    return given.keys() == usual.keys() and all(
        type(value) is type(usual[key]) and value >= usual[key] for key, value in given.items()
    )


def _are_schedules(schedules: Any) -> bool:
    return all(
        type(each[key]) is int and each[key] >= 0
        for each in schedules.values()
        for key in ("last_epoch", "_step_count")
    ) and all(math.isfinite(rate) for each in schedules.values() for rate in each["_last_lr"])


def _are_random(ranks: Any) -> bool:
    for state in ranks:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        name, words, pos, has_gauss, gauss = state["numpy"]
        if name != "MT19937" or len(words) != _WORDS or pos not in range(_WORDS + 1):
            return False
        if not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
            return False
        if not type(pos) is type(has_gauss) is int or not isinstance(gauss, float):
            return False
        if not isinstance(state.get("cuda", state["torch"]), Tensor):
            return False
    return isinstance(ranks, list)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "recipe": _is_record,
    "model": _is_model,
    "optimizers": lambda states: isinstance(states, dict),
    "algorithms": lambda states: all(type(name) is str for name, _ in states),
    "timestamp": _is_clock,
    "schedulers": _are_schedules,
    "rng": _are_random,
}
