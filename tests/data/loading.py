"""A small loader for tests, and how to compare what it gives."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pospre.data.loader import ViewLoader, build_loader
from pospre.data.views.options import ViewGroup

VIEW = ViewGroup(size=32)


def loader(path: Path, **options: Any) -> ViewLoader:
    settings: dict[str, Any] = {"views": [VIEW], "batch_size": 4, "seed": 3, "num_workers": 2}
    return build_loader(path, **{**settings, **options})


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[key]) for key, value in first.items()
    )


def count_calls(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[Any, ...]]:
    """Return a list that grows by the arguments of every call of a method."""
    calls: list[tuple[Any, ...]] = []
    method = getattr(owner, name)

    def record(*arguments: Any) -> Any:
        calls.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(owner, name, record)
    return calls
