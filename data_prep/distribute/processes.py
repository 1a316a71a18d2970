"""An ordered map over worker processes, with few pending results and no orphans."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

from data_prep.distribute.activity import Activity
from data_prep.in_order import in_order
from pospre.errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")

_PENDING_PER_WORKER = 16


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` in the order of the items, computed by ``num_workers`` processes.

    With one worker it runs in this process. At most a few results per worker are pending, so a slow
    consumer costs no memory. Slow files are named meanwhile, see ``activity.at``.

    Raises:
        UserError: a worker process died (killed, or out of memory).
    """
    activity = Activity(max(1, num_workers))
    with activity.watched():
        if num_workers <= 1:
            activity.join()
            yield from map(function, items)
        else:
            yield from _by_workers(function, items, num_workers, activity)


def _by_workers(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int, activity: Activity
) -> Generator[Result, None, None]:
    executor = ProcessPoolExecutor(num_workers, initializer=_start_worker, initargs=(activity,))
    try:
        with _held_interrupt():  # the first task starts all workers, which inherit this
            executor.submit(int).result()
        workers = multiprocessing.active_children()
        yield from in_order(executor, function, items, _PENDING_PER_WORKER * num_workers)
    except BrokenProcessPool as error:
        executor.shutdown(wait=True)  # then all exit codes are known
        raise UserError(
            f"a worker process died ({activity.causes(workers)}). SIGKILL usually means that "
            "memory ran out: use fewer --workers. Otherwise the decoder crashed: remove the file, "
            "and run the same command again."
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _held_interrupt() -> Generator[None]:
    """Ignore Ctrl-C for a moment, so that processes started meanwhile never get it.

    This uses a handler rather than a signal mask: other threads would take a masked signal, and
    Python would then raise in the middle of a fork, where the interrupt is lost.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is interrupted
        return
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if seen and before != signal.SIG_IGN:
        raise KeyboardInterrupt


def _start_worker(activity: Activity) -> None:
    """Join the activity, and exit when the parent has exited, even by SIGKILL."""
    activity.join()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
