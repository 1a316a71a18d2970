"""The reference: an encoder of published weights that never changes.

Methods compare the trained encoder's tokens with its own, and a run says which weights it has: its
hash is in every checkpoint. Its tensors are not, as they would be the same in all of them.
"""

import copy
import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pospre.augment.device import DeviceAugment
from pospre.errors import UserError
from pospre.model.layout import Layout
from pospre.model.teacher import Frozen
from pospre.model.uses import ALL, Pass
from pospre.nn.encoder_interface import PatchEncoder
from pospre.nn.weights.timm_models import wrap_encoder


class Reference(Frozen):
    """A copy of an encoder, without gradient, with its own normalisation of pixels.

    Attributes:
        missing: why it cannot run; empty: it can.
    """

    module: PatchEncoder

    def __init__(self, encoder: PatchEncoder, pixels: DeviceAugment | None = None) -> None:
        super().__init__(encoder)
        if pixels is None:
            pixels = DeviceAugment(channels=encoder.channels)
            pixels.expect(encoder.pixels_expected, "timm's")
        self.augment = copy.deepcopy(pixels)
        self.missing = ""
        self.register_load_state_dict_post_hook(_lacks_nothing)

    @classmethod
    def of(cls, given: nn.Module) -> "Reference":
        """Return the reference of a model, an encoder, or a timm ViT; of another one itself."""
        if isinstance(given, Reference):
            return given
        encoder, pixels = getattr(given, "encoder", given), getattr(given, "augment", None)
        encoder = encoder if isinstance(encoder, PatchEncoder) else wrap_encoder(encoder)
        return cls(encoder, pixels if isinstance(pixels, DeviceAugment) else None)

    def forward(
        self,
        images_BVCHW: Tensor,
        *,
        prefix_only: bool = False,
        shifts_RK: Tensor | None = None,
    ) -> Tensor:
        """Return the tokens (B·V, P+N, D) of all patches, or the prefix tokens alone.

        ``shifts_RK``: draws in [0, 1), two for each copy of a view. The copy is shifted around by
        that share of the grid's rows and columns, and its tokens are shifted back; they are means
        over the copies.
        """
        if self.missing:
            raise UserError(self.missing)
        images = images_BVCHW.flatten(0, 1)
        if shifts_RK is None:
            tokens: Tensor = super().forward(images, prefix_only=prefix_only)
            return tokens
        encoder = self.module
        grid, prefix = encoder.grid_of(*images.shape[-2:]), encoder.num_prefix_tokens
        sides, patch = (torch.tensor(each).to(images.device) for each in (grid, encoder.patch_size))
        cells_RK2 = (shifts_RK.unflatten(1, (-1, 2)) * sides).long()
        parts = []
        for cells_R2 in cells_RK2.unbind(1):
            copy = super().forward(rolled(images, cells_R2 * patch), prefix_only=prefix_only)
            maps = copy[:, prefix:].mT.unflatten(2, grid) if not prefix_only else None
            back = [] if maps is None else [rolled(maps, -cells_R2).flatten(2).mT]
            parts.append(torch.cat([copy[:, :prefix], *back], dim=1).float())
        return torch.stack(parts).mean(0)

    @cached_property
    def sha256(self) -> str:
        """The hash of the tensors as they are used: of names, shapes and float32 bytes."""
        tensors = {**self.module.state_dict(), "mean": self.augment.mean, "std": self.augment.std}
        digest = hashlib.sha256()
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().float().contiguous()
            digest.update(f"{name} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    def state_dict(  # type: ignore[override]  # its overloads
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> dict[str, Any]:
        """Return nothing of its own: checkpoints do not grow."""
        return {} if destination is None else destination


def rolled(maps_RCHW: Tensor, steps_R2: Tensor) -> Tensor:
    """Return maps shifted by their own rows and columns (down, right); what leaves comes back."""
    rows, columns = (
        (torch.arange(side, device=maps_RCHW.device) - steps_R2[:, axis, None]) % side
        for axis, side in enumerate(maps_RCHW.shape[-2:])
    )
    number = torch.arange(len(maps_RCHW), device=maps_RCHW.device)[:, None, None]
    return maps_RCHW.movedim(1, -1)[number, rows[:, :, None], columns[:, None]].movedim(-1, 1)


def _lacks_nothing(reference: nn.Module, keys: Any) -> None:
    """Let a state without the reference's tensors be complete."""
    keys.missing_keys[:] = [key for key in keys.missing_keys if ".reference." not in f".{key}"]


def check_pass(layout: Layout, method: str, name: str, own: Pass) -> None:
    """Raise ``UserError`` unless the reference can run this pass of ``method``."""
    reference, channels = layout.reference, layout.encoder.channels
    if reference is None:
        raise UserError(
            f"algorithms.{method} needs a reference, an encoder of published weights that stays as "
            "it is. Add reference: {weights: start} to the recipe for the encoder that "
            "encoder.weights gives; or a file, a run, or timm:NAME,FILE. In Python: "
            "PretrainModel(encoder, algorithms, reference=pospre.wrap_encoder(vit))."
        )
    if own.over != ALL or own.context is not None or own.edits_content or own.edits_places:
        raise UserError(
            f"algorithms.{method} declares masks or editors in the pass '{name}', but the "
            "reference sees whole views. Declare Pass(reference=True) without them."
        )
    if reference.channels != channels:
        raise UserError(
            f"reference: its encoder takes {reference.channels} channels, but encoder.channels = "
            f"{channels}. Use another reference."
        )
    if isinstance(getattr(reference, "norm", None), nn.Identity):
        raise UserError(
            f"reference: its encoder has no final norm, and algorithms.{method} compares features "
            "after it. Use weights that have one."
        )
    group = layout.seen_by_reference(own.group)
    size, patch = layout.views[group].shape, reference.patch_size
    for side, part in zip(size, patch, strict=True):
        if side % part:
            near = [max(1, round(each / one)) * one for each, one in zip(size, patch, strict=True)]
            raise UserError(
                f"reference: its patches of {part} pixels do not divide the views of "
                f"data.views.{group}, {list(size)}. Give it views of its own: data.views.anchor="
                f"{{of: {own.group}, size: {near[0] if near[0] == near[1] else near}}}."
            )
    if group != own.group and (mixer := layout.writers.get(f"{own.group}/pixels")):
        raise UserError(
            f"algorithms.{mixer} mixes the images of data.views.{own.group}, but not those of "
            f"data.views.{group}, which the reference sees. Leave out data.views.{group}."
        )
    if size != reference.image_size and not reference.positions.takes_any_grid:
        raise UserError(
            f"reference: its positions, {reference.positions.name}, support only views of "
            f"{list(reference.image_size)} pixels, but data.views.{group} has {list(size)}. Give "
            f"it views of its own: data.views.anchor={{of: {own.group}, size: "
            f"{reference.image_size[0]}}}."
        )
