"""Results of an executor in input order, with a limited number pending."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


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
