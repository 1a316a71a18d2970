"""What one rank does or prints for all, and what all do and compare."""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch
from composer.devices import Device
from composer.utils import dist

from pospre.errors import UserError

Value = TypeVar("Value")
_SIGN_OF_LIFE = 2.0  # seconds, far below any sensible trainer.dist_timeout


class _Failure(NamedTuple):
    """What went wrong on a rank, as it travels to the others."""

    rank: int
    mistake: UserError | None
    named: str


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Do ``work`` on rank 0 only and return its result on every rank.

    What it raises is raised on every rank, so that none waits for one that has failed.
    """
    result: list[Any] = [None, None]
    error = None
    if dist.get_global_rank() == 0:
        result[0], result[1], error = _try(work)
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result)
    _raise(error, [result[1]])
    return result[0]


def on_every_rank(work: Callable[[], Value]) -> list[Value]:
    """Do ``work`` on every rank and return all results, by rank.

    What one raises is raised on every rank: its own where it happened, else the first rank's.
    """
    result, failure, error = _try(work)
    gathered: list[Any] = dist.all_gather_object((result, failure))
    _raise(error, [failure for _, failure in gathered])
    return [result for result, _ in gathered]


def however_long(work: Callable[[], Value]) -> Value:
    """Do ``work`` on every rank; where it fails it raises, on that rank alone.

    It is done in a thread, so that a signal ends this rank at once, and waited for as in
    ``wait_for_all``.
    """
    if dist.get_world_size() == 1:
        return work()
    done: Future[Value] = Future()

    def do() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # raised below
            done.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    wait_for_all(done)
    return done.result()


def wait_for_all(work: Future[Any]) -> None:
    """Wait until the work of every rank is done, or has failed.

    They compare notes every few seconds: none waits in one collective for another's disk or bucket,
    which ``trainer.dist_timeout`` would end.
    """
    is_over = False
    while not is_over:
        futures.wait([work], timeout=_SIGN_OF_LIFE)
        is_over = all(dist.all_gather_object(work.done()))


def wait_until(is_so: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Look until something is so, or the time is up; tell whether it is so."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
    return True


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


class Greatest:
    """The greatest of the ranks' numbers, found beside a step.

    The CPUs exchange them between the step's begin and its end: a GPU may still compute then.
    """

    def __init__(self) -> None:
        self._begun: tuple[torch.Tensor, Any] | None = None
        self._group: Any = None

    def begin(self, number: int) -> None:
        """Give this rank's number; nothing is done on one rank."""
        if dist.get_world_size() == 1:
            return
        if self._group is None:
            self._group = torch.distributed.new_group(backend="gloo")
        shared, maximum = torch.tensor([number]), torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(shared, maximum, self._group, async_op=True)
        self._begun = shared, work

    def end(self) -> int | None:
        """Return the greatest; None where nothing was begun since the last time."""
        if self._begun is None:
            return None
        (shared, work), self._begun = self._begun, None
        work.wait()
        return int(shared.item())


def print_once(text: str) -> None:
    """Print a line, once however many ranks there are."""
    if dist.get_global_rank() == 0:
        print(text, flush=True)


def _try(work: Callable[[], Any]) -> tuple[Any, _Failure | None, Exception | None]:
    try:
        return work(), None, None
    except Exception as error:
        named = f"{type(error).__name__}: {error}"
        mistake = error.restated(str(error)) if isinstance(error, UserError) else None
        return None, _Failure(dist.get_global_rank(), mistake, named), error


def _raise(error: Exception | None, failures: list[_Failure | None]) -> None:
    if error is not None:
        raise error
    for failure in filter(None, failures):
        if failure.mistake is not None:
            raise failure.mistake
        raise RuntimeError(f"rank {failure.rank} failed: {failure.named}")
