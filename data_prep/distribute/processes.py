"""An ordered map over worker processes that holds few results and leaves no orphans."""

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

    One worker means this very process. At most a few results per worker wait at any time, so a slow
    consumer costs no memory. What takes long, see ``activity.at``, is named meanwhile.

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
        with _held_interrupt():  # the first task starts all workers, and they inherit this
            executor.submit(int).result()
        workers = multiprocessing.active_children()
        yield from in_order(executor, function, items, _PENDING_PER_WORKER * num_workers)
    except BrokenProcessPool as error:
        executor.shutdown(wait=True)  # then it is known how each of them ended
        raise UserError(
            f"a worker process died ({activity.causes(workers)}). SIGKILL mostly means that memory "
            "ran out: use fewer with --workers. Otherwise the decoder crashed: remove the file, "
            "and run the same command again."
        ) from error
    finally:
        executor.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _held_interrupt() -> Generator[None]:
    """Hold Ctrl-C back for a moment; processes started meanwhile never hear of it.

    A handler, not a signal mask: other threads would take a masked signal, and Python then raises
    in the middle of a fork, where the interrupt is lost.
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
    """Take part, and end when the parent is gone, even by SIGKILL."""
    activity.join()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
