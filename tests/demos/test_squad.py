"""Questions, windows and word pieces."""

import pytest

from lightning_egeria.demos.squad import (
    BEGIN,
    NOWHERE,
    PAD,
    PARAGRAPH,
    QUESTION,
    SEPARATOR,
    SHARED,
    Question,
    padded,
    windows,
    word_pieces,
)
from lightning_egeria.errors import ArgumentError, TrainingDataError
from support.demos import PLACES, data_of


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


def test_windows_overlap_by_half_and_one_has_the_answer():
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


def test_training_takes_one_window_and_validation_all(root):
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
    with pytest.raises(ArgumentError, match="longest must be at least 8, got 4"):
        data_of(root, longest=4)


def test_part_of_the_questions(root):
    data = data_of(root, train_size=4)
    data.setup("fit")
    assert len(data.train_set) == 4
    for size in (1, 17):
        with pytest.raises(ArgumentError, match=r"train_size must lie between .* 16 questions with a certain answer"):
            data_of(root, train_size=size).setup("fit")
