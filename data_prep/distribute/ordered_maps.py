"""Ordered maps over threads, processes or a Dask cluster, with few pending results, no orphans."""

import errno
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tqdm import tqdm

from data_prep.distribute.activity import Activity
from pospre.errors import Unreachable, UserError

if TYPE_CHECKING:
    from distributed import Client

    from pospre.data.stores.reader import Reader

Item = TypeVar("Item")
Result = TypeVar("Result")

_PENDING_PER_WORKER = 16

_RETRIES = 3  # on a cluster
_PENDING_PER_NODE = 4  # so that a slow machine does not block the others
_LEAST_PENDING = 64  # workers may join later
_CONNECT_SECONDS = 20


def in_order(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], num_pending: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` in the order of the items, with at most this many pending."""
    pending: deque[Future[Result]] = deque()
    for item in items:
        pending.append(executor.submit(function, item))
        if len(pending) >= num_pending:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def over_samples(
    function: Callable[[int], Result], reader: "Reader", num_workers: int, title: str
) -> Generator[Result, None, None]:
    """Yield ``function(index)`` for every sample, in order, from threads, with a progress bar.

    The reader is closed at the end.
    """
    reader.expect(np.arange(len(reader)))
    with ThreadPoolExecutor(num_workers) as executor:
        results = in_order(
            executor, function, range(len(reader)), _PENDING_PER_WORKER * num_workers
        )
        yield from tqdm(results, total=len(reader), unit="img", desc=title, disable=None)
    reader.close()


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], num_workers: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` in the order of the items, computed by ``num_workers`` processes.

    With one worker it runs in this process. At most a few results per worker are pending, so a slow
    consumer costs no memory. Slow files are named meanwhile, see ``activity.at``. If a worker dies,
    ``UserError`` says why.
    """
    with _naming_shared_memory():
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
    before = multiprocessing.active_children()
    with _naming_shared_memory():
        executor = ProcessPoolExecutor(num_workers, initializer=_start_worker, initargs=(activity,))
    try:
        with _naming_shared_memory():
            executor.submit(int).result()  # the first task starts all workers
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
        try:
            executor.shutdown(wait=True, cancel_futures=True)
        except BaseException:  # a second Ctrl-C: at exit, Python would wait for them forever
            for worker in set(multiprocessing.active_children()).difference(before):
                worker.kill()
            raise


@contextmanager
def _naming_shared_memory() -> Generator[None]:
    """Turn the error of full shared memory, where processes keep their locks, into a message."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise UserError(
            "/dev/shm, which processes need to work together, is full; make room there (a "
            "container: `docker run --shm-size=1g`), or use --workers 1"
        ) from error


def _start_worker(activity: Activity) -> None:
    """Join the activity, ignore Ctrl-C, and exit when the parent has exited, even by SIGKILL."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    activity.join()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def cluster_map(
    function: Callable[[Item], Result], items: Iterable[Item], scheduler: str
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` in the order of the items, computed by the workers of a cluster.

    Failed tasks, and those of dead workers, are retried elsewhere. ``scheduler`` is the cluster's
    address. ``UserError`` if Dask is missing, the cluster does not answer, or a task fails
    repeatedly.
    """
    with _connect(scheduler) as client:
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        executor = client.get_executor(retries=_RETRIES, pure=False)
        try:
            pending = max(_LEAST_PENDING, _PENDING_PER_NODE * workers)
            yield from in_order(executor, function, items, pending)
        except Exception as error:
            kind = Unreachable if isinstance(error, Unreachable) else UserError
            raise kind(f"a block failed {_RETRIES + 1} times on the cluster: {error}") from error
        finally:
            executor.shutdown(wait=False)  # drops pending tasks


def _connect(scheduler: str) -> "Client":
    try:
        from distributed import Client
    except ImportError as error:
        raise UserError(
            f"Dask cannot be loaded ({error}); pip install dask distributed, or use --part k/n."
        ) from error
    try:
        return Client(scheduler, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {scheduler} ({error}); write --scheduler tcp://host:8786"
        ) from error
