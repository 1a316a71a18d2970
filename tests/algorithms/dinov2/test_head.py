"""The prototype head."""

import copy

import pytest
import torch

from pospre.algorithms.dinov2.prototype_task import PrototypeHead


def small_head(**options):
    torch.manual_seed(0)
    return PrototypeHead(12, 20, hidden=16, bottleneck=8, **options)


def test_a_learned_norm_starts_at_one_and_scales_its_prototype():
    plain, learned = small_head(), small_head(train_norm=True)
    tokens = torch.randn(4, 12)
    torch.testing.assert_close(learned(tokens), plain(tokens))
    learned.last.scale.data[3] = 2
    torch.testing.assert_close(learned(tokens)[:, 3], 2 * plain(tokens)[:, 3])
    assert learned.last.scale.ndim == 2  # decayed like a matrix, as in the published code


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_mlp_has_that_many_layers(layers):
    widths = [p.shape[0] for n, p in small_head(layers=layers).mlp.named_parameters() if "w" in n]
    assert widths == [16] * (layers - 1) + [8]


def test_the_mlp_is_drawn_from_a_narrow_normal():
    head = PrototypeHead(192, 64)
    weights = torch.cat([p.flatten() for n, p in head.mlp.named_parameters() if "weight" in n])
    assert weights.std().item() == pytest.approx(0.02, rel=0.02)
    assert not any(p.any() for n, p in head.mlp.named_parameters() if "bias" in n)


def test_tokens_of_zeros_and_of_half_precision_stay_finite():
    head = small_head()
    zeros = torch.zeros(2, 12, requires_grad=True)
    head(zeros).sum().backward()
    assert zeros.grad is not None and zeros.grad.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        logits = head(torch.randn(6, 12))
    assert logits.abs().max() <= 1.01


def test_a_copy_and_a_compiled_head_give_the_same(whole_graph):
    head = small_head(train_norm=True)
    tokens = torch.randn(4, 12)
    expected = head(tokens)
    torch.testing.assert_close(copy.deepcopy(head)(tokens), expected)
    compiled = whole_graph(head)
    torch.testing.assert_close(compiled(tokens), expected)
    names = set(head.state_dict())
    assert {"last.weight", "last.scale"} == {name for name in names if name.startswith("last")}
