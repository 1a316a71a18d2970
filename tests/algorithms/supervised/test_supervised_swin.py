"""Classification with Swin: the mean of the merged tokens, and every weight learns."""

import torch
from torch import Tensor

from pospre.algorithms.supervised.supervised import Classification
from pospre.model.model import PretrainModel
from pospre.training.build import build_model
from tests.algorithms.cases import random_views
from tests.swin_runs import SUPERVISED, small_swin


def make(**options: object) -> tuple[PretrainModel, dict[str, Tensor]]:
    recipe = small_swin("unused", "supervised", {**SUPERVISED, **options}, drop_path=0.1)
    model = build_model(recipe)
    labels = {"label": torch.tensor([0, 4, 2, 2])}
    return model, model.draw(random_views(side=64, seed=4) | labels)


def test_the_mean_of_the_normalised_merged_tokens_is_classified() -> None:
    model, batch = make()
    model.eval()
    tokens = model.encoder(model.images(batch)[:, 0])
    assert tokens.shape == (4, 4, 768)
    head = model.objectives["supervised"]
    assert isinstance(head, Classification)
    expected = head.head.linear(tokens.mean(1))
    torch.testing.assert_close(model(batch)["supervised"]["logits"], expected)


def test_every_weight_learns_from_mixed_images() -> None:
    model, batch = make(mixup=0.8, cutmix=1.0, label_smoothing=0.1, head_init=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    losses = []
    for step in range(2):
        loss = model.loss(model(batch), batch)["total"]
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            still = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
            assert not still
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
