"""Positions that fade into others: exact at both ends, and between them."""

from typing import Any

import pytest
import torch

from pospre.nn.build import build_encoder
from pospre.nn.positions.fading import Fading, only_old, settled
from pospre.nn.vit import Encoder

SCHEMES = ["none", "sincos", "rotary", "rotary_mixed", "alibi", "torus", "relative",
           "shared_relative", "learned_rotary"]  # fmt: skip


def small(positions: Any, **options: Any) -> Encoder:
    torch.manual_seed(0)
    encoder = build_encoder("vit_tiny16", image_size=48, depth=2, positions=positions, **options)
    assert isinstance(encoder, Encoder)
    with torch.no_grad():
        for name, parameter in encoder.named_parameters():
            if "positions" in name and "old" not in name:
                parameter.add_(torch.randn_like(parameter))
    return encoder.eval()


def fading(old: Any, new: Any) -> tuple[Encoder, Encoder]:
    """Return an encoder with ``old`` positions, and one that has taken its weights and fades."""
    before, encoder = small(old), small(new, fades_from=old)
    with only_old(encoder), torch.no_grad():
        encoder.load_state_dict(before.state_dict())
    return before, encoder


@pytest.mark.parametrize("old", ["learned", "rotary", "relative"])
@pytest.mark.parametrize("new", SCHEMES)
def test_both_ends_are_exact(old: str, new: str) -> None:
    before, encoder = fading(old, new)
    scheme, images = encoder.positions, torch.randn(2, 3, 48, 48)
    assert isinstance(scheme, Fading) and scheme.name == f"{old} → {new}"
    with torch.no_grad():
        first = encoder(images)
        torch.testing.assert_close(first, before(images), rtol=0, atol=2e-6)
        scheme.fade(0.2)
        halfway = encoder(images)
        scheme.fade(0.5)
        last = encoder(images)
    assert settled(encoder.state_dict()) is not None
    after = small(new)
    after.load_state_dict(settled(encoder.state_dict()) or {})
    with torch.no_grad():
        assert torch.equal(after(images), last)
    if old != new:
        changes = [(one - other).abs().max() for one, other in ((first, halfway), (halfway, last))]
        assert min(changes) > 1e-3


def test_nothing_but_places_fades() -> None:
    """The class token keeps its row of the table."""
    before, encoder = fading("learned", "none")
    row = before.get_parameter("positions.pos_embed")[:, :1]
    assert torch.equal(encoder.get_parameter("cls_token"), before.get_parameter("cls_token") + row)
    assert settled(encoder.state_dict()) is None  # at the start


@pytest.mark.parametrize(("progress", "share"), [(0, 0), (0.1, 0.2), (0.25, 0.5), (0.5, 1), (1, 1)])
def test_half_of_the_training_fades(progress: float, share: float) -> None:
    _, encoder = fading("learned", "torus")
    scheme: Any = encoder.positions
    scheme.fade(progress)
    assert float(scheme.share) == pytest.approx(share)
