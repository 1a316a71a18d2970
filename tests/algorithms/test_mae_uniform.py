"""MAE with uniform masking (UM-MAE), on Swin-T and on a ViT."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pospre.algorithms.mae import PixelRegression
from pospre.model.model import PretrainModel
from pospre.nn.encoder_interface import patchify, unpatchify
from pospre.nn.positions.sincos import SinCos
from pospre.recipe.recipe import Recipe
from pospre.training.build import build_model
from tests.algorithms.cases import random_views, train_and_resume
from tests.swin_runs import small_swin

UNIFORM = {"sampling": "uniform", "second_mask_ratio": 0.25}
DECODER = {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}


def um_mae(**options: Any) -> Recipe:
    return small_swin("runs", "mae", {**DECODER, **UNIFORM, **options}, image_size=128)


@pytest.fixture(scope="module")
def written() -> tuple[PretrainModel, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = build_model(um_mae()).eval()
    return model, model.draw(random_views(size=2, side=128, seed=5))


def test_one_patch_of_every_square_is_visible_row_by_row_and_a_quarter_of_them_hidden(
    written: tuple[PretrainModel, dict[str, Tensor]],
) -> None:
    keep = written[1]["view/visible"]
    squares = keep // 8 // 2 * 4 + keep % 8 // 2
    assert torch.equal(squares, torch.arange(16).expand(2, -1))
    everything = torch.cat([keep, written[1]["view/hidden"]], dim=1).sort(1).values
    assert torch.equal(everything, torch.arange(64).expand(2, -1))
    assert written[1]["view/masked"].sum(1).tolist() == [4, 4]  # 16 − int(16·(1 − .25))
    assert not torch.equal(*written[1]["view/masked"])


def test_hidden_and_removed_patches_never_reach_the_prediction(
    written: tuple[PretrainModel, dict[str, Tensor]],
) -> None:
    model, batch = written
    before = model(batch)["mae"]["predicted"]
    hidden = torch.zeros(2, 64, dtype=torch.bool).scatter(
        1, batch["view/visible"], batch["view/masked"]
    )
    removed = torch.zeros(2, 64, dtype=torch.bool).scatter(1, batch["view/hidden"], True)
    for where, same in ((hidden | removed, True), (~(hidden | removed), False)):
        patches = patchify(batch["view/image"][:, 0], (16, 16))
        images = unpatchify(torch.where(where[..., None], patches ^ 255, patches), (8, 8))
        after = model({**batch, "view/image": images.unsqueeze(1)})["mae"]["predicted"]
        assert torch.equal(after, before) is same


def test_hidden_patches_enter_as_the_published_code_has_it(
    written: tuple[PretrainModel, dict[str, Tensor]],
) -> None:
    """The learned vector in the place of each token of 4 px, under the embedding's norm."""
    model, batch = written
    embed: Any = model.encoder.patch_embed
    token: Any = model.contents.named["mae"].token
    images = model.images(batch)[:, 0]
    seen = []
    embed_norm = embed.norm.register_forward_hook(lambda *call: seen.append(call[2]))
    model(batch)
    embed_norm.remove()
    whole = embed.norm(embed.proj(images).permute(0, 2, 3, 1))  # B, 32, 32, 96
    (tokens,) = seen
    for sample, slot in ((0, 0), (0, 7), (1, 15)):
        row, col = (4 * int(part) for part in divmod(batch["view/visible"][sample, slot].item(), 8))
        expected = whole[sample, row : row + 4, col : col + 4]
        if batch["view/masked"][sample, slot]:
            expected = embed.norm(token[0, 0]).expand(4, 4, -1)
        torch.testing.assert_close(tokens[sample, slot], expected, rtol=1e-4, atol=1e-5)


def test_merged_tokens_are_told_apart_as_by_the_published_pixel_shuffle(
    written: tuple[PretrainModel, dict[str, Tensor]],
) -> None:
    model, batch = written
    objective = model.objectives["mae"]
    assert isinstance(objective, PixelRegression)
    merged = torch.randn(2, 4, 768, generator=torch.Generator().manual_seed(1))
    entered = []
    hook = objective.blocks.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    objective({"student": merged}, {**batch, "view/pixels": model.images(batch)})
    hook.remove()
    # a linear layer's outputs are (square, channel) here and (channel, square) there
    maps = objective.embed(merged).unflatten(2, (4, 32)).transpose(2, 3).flatten(2)
    assert isinstance(objective.positions, SinCos)
    vectors = objective.positions.at((8, 8))
    maps = F.pixel_shuffle(maps.transpose(1, 2).unflatten(2, (2, 2)), 2)
    tokens = maps.flatten(2).transpose(1, 2) + vectors[batch["view/visible"]]
    for sample in range(2):
        found = entered[0][sample, batch["view/visible"][sample]]
        torch.testing.assert_close(found, tokens[sample])


def test_it_learns_and_resumes() -> None:
    recipe = um_mae()

    model, losses = train_and_resume(
        lambda: build_model(recipe), random_views(size=2, side=128, seed=5), saved_after=1, steps=2
    )
    assert losses[-1] < losses[0]
    contents: dict[str, Any] = {**model.contents.named}
    assert contents["mae"].token.grad.any()
