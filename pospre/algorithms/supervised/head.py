"""The classifier over pooled tokens, and the labels it learns from."""

from typing import Any

from timm.layers import LayerNorm
from torch import Tensor, nn

from pospre.batch import LABEL, whole_numbers
from pospre.errors import UserError
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.projections import check_parts, parts_of


class Head(nn.Module):
    """A linear classifier, after a norm if the encoder has no final one.

    Args:
        encoder: whose tokens are pooled.
        num_classes: C.
        std: standard deviation of the first weights.
    """

    def __init__(self, encoder: PatchEncoder, num_classes: int, std: float) -> None:
        super().__init__()
        self.timm_name = encoder.timm_head
        bare = isinstance(encoder.norm, nn.Identity)
        self.norm = LayerNorm(encoder.embed_dim) if bare else nn.Identity()
        self.linear = nn.Linear(encoder.embed_dim, num_classes)
        nn.init.trunc_normal_(self.linear.weight, std=std)
        nn.init.zeros_(self.linear.bias)
        self.num_classes, self.built = num_classes, parts_of(self)

    def forward(self, pooled_BD: Tensor) -> Tensor:
        """Return logits (B, C)."""
        return self.linear(self.norm(pooled_BD))

    def timm_state(self, *, of_mean: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the head under timm's names, and its arguments for ``timm.create_model``.

        Args:
            of_mean: it classifies the mean of the patches.

        Raises:
            UserError: parts were replaced.
        """
        check_parts(self, self.built, "supervised.head")
        parts = {self.timm_name: self.linear, "fc_norm": self.norm}
        state = {
            f"{prefix}.{key}": value
            for prefix, part in parts.items()
            for key, value in part.state_dict().items()
        }
        kwargs: dict[str, Any] = {"num_classes": self.num_classes}
        bare = isinstance(self.norm, LayerNorm)
        if of_mean:
            kwargs["global_pool"] = "avg"
        if self.timm_name == "head" and (bare or of_mean):  # Swin has no such norm
            kwargs["fc_norm"] = bare
        return state, kwargs


def checked_labels(labels_B: Tensor, classes: int | None) -> Tensor:
    """Return the labels as integers.

    Raises:
        UserError: they are not integers, or (if they are on the CPU) not in [0, classes).
    """
    labels = whole_numbers(labels_B, LABEL)
    if labels.is_cpu and classes and not ((labels >= 0) & (labels < classes)).all():
        wrong = labels[(labels < 0) | (labels >= classes)][0].item()
        raise UserError(
            f"algorithms.supervised has num_classes = {classes}, and a batch the label {wrong} "
            f"(-1: unknown). Give labels from 0 to {classes - 1}, or another num_classes."
        )
    return labels
