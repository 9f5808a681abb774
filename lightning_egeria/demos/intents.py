"""Sentences with the intent of their writer, from CSV files such as those of Banking77."""

import csv
import gzip
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_egeria.demos.data import InMemoryData
from lightning_egeria.errors import ArgumentError, TrainingDataError, first_of

PAD = 0
Sample = tuple[Tensor, int]


def read_labelled(path: Path) -> list[tuple[str, str]]:
    """Read texts and the names of their classes from a gzipped CSV file with the columns `text` and `category`.

    Raises:
        TrainingDataError: if the file is missing or has other columns.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
            return [(row["text"], row["category"]) for row in csv.DictReader(file)]
    except (OSError, KeyError, UnicodeDecodeError) as error:
        raise TrainingDataError(
            f"{path} must be a gzipped CSV file with the columns text and category: {error!r}"
        ) from error


def padded(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Collate sentences to tokens `[B, T]`, padded with 0 to the longest one, and labels `[B]`.

    >>> tokens, labels = padded([(torch.tensor([7, 8, 9]), 1), (torch.tensor([7]), 0)])
    >>> tokens.tolist(), labels.tolist()
    ([[7, 8, 9], [7, 0, 0]], [1, 0])
    """
    tokens, labels = zip(*samples, strict=True)
    return pad_sequence(list(tokens), batch_first=True, padding_value=PAD), torch.tensor(labels)


class IntentData(InMemoryData):
    """Sentences from `train.csv.gz` and `test.csv.gz` in `root`; the test sentences validate.

    Batches are `(tokens [B, T], labels [B])`, padded with 0. Banking77 (Casanueva et al., 2020, arXiv:2003.04807) has
    this form.

    Args:
        root: folder of the data.
        vocabulary: file in `root`, or elsewhere, with one lower-case word piece a line, as BERT's `vocab.txt`.
        batch_size: sentences of one batch.
        train_size: number of training sentences, chosen at random; None takes all.
        split_seed: seed of that choice.
        longest: largest number of pieces of a sentence; the rest is cut off.
        num_workers: processes of each data loader.
    """

    collate_fn = staticmethod(padded)

    def __init__(
        self,
        root: str,
        vocabulary: str = "vocab.txt",
        batch_size: int = 64,
        train_size: int | None = None,
        split_seed: int = 0,
        longest: int = 64,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root, self.vocabulary = Path(root), Path(root) / vocabulary
        self.train_size, self.split_seed, self.longest = train_size, split_seed, longest

    def setup(self, stage: str) -> None:
        """Read both files and split the texts into word pieces, once.

        Raises:
            ArgumentError: if the vocabulary is missing, or `train_size` is out of range.
            TrainingDataError: if a file is missing, has another format, or a test sentence has a class of its own.
        """
        if hasattr(self, "train_set"):
            return
        if not self.vocabulary.is_file():
            raise ArgumentError(f"data.vocabulary={self.vocabulary}: no such file")
        tokenizer = BertWordPieceTokenizer(str(self.vocabulary), lowercase=True)
        train, val = (read_labelled(self.root / f"{split}.csv.gz") for split in ("train", "test"))
        self.classes = sorted({name for _, name in train})
        if unknown := sorted({name for _, name in val} - set(self.classes)):
            raise TrainingDataError(f"{self.root} has no training sentences of the classes {first_of(unknown)}")
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(train), f"sentences in {self.root}")
            train = random.Random(self.split_seed).sample(train, self.train_size)
        self.train_set = self._encoded(tokenizer, train)  # type: ignore[assignment]  # a list works as a Dataset
        self.val_set = self._encoded(tokenizer, val)  # type: ignore[assignment]

    def _encoded(self, tokenizer: BertWordPieceTokenizer, texts: Iterable[tuple[str, str]]) -> list[Sample]:
        numbers = {name: number for number, name in enumerate(self.classes)}
        return [(torch.tensor(tokenizer.encode(text).ids[: self.longest]), numbers[name]) for text, name in texts]
