"""Texts that are padded further, or less: whether their outputs agree."""

import types

import pytest
import torch
from lazies import ONE_ARGUMENT, Layers
from torch.nn.utils.rnn import pad_sequence

from lightning_egeria.caching import padding
from lightning_egeria.caching.levels import Lengths
from lightning_egeria.caching.padding import judge_folding, judge_length, same_rows
from lightning_egeria.lazy.keys import Keys
from lightning_egeria.lazy.meta import Meta
from lightning_egeria.lazy.outside import Outside
from lightning_egeria.lazy.tape import Tape
from lightning_egeria.stores.rows import RowForm
from lightning_egeria.training.notices import Notices

EMBEDDING = torch.randn(20, 4)


def judged(function, lengths=(3, 9, 5, 2)):
    """What a batch of padded texts tells: whether lengths agree, whether the bits do, and the message."""
    tokens = pad_sequence([torch.arange(1, 1 + length) for length in lengths], batch_first=True)
    tape = Tape(Keys(), len(tokens), lambda places: [], lambda: None)
    value = function(tokens)
    (node,) = tape.record("layers", Layers(function), [tape.outside(tokens)], ONE_ARGUMENT, [Meta.of(value)])
    level = types.SimpleNamespace(form=RowForm.of(value).with_room(64), padded=Lengths())
    notices, texts = Notices("cache"), []
    notices.inform = lambda text, once=None: texts.append(text)
    outside = Outside()
    assert outside.fits(node, ragged=True)
    judge_length(level, outside, node, notices)
    return level.padded.agree, level.padded.exact, "".join(texts) or None


def masked_mean(tokens):
    real = (tokens != 0)[..., None]
    x = EMBEDDING[tokens] * real
    return x + x.sum(1, keepdim=True) / real.sum(1, keepdim=True)


def test_lengths_agree_where_the_padding_is_masked():
    assert judged(lambda tokens: EMBEDDING[tokens]) == (True, True, None)
    assert judged(masked_mean)[0] is True


def test_other_bits_of_another_length_are_told():
    agree, exact, text = judged(lambda tokens: masked_mean(tokens) * (1 + 1e-6 * tokens.shape[1]))
    assert agree is True
    assert exact is False
    assert "the last bits of a text's output depend on the length of its batch" in text


@pytest.mark.parametrize(
    "function",
    [
        lambda tokens: EMBEDDING[tokens] - EMBEDDING[tokens].mean(1, keepdim=True),
        lambda tokens: EMBEDDING[tokens] + EMBEDDING[tokens[:, -1:]],  # whether there is any
        lambda tokens: EMBEDDING[tokens].bfloat16() * (1 + 0.01 * tokens.shape[1]),  # too coarse to tell
        lambda tokens: EMBEDDING[tokens].view(tokens.shape[0], 9, 4),
        lambda tokens: EMBEDDING[tokens] @ EMBEDDING[tokens].mT,
    ],
    ids=["no mask", "last position", "coarse", "one length only", "each with each"],
)
def test_lengths_do_not_agree_where_the_padding_is_seen(function):
    agree, _, text = judged(function)
    assert agree is False
    assert "depends on how far it is padded" in text


def test_a_batch_without_padding_tells_nothing():
    assert judged(masked_mean, (5, 5, 5)) == (None, True, None)
    assert judged(masked_mean, (5, 4, 5)) == (None, True, None)  # one equal value at the end may be chance


def test_texts_agree_beside_the_largest_value_of_each_channel():
    value = torch.randn(3, 5, 4)
    value[..., 0] = 3e4  # one channel of large values must not hide what the others do
    other = value.clone()
    other[1, 2, 3] += 1e-2
    assert same_rows(value, other).tolist() == [True, False, True]
    assert same_rows(value, value + 1e-6 * value).all()
    assert same_rows(value.bfloat16(), other.bfloat16()).all()
    assert same_rows(value, other, torch.bfloat16).all()
    value[0, 0, 1] = torch.nan
    assert not same_rows(value, value)[0]


@pytest.mark.parametrize(
    ("other", "folds"),
    [(lambda x: x, True), (lambda x: x * 2, False), (lambda x: x.double(), False), (lambda x: None, False)],
    ids=["the same", "other values", "another dtype", "not known"],
)
def test_what_is_fast_is_used_where_it_agrees(monkeypatch, other, folds):
    monkeypatch.setattr(padding, "precision_of", lambda node: torch.bfloat16)
    module, node = types.SimpleNamespace(training=True), types.SimpleNamespace(meta=Meta.of(EMBEDDING))
    node.tape = types.SimpleNamespace(size=3)
    front = types.SimpleNamespace(folds={}, device=torch.device("cpu"), prefix=types.SimpleNamespace(module=module))
    rows = EMBEDDING[:12].view(3, 4, 4)
    outside = types.SimpleNamespace(replayed=lambda node, places: other(rows) if front.folds[True] else rows)
    level = types.SimpleNamespace(padded=types.SimpleNamespace(exact=False))
    judge_folding(front, level, node, outside)
    assert front.folds == {True: folds}
    judge_folding(front, level, node, None)  # once


def test_bits_that_are_promised_are_kept():
    front = types.SimpleNamespace(folds={}, prefix=types.SimpleNamespace(module=types.SimpleNamespace(training=True)))
    level = types.SimpleNamespace(padded=types.SimpleNamespace(exact=True))
    judge_folding(front, level, None, None)
    assert front.folds == {}
