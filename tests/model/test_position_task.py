"""Answers about whole views, and relations: their scores, and what they are compared with."""

import pytest
import torch

from pospre.model.position_task import Relations, ViewAnswers


def test_r2_is_the_share_of_each_numbers_variance_that_is_explained() -> None:
    true = torch.tensor([[[0.0, 5.0, 1.0]], [[2.0, 6.0, 1.0]], [[4.0, 5.0, 1.0]]])
    found = Relations(true + torch.tensor([1.0, 0.0, 0.0]), true)
    assert found.score().tolist() == pytest.approx([1 - 3 / 8, 1.0, 0.0])  # the last is always 1
    among = torch.tensor([[True], [True], [False]])
    assert found.score(among).tolist() == pytest.approx([1 - 2 / 2, 1.0, 0.0])
    assert found.score(~among & among).tolist() == [0.0, 0.0, 0.0]  # no pair


def test_relations_of_other_samples_are_the_level_of_guessing() -> None:
    true = torch.randn(256, 2, 3)
    blind, told = Relations(torch.randn(256, 2, 3), true), Relations(true * 0.9, true)
    for found, leaks in ((blind, False), (told, True)):
        mean, deviation = found.chance()
        assert ((found.score() - mean) / deviation > 4).tolist() == [leaks] * 3
    again = told.redraw(3).true
    assert torch.equal(again, told.redraw(3).true)
    assert not torch.equal(again, told.redraw(4).true)
    assert torch.equal(again.sort(0).values, true.sort(0).values)
    assert all((row == true).all((1, 2)).any() for row in again)  # whole samples are exchanged


def test_places_in_another_view_are_redrawn_with_the_whole_view() -> None:
    """Who knows a patch's own index, and nothing else, is at the level of guessing."""
    torch.manual_seed(0)
    offset = torch.randint(-3, 4, (512, 1))
    places = torch.arange(9) + offset
    counted = (places >= 0) & (places < 9)
    places = torch.where(counted, places, -1)
    logits = -(torch.arange(9.0)[:, None] - torch.arange(9.0)).abs().expand(512, 9, 9)
    found = ViewAnswers(logits, places, torch.zeros_like(counted), counted)
    mean, deviation = found.chance()
    assert mean > 1.5 / 9  # more than one in nine
    assert (found.score() - mean).abs() < 3 * deviation
    drawn = found.redraw(1)
    assert isinstance(drawn, ViewAnswers)
    assert torch.equal(drawn.places >= 0, drawn.counted)
