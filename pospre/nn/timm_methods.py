"""The methods of timm's VisionTransformer that compute something else on our encoder: refused.

timm's forward adds the whole table to a whole image; ours gathers kept patches, edits positions and
takes them from elsewhere. On our weights timm's methods would return plausible but wrong values.
"""

from collections.abc import Callable
from typing import NoReturn

from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from pospre.errors import UserError

_LAYERS = "pospre.evaluation.layers.layer_tokens(model, images, layers) returns tokens of blocks"
_BUILD = "pospre.build_encoder(…) makes an encoder of that shape"
_HEAD = 'it has no classifier: pospre.attach(model, "supervised", num_classes=…) trains one'
_GROUPS = "pospre.parameter_groups(model, lr=…) gives an optimiser its groups"
_DRAW = "init_parameters(init) draws all weights"
INSTEAD = {
    "fix_init_weight": _DRAW,
    "init_weights": _DRAW,
    "load_pretrained": "pospre.load_weights(model, file) takes any published file",
    "forward_intermediates": _LAYERS,
    "get_intermediate_layers": _LAYERS,
    "prune_intermediate_layers": _BUILD,
    "set_input_size": f"{_BUILD}, and its forward takes images of any size that the patch divides",
    "forward_head": _HEAD,
    "get_classifier": _HEAD,
    "reset_classifier": _HEAD,
    "group_matcher": _GROUPS,
    "no_weight_decay": _GROUPS,
    "set_grad_checkpointing": "a recipe has trainer.activation_checkpointing: true",
}
"""By method, what does its work here."""


class TimmMethods(VisionTransformer):
    """A VisionTransformer whose methods of ``INSTEAD`` raise a ``UserError`` that names another."""

    def forward_features(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Return ``forward(x)``, which is what timm's method of the same weights returns."""
        if attn_mask is not None:
            raise UserError("forward_features takes no attn_mask; forward has context_BM.")
        tokens: Tensor = self(x)
        return tokens


def _refusal(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(self: TimmMethods, *arguments: object, **options: object) -> NoReturn:
        raise UserError(
            f"{name} of timm is not right for an encoder of ours; {instead}. A model of timm's "
            "with its weights has it: vit.load_state_dict(model.timm_state(vit), strict=False)."
        )

    refuse.__name__, refuse.__doc__ = name, f"Raise ``UserError``: {instead}."
    return refuse


for _name, _instead in INSTEAD.items():
    setattr(TimmMethods, _name, _refusal(_name, _instead))
