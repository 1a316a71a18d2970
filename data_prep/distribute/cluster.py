"""The same ordered map on a Dask cluster, or on this machine's cores through Dask."""

from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, TypeVar

from data_prep.in_order import in_order
from pospre.errors import Unreachable, UserError

if TYPE_CHECKING:
    from distributed import Client

Item = TypeVar("Item")
Result = TypeVar("Result")

LOCAL = "local"
_RETRIES = 3
_PENDING_PER_WORKER = 4  # so that a slow machine does not block the others
_LEAST_PENDING = 64  # workers may join later
_CONNECT_SECONDS = 20


def cluster_map(
    function: Callable[[Item], Result], items: Iterable[Item], scheduler: str, num_workers: int
) -> Generator[Result, None, None]:
    """Yield ``function(item)`` in the order of the items, computed by the workers of a cluster.

    Failed tasks, and those of dead workers, are retried elsewhere.

    Args:
        function: of an item; both are sent to the workers.
        items: one per task.
        scheduler: address of the cluster; ``"local"`` starts one on this machine.
        num_workers: processes, if it is started here.

    Raises:
        UserError: Dask is missing, the cluster does not answer, or a task fails repeatedly.
    """
    with ExitStack() as stack:
        client = _connect(scheduler, num_workers, stack)
        workers = len(client.scheduler_info(n_workers=-1)["workers"])
        executor = client.get_executor(retries=_RETRIES, pure=False)
        stack.callback(executor.shutdown, wait=False)  # drops pending tasks
        pending = max(_LEAST_PENDING, _PENDING_PER_WORKER * workers)
        try:
            yield from in_order(executor, function, items, pending)
        except Exception as error:
            kind = Unreachable if isinstance(error, Unreachable) else UserError
            raise kind(f"a block failed {_RETRIES + 1} times on the cluster: {error}") from error


def _connect(scheduler: str, num_workers: int, stack: ExitStack) -> "Client":
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise UserError(
            f"Dask cannot be loaded ({error}); pip install dask distributed, or use --part k/n."
        ) from error
    where: Any = scheduler
    if scheduler == LOCAL:
        where = stack.enter_context(
            LocalCluster(n_workers=num_workers, threads_per_worker=1, dashboard_address=None)
        )
    try:
        return stack.enter_context(Client(where, timeout=_CONNECT_SECONDS))
    except (OSError, ValueError) as error:
        raise UserError(
            f"no Dask scheduler answers at {scheduler} ({error}); write --scheduler tcp://host:8786"
        ) from error
