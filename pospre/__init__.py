"""Position-aware self-supervised pre-training."""

import os

# Before torch loads OpenMP: its threads else spin while they wait for each other, at the cost of
# whoever shares the cores with them (another run, other ranks, the loader's own threads).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__version__ = "0.1.0"
