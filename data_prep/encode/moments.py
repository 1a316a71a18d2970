"""Mean and standard deviation of the written data, accumulated block by block."""

import numpy as np


class Moments:
    """Mean and standard deviation per column of many rows of numbers.

    Args:
        num_columns: numbers in a row.
    """

    def __init__(self, num_columns: int) -> None:
        self._count = 0
        self._sum = np.zeros(num_columns)
        self._squares = np.zeros(num_columns)

    def add(self, rows: np.ndarray) -> None:
        """Add rows, (n, columns)."""
        deep = rows.astype(np.float64)
        self._count += len(deep)
        self._sum += deep.sum(axis=0)
        self._squares += np.square(deep).sum(axis=0)

    def sums(self) -> list[list[float]]:
        """Return sums for ``add_sums``: a data set's rows may be counted in parts."""
        return [[self._count], self._sum.tolist(), self._squares.tolist()]

    def add_sums(self, sums: list[list[float]]) -> None:
        """Add rows counted elsewhere."""
        self._count += int(sums[0][0])
        self._sum += sums[1]
        self._squares += sums[2]

    def describe(self) -> dict[str, list[float]]:
        """Return ``mean`` and ``std``; constant columns have the std 1."""
        mean = self._sum / max(self._count, 1)
        std = np.sqrt(np.maximum(self._squares / max(self._count, 1) - np.square(mean), 0.0))
        std = np.where(std > 1e-6, std, 1.0)
        return {"mean": [round(v, 6) for v in mean.tolist()],
                "std": [round(v, 6) for v in std.tolist()]}  # fmt: skip
