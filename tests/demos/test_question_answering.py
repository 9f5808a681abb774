"""Networks that find answers."""

import pytest
import torch
from torch import nn

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.demos.question_answering import AnswerFinder, QuestionAnswerer, best_spans
from lightning_egeria.demos.squad import QUESTION
from support.demos import PLACES, answerer, asked, data_of, encoder, fit, squad, trainer_for


def test_padding_is_not_seen_and_answers_lie_in_the_paragraph():
    net = AnswerFinder(encoder()).eval()
    tokens, kinds = torch.randint(5, 200, (2, 6)), torch.tensor([[0, 0, 1, 1, 2, 0]] * 2)
    logits = net(tokens, kinds)
    assert (logits.isfinite() == (kinds != QUESTION)[:, :, None]).all()
    none = torch.zeros(2, 3, dtype=torch.long)
    longer = net(torch.cat([tokens, none], 1), torch.cat([kinds, none], 1))
    torch.testing.assert_close(longer[:, :6], logits, rtol=1e-4, atol=1e-5)
    assert (longer[:, 6:] == -torch.inf).all()
    _, spans = best_spans(longer)
    assert ((spans >= 2) & (spans <= 4)).all()


def test_learns_four_answers_by_heart(root):
    metrics = fit(answerer(), root, 40)
    assert float(metrics["val/loss"]) < 0.5
    assert float(metrics["val/f1"]) > 0.7
    assert float(metrics["val/exact"]) > 0.7


class Knowing(nn.Module):
    """Finds some pieces wherever they stand."""

    def __init__(self, pieces):
        super().__init__()
        self.pieces = torch.tensor(pieces)

    def forward(self, tokens, kinds):
        logits = torch.isin(tokens, self.pieces).float()[:, :, None].expand(-1, -1, 2)
        return logits.masked_fill((kinds == QUESTION)[:, :, None], -torch.inf)


@pytest.mark.parametrize("name", PLACES)
def test_the_answer_is_the_likeliest_in_all_windows(root, name):
    (root / "my_dev.json.gz").unlink()
    (root / "my_dev.json").write_text(squad(asked(name)))
    data = data_of(root, longest=20)
    data.setup("fit")
    model = QuestionAnswerer(Knowing(data.tokenizer.encode(PLACES[name]).ids), torch.optim.AdamW)
    (metrics,) = trainer_for(1).validate(model, datamodule=data, verbose=False)
    assert len(data.val_set[0]) > 2
    assert metrics["val/exact"] == 1.0


def test_f1_counts_words_and_lies_between_0_and_1(root):
    metrics = fit(answerer(), root, 1)
    assert 0 <= float(metrics["val/exact"]) <= float(metrics["val/f1"]) < 1


def test_the_embedding_and_then_each_layer_can_freeze(root):
    freezing = KnowledgeGuidedFreezing(ScriptedPolicy({2: 1}), background=False)
    fit(answerer(), root, 2, freezing)
    assert freezing.frozen_depth == 1
    assert freezing.layer_modules == ["net.encoder.embedding", "net.encoder.layers.0", "net.encoder.layers.1"]


def test_layers_are_compared_with_an_earlier_network(root):
    never = FreezingPolicy(1e-30, pretrained=True, peer_tolerance=0, trial=False)
    freezing = KnowledgeGuidedFreezing(never, background=False, deterministic=True, evaluate_every_n_steps=1)
    fit(answerer(), root, 4, freezing)
    assert freezing.savings().evaluations_done > 0
