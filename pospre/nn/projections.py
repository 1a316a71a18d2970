"""Layers that are also computed in parts, and what may have taken their place.

Adapters (LoRA), parametrisations, quantisation and hooks change what a layer computes, or watch it.
So a layer is called; its tensors are read only if it ``is_plain``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pospre.errors import UserError

Parts = dict[str, type]
"""The classes of a module's parts and saved tensors, by name."""


class UnbiasedKeys(nn.Linear):
    """The projection to queries, keys and values if keys get no bias (BEiT, DINOv3).

    ``bias`` has entries for keys, which neither count nor learn.
    """

    def used_bias(self) -> Tensor | None:
        """Return the bias with zeros for keys."""
        bias: Tensor | None = self.bias
        if bias is None:
            return None
        query, key, value = bias.chunk(3)
        return torch.cat([query, torch.zeros_like(key), value])

    def forward(self, input: Tensor) -> Tensor:
        """Return queries, keys and values in one tensor (..., 3·D)."""
        return F.linear(input, self.weight, self.used_bias())


class PatchConv(nn.Conv2d):
    """timm's convolution over patches; if each is an image of its own, it is a matrix product."""

    def forward(self, input: Tensor) -> Tensor:
        """Return (B, D, 1, 1) of patches (B, C, h, w); a larger image is convolved."""
        weight = self.weight
        input = input.to(weight.dtype)  # images stay float32 after .half() on the weights
        if input.shape[-2:] != weight.shape[-2:]:
            return super().forward(input)
        return F.linear(input.flatten(1), weight.flatten(1), self.bias)[..., None, None]


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is only x·Wᵀ + b of its own tensors, without hooks.

    Hooks for all modules, which torch's own tools register, do not count.
    """
    if type(layer) not in (nn.Linear, UnbiasedKeys) or "forward" in layer.__dict__:
        return False  # dynamo does not know vars()
    if layer._forward_pre_hooks or layer._forward_hooks:
        return False
    if layer._backward_pre_hooks or layer._backward_hooks:
        return False
    return not is_traceable_wrapper_subclass(layer.weight)  # such as torchao's quantised ones


def weight_of(layer: nn.Module, width: int) -> Tensor:
    """Return W of a linear layer with inputs of this width, whatever computes it."""
    if is_plain(layer):
        weight = layer.weight
        assert isinstance(weight, Tensor)
        return weight
    unit = torch.diag(_one(layer).expand(width))
    return (layer(unit) - layer(torch.zeros_like(unit))).T


def bias_of(layer: nn.Module, width: int) -> Tensor:
    """Return b of such a layer: its output for zeros."""
    bias = layer.bias if is_plain(layer) else layer(0 * _one(layer).expand(width))
    assert isinstance(bias, Tensor)
    return bias


def _one(layer: nn.Module) -> Tensor:
    """Return 1 on a layer's device, in its precision."""
    own = (each for each in layer.parameters() if each.is_floating_point())
    return torch.ones_like(next(own, torch.ones(())).flatten()[0])


def parts_of(module: nn.Module) -> Parts:
    """Return the classes of all parts and saved tensors of a module."""
    parts = {name: type(part) for name, part in module.named_modules()}
    return parts | {name: type(tensor) for name, tensor in module.state_dict().items()}


def check_parts(module: nn.Module, built: Parts, name: str) -> None:
    """Raise ``UserError`` if a module's weights alone no longer say what it computes.

    ``built`` are its parts when it was made, and ``name`` is its name for the error. Sharded parts,
    and layers that multiply in float8, have the same weights.
    """
    parts = parts_of(module)
    for part in built | parts:
        was, kind = built.get(part), parts.get(part)
        same = kind is was or kind is DTensor
        if same or (kind and (issubclass(kind, FSDPModule) or "torchao.float8" in kind.__module__)):
            continue
        now, then = (
            f"{each.__module__}.{each.__name__}" if each else "missing" for each in (kind, was)
        )
        raise UserError(
            f"{name}.{part} is now {now}, but was {then} when it was built. An export of the "
            "weights would lose what it computes. Merge it into the weights first: for peft "
            "model.merge_and_unload(), for parametrisations "
            "torch.nn.utils.parametrize.remove_parametrizations(…)."
        )
