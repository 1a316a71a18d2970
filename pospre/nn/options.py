"""What an encoder can be like; without PyTorch, so that a recipe is read at once."""

from typing import Literal

Init = Literal["xavier", "trunc_normal", "deit", "dinov2", "beit"]
