import gzip
import json
from functools import partial

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.demos.masked_language import MaskedLanguageModel, WordGuesser, masked
from lightning_egeria.demos.question_answering import AnswerFinder, Encoder, QuestionAnswerer, best_spans
from lightning_egeria.demos.squad import (
    BEGIN,
    MASK,
    NOWHERE,
    PAD,
    PARAGRAPH,
    QUESTION,
    SEPARATOR,
    SHARED,
    Question,
    SquadData,
    padded,
    windows,
    word_pieces,
)
from lightning_egeria.errors import ArgumentError, TrainingDataError

PLACES = {"Anna": "Rome", "Bert": "Oslo", "Carl": "Lima", "Dora": "Bonn"}
PARAGRAPH_TEXT = "  ".join(f"{name} went to {place}." for name, place in PLACES.items())


def asked(name, **more):
    place = PLACES[name]
    answer = {"text": place, "answer_start": PARAGRAPH_TEXT.index(place)}
    return {"id": name, "question": f"Where did {name} go?", "answers": [answer], **more}


def squad(*questions):
    paragraph = {"context": PARAGRAPH_TEXT, "qas": list(questions)}
    return json.dumps({"version": "1.1", "data": [{"title": "Journeys", "paragraphs": [paragraph]}]})


@pytest.fixture
def root(tmp_path):
    questions = [asked(name) for name in PLACES]
    (tmp_path / "train-v1.1.json").write_text(squad(*questions * 4, asked("Anna", start_source="first_occurrence")))
    (tmp_path / "my_dev.json.gz").write_bytes(gzip.compress(squad(*questions).encode()))
    return tmp_path


def data_of(root, **arguments):
    return SquadData(str(root), **{"batch_size": 4, "longest": 64, **arguments})


def texts(window, question):
    """What the span of a window is in the paragraph."""
    (first, last), characters = window.span.tolist(), window.characters.tolist()
    return question.paragraph[characters[first][0] : characters[last][1]]


def test_spans_are_the_answers_and_batches_are_padded(root):
    data = data_of(root, batch_size=8)
    data.setup("fit")
    batches = [*data.train_dataloader()]
    assert len(batches) == 2  # the question with no certain start is left out
    tokens, kinds, spans, characters, questions = batches[0]
    assert tokens.shape == kinds.shape == characters.shape[:2]
    assert (tokens[:, 0] == BEGIN).all()
    assert kinds[tokens == PAD].eq(QUESTION).all()
    assert spans.shape == (8, 2)
    assert len(set(questions.tolist())) == 8
    for (window,), question in zip(data.val_set, data.val_questions, strict=True):
        assert texts(window, question) == question.answers[0]
        assert (window.tokens == SEPARATOR).sum() == 2


def test_paragraph_words_that_the_question_has_are_marked():
    question = Question("Did the cats' friend go?", "The friends saw a cat and the FRIEND.", ("cat",), 18, True)
    tokenizer = word_pieces([question.text, question.paragraph], 200)
    (window,) = windows(tokenizer, question, 0, 64)
    shared = window.characters[window.kinds == SHARED].tolist()
    assert {question.paragraph[start:stop] for start, stop in shared} <= {"The", "the", *"FRIEND", "FRIEND"}
    assert "".join(question.paragraph[start:stop] for start, stop in shared) == "ThetheFRIEND"
    assert "".join(question.paragraph[a:b] for a, b in window.characters[window.kinds == PARAGRAPH]) == (
        "friendssawacatand."
    )


def test_windows_overlap_by_half_and_one_of_them_holds_the_answer():
    words = " ".join(f"w{number}" for number in range(40))
    question = Question("w1 w2", words, ("w20 w21",), words.index("w20"), True)
    tokenizer = word_pieces([words] * 2, 1000)
    cut = [*windows(tokenizer, question, 7, 15)]  # 10 words of the paragraph each
    read = [[words[a:b] for a, b in w.characters[4:-1].tolist()] for w in cut]
    assert [part[0] for part in read] == [f"w{number}" for number in range(0, 35, 5)]
    assert [len(part) for part in read] == [10] * 7
    assert read[-1][-1] == "w39"
    assert [index for index, w in enumerate(cut) if w.span[0] != NOWHERE] == [3, 4]
    assert {texts(w, question) for w in cut[3:5]} == {"w20 w21"}
    assert all(w.question == 7 and len(w.tokens) <= 15 for w in cut)
    assert len([*windows(tokenizer, question, 0, 60)]) == 1


def test_training_takes_one_window_with_the_answer_and_validation_all(root):
    data = data_of(root, longest=20, batch_size=1)
    data.setup("fit")
    assert len(data.train_set) == 16
    assert all(len(windows) > 1 for windows in data.val_set)
    tokens, _, spans, _, questions = padded(data.val_set)
    assert len(tokens) == len(questions) > 4
    assert (spans == NOWHERE).any()
    for (window,) in data.train_set:
        assert window.span[0] != NOWHERE
        assert texts(window, data.val_questions[window.question % 4]) in PLACES.values()


def test_the_vocabulary_is_the_same_each_time():
    # Many pairs are equally frequent, and the trainer's own order of them is another in each call.
    words = [f"{a}{b}{c} {c}{b}{a}" for a in "kiwé" for b in "ålmnt" for c in "oprs"]
    learned = [word_pieces(words, 90).get_vocab() for _ in range(5)]
    assert len(learned[0]) == 90
    assert learned == learned[:1] * 5


def test_what_is_missing_is_named(root):
    (root / "my_dev.json.gz").rename(root / "other.json.gz")
    with pytest.raises(TrainingDataError, match=r"one .* file with dev or eval in its name, and has none"):
        data_of(root).setup("fit")
    (root / "dev-v1.1.json").write_text("{}")
    with pytest.raises(TrainingDataError, match=r"dev-v1.1.json is not in the format of SQuAD 1.1: KeyError"):
        data_of(root).setup("fit")
    (root / "train-v2.0.json").write_text("{}")
    with pytest.raises(TrainingDataError, match=r"train in its name, and has train-v1.1.json, train-v2.0.json"):
        data_of(root).setup("fit")
    with pytest.raises(ArgumentError, match="longest must be at least 8, not 4"):
        data_of(root, longest=4)


def test_part_of_the_questions(root):
    data = data_of(root, train_size=4)
    data.setup("fit")
    assert len(data.train_set) == 4
    for size in (1, 17):
        with pytest.raises(ArgumentError, match=r"train_size must lie between .* 16 questions with a certain answer"):
            data_of(root, train_size=size).setup("fit")


def encoder():
    torch.manual_seed(0)
    return Encoder(words=200, width=32, layers=2, heads=2, dropout=0.0, longest=64)


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


def trainer_for(epochs, *callbacks):
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        check_val_every_n_epoch=epochs,
        callbacks=list(callbacks),
    )


def fit(model, root, epochs, *callbacks):
    trainer = trainer_for(epochs, *callbacks)
    trainer.fit(model, datamodule=data_of(root))
    return trainer.callback_metrics


def answerer(**arguments):
    return QuestionAnswerer(AnswerFinder(encoder()), partial(torch.optim.AdamW, lr=3e-3), **arguments)


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


def test_a_seventh_of_the_pieces_is_asked_for():
    torch.manual_seed(0)
    tokens = torch.randint(0, 1000, (100, 100))
    gaps, asked_for = masked(tokens, 1000)
    assert (gaps == tokens)[~asked_for].all()
    assert (tokens > MASK)[asked_for].all()
    assert asked_for.float().mean() == pytest.approx(0.15, abs=0.01)
    assert (gaps == MASK)[asked_for].float().mean() == pytest.approx(0.8, abs=0.02)
    assert (gaps == tokens)[asked_for].float().mean() == pytest.approx(0.1, abs=0.02)


def test_an_encoder_that_has_learned_words_is_what_question_answering_begins_with(root, tmp_path):
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


def test_the_embedding_and_then_each_layer_can_freeze(root):
    freezing = KnowledgeGuidedFreezing(ScriptedPolicy({2: 1}), background=False)
    fit(answerer(), root, 2, freezing)
    assert freezing.frozen_depth == 1
    assert freezing.layer_modules == ["net.encoder.embedding", "net.encoder.layers.0", "net.encoder.layers.1"]


def test_the_layers_can_be_compared_with_those_of_an_earlier_network(root):
    never = FreezingPolicy(1e-30, pretrained=True, peer_tolerance=0)
    freezing = KnowledgeGuidedFreezing(never, background=False, deterministic=True, evaluate_every_n_steps=1)
    fit(answerer(), root, 4, freezing)
    assert freezing.savings().evaluations_done > 0
