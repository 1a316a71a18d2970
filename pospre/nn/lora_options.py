"""Options of LoRA, without PyTorch, so that recipes are read quickly."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat
from pydantic_core import PydanticCustomError


def _parts(value: Any) -> Any:
    if "qkv" in value:
        words = "Input should be q, k, v, proj, fc1, fc2; q, k and v have pairs of their own"
        raise PydanticCustomError("range", words)
    return value


@dataclass
class LoraOptions:
    """Low-rank pairs beside the weights of blocks, which stay frozen."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Rows of A, and columns of B."""
    alpha: PositiveFloat = 16.0
    """Their product counts ``alpha / rank`` times."""
    rslora: bool = False
    """It counts ``alpha / √rank`` times."""
    dora: bool = False
    """Each row also gets a length of its own (DoRA); every forward computes whole weights."""
    layers: Annotated[
        tuple[Literal["q", "k", "v", "proj", "fc1", "fc2"], ...],
        Field(strict=False, min_length=1),
        BeforeValidator(_parts),
    ] = ("q", "k", "v", "proj")
    """The projections that get pairs."""

    @property
    def scale(self) -> float:
        """The factor of the product."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)
