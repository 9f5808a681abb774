"""Masks with a row and a column for each position: what names them at each length, and how they go on."""

import pytest
import torch

from lightning_egeria.lazy.squares import Square

OWN = [3, 5, 2]  # of texts in batches of 6 and of 9


def mask(kind, length):
    """Masks of texts, ``[texts, 1, length, length]``, with the heads behind the positions: ``[..., 1]``."""
    places = torch.arange(length)
    valid = places < torch.tensor(OWN).unsqueeze(1)
    keys, queries = valid.unsqueeze(1), valid.unsqueeze(2)
    found = {
        "keys": keys.expand(-1, length, -1),
        "causal": keys & (places <= places.unsqueeze(1)),
        "pairs": keys & queries,
        "window": keys & ((places - places.unsqueeze(1)).abs() < 2),
    }[kind]
    return torch.where(found, 0.0, -torch.inf).unsqueeze(3)


def own_with_padding(length):
    return [min(own + 1, length) for own in OWN]


@pytest.mark.parametrize(("kind", "repeats"), [("keys", True), ("causal", True), ("pairs", False)])
def test_a_mask_goes_on_as_those_of_short_texts(kind, repeats):
    short, long = mask(kind, 5), mask(kind, 9)  # the second text fills the short batch
    square = Square.learnt(short, own_with_padding(5), None)
    assert square.repeats == repeats
    assert torch.equal(square.longer(short, 9), long)
    assert square.cores(short) == square.cores(long)
    assert len(set(square.cores(short))) == 3


def test_a_window_does_not_go_on():
    masks = mask("window", 6)
    assert Square.learnt(masks, own_with_padding(6), None) is None
    other = Square.learnt(mask("causal", 6), own_with_padding(6), None)
    assert other.cores(masks)[2] != other.cores(mask("window", 9))[2]  # so it serves batches of its length only


def test_another_rule_than_before_is_none():
    causal, pairs = mask("causal", 6), mask("pairs", 6)
    known = Square.learnt(causal, own_with_padding(6), None)
    assert Square.learnt(pairs, own_with_padding(6), known) is None
    assert Square.learnt(causal * 2, own_with_padding(6), known) == known
    assert Square.learnt(causal + 1, own_with_padding(6), known) == known
    assert Square.learnt(causal.clamp(min=-9), own_with_padding(6), known) is None


def test_texts_without_padding_tell_nothing():
    full = torch.ones(2, 4, 4, dtype=torch.bool)
    assert Square.learnt(full, [4, 4], None) is None
    known = Square.learnt(mask("keys", 6), own_with_padding(6), None)
    assert Square.learnt(full, [4, 4], known) is known


def test_what_a_mask_holds_counts():
    square = Square.learnt(mask("causal", 6), own_with_padding(6), None)
    other = mask("causal", 6)
    other[0, 1, 0] = -torch.inf
    assert [one == two for one, two in zip(square.cores(other), square.cores(mask("causal", 6)), strict=True)] == [
        False,
        True,
        True,
    ]
