"""Work done or printed by one rank for all, work compared between all, and sums over all."""

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as distributed
from composer.devices import Device
from composer.utils import dist
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from pospre.errors import UserError

Value = TypeVar("Value")
_HEARTBEAT = 2.0  # seconds, far below any sensible trainer.dist_timeout


class _Failure(NamedTuple):
    """An error on a rank, in the form sent to the others."""

    rank: int
    mistake: UserError | None
    named: str


def is_joined() -> bool:
    """Return whether this process is one of a group of ranks."""
    return distributed.is_available() and distributed.is_initialized()


def num_ranks() -> int:
    """Return the number of ranks of the group, 1 without one."""
    return distributed.get_world_size() if is_joined() else 1


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all ranks, with gradient; itself without a group."""
    return all_reduce(value) if is_joined() else value


def from_rank_zero(work: Callable[[], Value]) -> Value:
    """Run ``work`` on rank 0 and return its result on every rank.

    Its exception is raised on every rank, so none waits for a rank that has failed.
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
    """Run ``work`` on every rank and return all results, by rank.

    If any rank raises, all do: its own exception on that rank, otherwise the first failing rank's.
    """
    result, failure, error = _try(work)
    gathered: list[Any] = dist.all_gather_object((result, failure))
    _raise(error, [failure for _, failure in gathered])
    return [result for result, _ in gathered]


def however_long(work: Callable[[], Value]) -> Value:
    """Run ``work`` on every rank without a time limit; it raises only on the rank where it fails.

    It runs in a thread, so that a signal ends this rank at once, with the waiting of
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

    Ranks compare their state every few seconds. None waits in one collective for another's disk or
    bucket, which ``trainer.dist_timeout`` would end.
    """
    is_over = False
    while not is_over:
        futures.wait([work], timeout=_HEARTBEAT)
        is_over = all(dist.all_gather_object(work.done()))


def wait_until(is_so: Callable[[], bool], seconds: float, pause: float = 0.1) -> bool:
    """Wait until a condition holds, or the time is up; return whether it holds."""
    end = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
    return True


def while_others_wait(work: Callable[[Callable[[], None]], Value], device: Device) -> Value:
    """Run ``work`` on rank 0 without a time limit, and return its result on every rank.

    The others wait in collectives, each of which ends after ``trainer.dist_timeout``. So ``work``
    gets a function that it must call regularly, which makes them wait longer.
    """
    last_beat = time.monotonic()

    def send(is_busy: bool) -> bool:
        busy = device.tensor_to_device(torch.tensor([is_busy], dtype=torch.uint8))
        dist.broadcast(busy, src=0)
        return bool(busy.item())

    def go_on() -> None:
        nonlocal last_beat
        if dist.get_world_size() > 1 and time.monotonic() - last_beat > _HEARTBEAT:
            send(True)
            last_beat = time.monotonic()

    def whole() -> Value:
        try:
            return work(go_on)
        finally:
            send(False)

    while dist.get_global_rank() > 0 and send(True):
        pass
    return from_rank_zero(whole)


class Greatest:
    """The maximum of the ranks' numbers, computed during a step.

    The CPUs exchange them between the start and the end of a step, while a GPU may still compute.
    """

    def __init__(self) -> None:
        self._begun: tuple[torch.Tensor, Any] | None = None
        # made by all ranks at the start: to make it later would hang where one has ended
        needs_own = dist.get_world_size() > 1 and torch.distributed.get_backend() != "gloo"
        self._group: Any = torch.distributed.new_group(backend="gloo") if needs_own else None

    def begin(self, number: int) -> None:
        """Contribute this rank's number; nothing happens on a single rank."""
        if dist.get_world_size() == 1:
            return
        shared, maximum = torch.tensor([number]), torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(shared, maximum, self._group, async_op=True)
        self._begun = shared, work

    def end(self) -> int | None:
        """Return the maximum; None if nothing was started since the last call."""
        if self._begun is None:
            return None
        (shared, work), self._begun = self._begun, None
        work.wait()
        return int(shared.item())


def print_once(text: str) -> None:
    """Print a line on one rank only."""
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
