"""Checks that a checkpoint holds what training writes: its hash shows only that it is complete.

Odd content is found here, while an older checkpoint can still replace this one, not later in a
library. Numpy, for example, would read memory at any address that a state names.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import torch
from composer.core import Timestamp
from torch import Tensor

from pospre.run.checkpoints.content import callback_states
from pospre.run.checkpoints.files import DamagedCheckpoint

_SECTIONS = ("data", "encoder", "algorithms", "trainer")
_WORDS = 624  # of numpy's random state, a Mersenne twister


def check_state(content: dict[str, Any], name: str) -> None:
    """Check the content of a checkpoint, as ``assemble`` returns it.

    Raises:
        DamagedCheckpoint: a part of it is not what training writes.
    """
    state = content["state"]
    checks: list[tuple[str, Callable[[Any], bool], Any]] = [
        ("recipe", _is_record, callback_states(content)["RecipeRecord"]),
        ("model", _is_model, state.get("model", {})),
        ("timestamp", _is_clock, state.get("timestamp", {"Timestamp": Timestamp().state_dict()})),
        ("schedulers", _are_schedules, state.get("schedulers", {})),
        ("rng", _are_random, content.get("rng", [])),
    ]
    for part, is_sound, value in checks:
        try:
            is_odd = not is_sound(value)
        except Exception:  # whatever comes of a key that lacks, or of another kind
            is_odd = True
        if is_odd:
            raise DamagedCheckpoint(f"{name} is no checkpoint to go on from: its '{part}' is odd")


def _is_record(record: Any) -> bool:
    recipe = record["recipe"]
    is_length = isinstance(recipe["trainer"]["max_duration"], str)
    hashes = [record["data"], record["fingerprints"]]
    is_whole = record.keys() == {"recipe", "num_samples", "data", "fingerprints"}
    return (
        is_whole
        and all(isinstance(recipe[key], dict) for key in _SECTIONS)
        and (
            is_length
            and type(record["num_samples"]) is int
            and all(
                type(what) is type(value) is str for each in hashes for what, value in each.items()
            )
        )
    )


def _is_model(tensors: Any) -> bool:
    return all(type(key) is str and isinstance(each, Tensor) for key, each in tensors.items())


def _is_clock(clock: Any) -> bool:
    usual, found = Timestamp().state_dict(), clock["Timestamp"]
    return found.keys() == usual.keys() and all(
        type(value) is type(usual[key]) and value >= usual[key] for key, value in found.items()
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
        name, words, place, has_gauss, gauss = state["numpy"]
        if name != "MT19937" or len(words) != _WORDS or place not in range(_WORDS + 1):
            return False
        if not all(type(word) is int and 0 <= word < 1 << 32 for word in words):
            return False
        if has_gauss not in (0, 1) or not isinstance(gauss, float):
            return False
        if not isinstance(state.get("cuda", state["torch"]), Tensor):
            return False
    return isinstance(ranks, list)
