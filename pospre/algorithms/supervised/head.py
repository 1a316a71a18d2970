"""The classifier over pooled tokens, for pospre and for timm."""

from typing import Any

from timm.layers import LayerNorm
from torch import Tensor, nn

from pospre.nn.vit import Encoder


class Head(nn.Module):
    """A linear classifier, after a norm if the encoder has no final one.

    Args:
        encoder: whose tokens are pooled.
        num_classes: C.
        std: standard deviation of the first weights.
    """

    def __init__(self, encoder: Encoder, num_classes: int, std: float) -> None:
        super().__init__()
        self.timm_name = encoder.timm_head
        bare = isinstance(encoder.norm, nn.Identity)
        self.norm = LayerNorm(encoder.embed_dim) if bare else nn.Identity()
        self.linear = nn.Linear(encoder.embed_dim, num_classes)
        nn.init.trunc_normal_(self.linear.weight, std=std)
        nn.init.zeros_(self.linear.bias)

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return logits (B, C)."""
        return self.linear(self.norm(pooled_BD))

    def timm_state(self, *, of_mean: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the head under timm's names, and its arguments for ``timm.create_model``.

        Args:
            of_mean: it classifies the mean of the patches.
        """
        parts = {self.timm_name: self.linear, "fc_norm": self.norm}
        state = {
            f"{prefix}.{key}": value
            for prefix, part in parts.items()
            for key, value in part.state_dict().items()
        }
        kwargs: dict[str, Any] = {"num_classes": self.linear.out_features}
        bare = isinstance(self.norm, LayerNorm)
        if of_mean:
            kwargs["global_pool"] = "avg"
        if self.timm_name == "head" and (bare or of_mean):  # Swin has no such norm
            kwargs["fc_norm"] = bare
        return state, kwargs
