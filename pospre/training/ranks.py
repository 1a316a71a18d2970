"""What one rank does or prints for all."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from composer.devices import Device
from composer.utils import dist

from pospre.errors import UserError

Value = TypeVar("Value")
_SIGN_OF_LIFE = 2.0  # seconds, far below any sensible trainer.dist_timeout


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Do ``work`` on rank 0 only and return its result on every rank.

    What it raises is raised on every rank, so that none waits for one that has failed.
    """
    result: list[Any] = [None, None]  # and what went wrong: the user's mistake or not, and words
    failure = None
    if dist.get_global_rank() == 0:
        try:
            result[0] = work()
        except Exception as error:
            failure = error
            result[1] = isinstance(error, UserError), f"{type(error).__name__}: {error}", str(error)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result)
    if failure is not None:
        raise failure
    if result[1] is not None:
        is_mistake, named, words = result[1]
        raise UserError(words) if is_mistake else RuntimeError(f"rank 0 failed: {named}")
    return result[0]


def while_others_wait(work: Callable[[Callable[[], None]], Value], device: Device) -> Value:
    """Do ``work`` on rank 0, however long it takes, and return its result on every rank.

    The others wait in collectives, each of which ends after ``trainer.dist_timeout``. So ``work``
    is given a function to call every now and then: it tells them to go on waiting.
    """
    told = time.monotonic()

    def tell(is_busy: bool) -> bool:
        busy = device.tensor_to_device(torch.tensor([is_busy], dtype=torch.uint8))
        dist.broadcast(busy, src=0)
        return bool(busy.item())

    def go_on() -> None:
        nonlocal told
        if dist.get_world_size() > 1 and time.monotonic() - told > _SIGN_OF_LIFE:
            tell(True)
            told = time.monotonic()

    def whole() -> Value:
        try:
            return work(go_on)
        finally:
            tell(False)

    while dist.get_global_rank() > 0 and tell(True):
        pass
    return from_rank_zero(whole)


def print_once(text: str) -> None:
    """Print a line, once however many ranks there are."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)
