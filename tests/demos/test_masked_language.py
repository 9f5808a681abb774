"""Masked pieces, and the encoder that learns from them."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from lightning_egeria.demos.masked_language import MaskedLanguageModel, WordGuesser, masked
from lightning_egeria.demos.question_answering import AnswerFinder, Encoder, QuestionAnswerer
from lightning_egeria.demos.squad import MASK
from lightning_egeria.errors import ArgumentError
from support.demos import answerer, encoder, fit


def test_a_seventh_of_the_pieces_is_asked_for():
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (100, 100))
    gaps, asked_for = masked(tokens, 1000)
    assert (gaps == tokens)[~asked_for].all()
    assert (tokens > MASK)[asked_for].all()
    assert asked_for.float().mean() == pytest.approx(0.15, abs=0.01)
    assert (gaps == MASK)[asked_for].float().mean() == pytest.approx(0.8, abs=0.02)
    assert (gaps == tokens)[asked_for].float().mean() == pytest.approx(0.1, abs=0.02)


def test_question_answering_starts_from_a_trained_encoder(root, tmp_path):
    model = MaskedLanguageModel(WordGuesser(encoder()), partial(torch.optim.AdamW, lr=3e-3))
    torch.manual_seed(1)
    before = fit(MaskedLanguageModel(WordGuesser(encoder()), partial(torch.optim.AdamW, lr=0.0)), root, 1)["val/loss"]
    assert fit(model, root, 10)["val/loss"] < before - 1
    path = tmp_path / "encoder.safetensors"
    model.save_encoder(path)
    assert all(name.startswith("encoder.") for name in load_file(path))

    head = answerer().net.head.weight.clone()
    net = answerer(weights=str(path)).net
    torch.testing.assert_close(net.encoder.state_dict(), model.net.encoder.state_dict())
    torch.testing.assert_close(net.head.weight, head)
    with pytest.raises(ArgumentError, match="holds another network"):
        QuestionAnswerer(AnswerFinder(Encoder(width=16)), torch.optim.AdamW, weights=str(path))
