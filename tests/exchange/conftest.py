"""Weights are taken from runs: those of the training tests."""

from tests.training.conftest import run, tiny

__all__ = ["run", "tiny"]
