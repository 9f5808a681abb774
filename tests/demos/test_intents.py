"""Labelled sentences from CSV files."""

import csv
import gzip

import pytest

from lightning_egeria.demos.intents import IntentData
from lightning_egeria.errors import ArgumentError, TrainingDataError

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "my", "card", "is", "lost", "pay", "##ing", ","]
TRAIN = [("My card is lost, lost", "lost"), ("Paying", "payment"), ("pay my card", "payment"), ("lost", "lost")]


def write(path, rows, columns=("text", "category")):
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


@pytest.fixture
def root(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(PIECES))
    write(tmp_path / "train.csv.gz", TRAIN)
    write(tmp_path / "test.csv.gz", [("my card", "lost")])
    return tmp_path


def test_sentences_become_padded_pieces(root):
    data = IntentData(str(root), batch_size=4)
    data.setup("fit")
    assert [tokens.tolist() for tokens, _ in data.train_set] == [
        [2, 5, 6, 7, 8, 11, 8, 3],
        [2, 9, 10, 3],
        [2, 9, 5, 6, 3],
        [2, 8, 3],
    ]
    assert [label for _, label in data.train_set] == [0, 1, 1, 0]
    ((tokens, labels),) = data.train_dataloader()
    assert tokens.shape == (4, 8)
    assert (tokens == 0).sum() == 4 + 3 + 5
    assert sorted(labels.tolist()) == [0, 0, 1, 1]
    ((tokens, labels),) = data.val_dataloader()
    assert tokens.tolist() == [[2, 5, 6, 3]]


def test_a_part_of_the_sentences_and_of_each(root):
    parts = []
    for seed in (0, 0, 1):
        data = IntentData(str(root), batch_size=1, train_size=2, longest=3, split_seed=seed)
        data.setup("fit")
        parts.append([tokens.tolist() for tokens, _ in data.train_set])
        assert all(len(tokens) <= 3 for tokens in parts[-1])
    assert len(parts[0]) == 2
    assert parts[0] == parts[1] != parts[2]
    with pytest.raises(ArgumentError, match="the 4 sentences in"):
        IntentData(str(root), batch_size=2, train_size=5).setup("fit")


def test_what_is_wrong_is_named(root):
    write(root / "test.csv.gz", [("my card", "found")])
    with pytest.raises(TrainingDataError, match="no training sentences of the classes 'found'"):
        IntentData(str(root)).setup("fit")
    write(root / "test.csv.gz", [("my card", "lost")], columns=("sentence", "class"))
    with pytest.raises(TrainingDataError, match=r"test.csv.gz must be a gzipped CSV file with the columns text"):
        IntentData(str(root)).setup("fit")
    (root / "train.csv.gz").unlink()
    with pytest.raises(TrainingDataError, match=r"train.csv.gz must be a gzipped CSV"):
        IntentData(str(root)).setup("fit")
    with pytest.raises(ArgumentError, match=r"words.txt: no such file"):
        IntentData(str(root), vocabulary="words.txt").setup("fit")
