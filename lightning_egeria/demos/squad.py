"""SQuAD: questions whose answers are parts of a paragraph, as numbers of word pieces."""

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Encoding, Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_egeria.demos.data import InMemoryData
from lightning_egeria.errors import ArgumentError, TrainingDataError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNKNOWN, BEGIN, SEPARATOR, MASK = range(5)
QUESTION, PARAGRAPH, SHARED = range(3)  # kinds of pieces; the last of paragraph words that the question has too
NOWHERE = -1  # where an answer begins and ends that is not in the window

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Question(NamedTuple):
    """What is asked of a paragraph.

    Attributes:
        text: of the question.
        paragraph: that has the answer.
        answers: of several people, parts of the paragraph.
        start: character of the paragraph with which the first answer begins.
        certain: whether that is known; the same words may stand elsewhere in the paragraph.
    """

    text: str
    paragraph: str
    answers: tuple[str, ...]
    start: int
    certain: bool


class Window(NamedTuple):
    """A question and as much of its paragraph as one input has room for, `T` pieces together.

    Attributes:
        tokens: numbers of the pieces, int64 `[T]`.
        kinds: int64 `[T]`, each `QUESTION`, `PARAGRAPH` or `SHARED`. The last are pieces of paragraph words that also
            occur in the question, as Chen et al. (ACL 2017) mark them.
        span: places of the first and the last piece of the first answer, int64 `[2]`; `NOWHERE` if it is not in here.
        characters: of the paragraph that each piece stands for, the first and the one behind the last, int64 `[T, 2]`.
        question: its number in the split.
    """

    tokens: Tensor
    kinds: Tensor
    span: Tensor
    characters: Tensor
    question: int


def read_questions(path: Path) -> list[Question]:
    """All questions of a file in the format of SQuAD 1.1 (Rajpurkar et al., EMNLP 2016), packed with gzip or not.

    Raises:
        TrainingDataError: it is in another format.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            articles = json.load(file)["data"]
        return [
            Question(
                text=asked["question"],
                paragraph=paragraph["context"],
                answers=tuple(answer["text"] for answer in asked["answers"]),
                start=asked["answers"][0]["answer_start"],
                # Files that were made of the texts alone say how they found the start again.
                certain=asked.get("start_source") != "first_occurrence",
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise TrainingDataError(f"{path} is not in the format of SQuAD 1.1: {error!r}") from error


def word_pieces(texts: Sequence[str], largest: int) -> Tokenizer:
    """Learn the vocabulary of some texts: WordPiece, in small letters and without accents, as BERT has it.

    The same texts give the same vocabulary in every process: weights that were trained with it can be used again.

    Args:
        texts: that it is learned from.
        largest: number of pieces at most, the special ones and the letters included.

    >>> word_pieces(["a man and a woman"] * 2, largest=40).encode("A woman, a manwoman").tokens
    ['a', 'woman', '[UNK]', 'a', 'man', '##w', '##oman']
    """
    normalizer = BertNormalizer()
    letters = sorted({letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace()})
    learner = Tokenizer(WordPiece(unk_token=SPECIAL[UNKNOWN]))
    learner.normalizer, learner.pre_tokenizer = normalizer, BertPreTokenizer()
    # The trainer numbers letters inside of words as it comes across them, in another order each time, and decides
    # between equally frequent pairs by these numbers; what it takes for special pieces has its number before.
    first = [*SPECIAL, *(f"##{letter}" for letter in letters)]
    learner.train_from_iterator(texts, WordPieceTrainer(vocab_size=largest, special_tokens=first, show_progress=False))
    # Special pieces would be looked for in the texts, so there are none in what is used.
    tokenizer = Tokenizer(WordPiece(learner.get_vocab(), unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, BertPreTokenizer()
    return tokenizer


def windows(tokenizer: Tokenizer, question: Question, number: int, longest: int) -> Iterator[Window]:
    """A question with its paragraph, or where that is too long with parts of it that overlap by half.

    Args:
        tokenizer: whose word pieces are used.
        question: which may take half of the room; what is longer is cut off.
        number: of the question in the split.
        longest: number of pieces at most.

    Yields:
        `[CLS] question [SEP] paragraph [SEP]`, front to back.
    """
    asked, read = tokenizer.encode(question.text), tokenizer.encode(question.paragraph)
    begin = [BEGIN, *asked.ids[: longest // 2], SEPARATOR]
    kinds = _kinds(asked, read)
    span = _span(read.offsets, question.start, question.start + len(question.answers[0]))
    room = longest - len(begin) - 1
    step = max(1, room // 2)
    for first in range(0, max(0, len(read.ids) - room) + step, step):
        part = slice(first, first + room)
        held = span is not None and first <= span[0] and span[1] < first + room
        shift = len(begin) - first
        yield Window(
            tokens=torch.tensor([*begin, *read.ids[part], SEPARATOR]),
            kinds=torch.tensor([QUESTION] * len(begin) + kinds[part] + [QUESTION]),
            span=torch.tensor([place + shift for place in span] if span and held else [NOWHERE, NOWHERE]),
            characters=torch.tensor([(0, 0)] * len(begin) + read.offsets[part] + [(0, 0)]),
            question=number,
        )


def _words(encoding: Encoding) -> list[tuple[int, ...]]:
    """The word that each piece belongs to, as the numbers of its pieces."""
    pieces: dict[int | None, tuple[int, ...]] = {}
    for word, piece in zip(encoding.word_ids, encoding.ids, strict=True):
        pieces[word] = (*pieces.get(word, ()), piece)
    return [pieces[word] for word in encoding.word_ids]


def _kinds(asked: Encoding, read: Encoding) -> list[int]:
    known = set(_words(asked))
    return [SHARED if word in known else PARAGRAPH for word in _words(read)]


def _span(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int] | None:
    """The first and the last piece with characters from `start` to `stop`."""
    inside = [place for place, (first, end) in enumerate(offsets) if first < stop and end > start]
    return (inside[0], inside[-1]) if inside else None


def padded(samples: Sequence[Sequence[Window]]) -> Batch:
    """A batch of all windows of some questions: each attribute of `Window` with `B` in front, padded with 0."""
    tokens, kinds, spans, characters, numbers = zip(*(window for sample in samples for window in sample), strict=True)
    return (
        pad_sequence(list(tokens), batch_first=True, padding_value=PAD),
        pad_sequence(list(kinds), batch_first=True, padding_value=QUESTION),
        torch.stack(spans),
        pad_sequence(list(characters), batch_first=True),
        torch.tensor(numbers),
    )


class SquadData(InMemoryData):
    """Questions in two files of SQuAD 1.1 in `root`: `train-v1.1.json` and `dev-v1.1.json`, or names like these.

    A file for training has `train` in its name, one for validation `eval` or `dev`; both end in `.json` or `.json.gz`.
    Batches are `(tokens [B, T], kinds [B, T], spans [B, 2], characters [B, T, 2], questions [B])`, as `Window` says,
    padded with 0. In training there is one window of each question, with the first answer as near to the middle as can
    be; questions with no certain start are left out, and those whose answer fits in no window. In validation a batch
    has all windows of its questions.

    Args:
        root: folder of the data.
        batch_size: questions of one batch.
        train_size: train on the first so many questions instead of all. The vocabulary is still that of all.
        longest: pieces of a window at most.
        largest_vocabulary: word pieces at most.
        num_workers: processes of each data loader.
    """

    collate_fn = staticmethod(padded)

    def __init__(
        self,
        root: str,
        batch_size: int = 32,
        train_size: int | None = None,
        longest: int = 256,
        largest_vocabulary: int = 8000,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        if longest < 8:
            raise ArgumentError(f"longest must be at least 8, not {longest}")
        self.root, self.train_size = Path(root), train_size
        self.longest, self.largest_vocabulary = longest, largest_vocabulary

    def setup(self, stage: str) -> None:
        """Read both splits and learn the vocabulary of the training texts, once.

        Raises:
            TrainingDataError: there is not one file for each split, or one is in another format.
        """
        if hasattr(self, "train_set"):
            return
        train, self.val_questions = (read_questions(path) for path in self._files())
        texts = dict.fromkeys(text for question in train for text in (question.paragraph, question.text))
        self.tokenizer = word_pieces(list(texts), self.largest_vocabulary)
        cuts = ([*windows(self.tokenizer, q, n, self.longest)] for n, q in enumerate(train) if q.certain)
        holding = [[window for window in cut if window.span[0] != NOWHERE] for cut in cuts]
        # In validation, the middle of some window comes by every place but those at the ends of the paragraph.
        learned = [[min(cut, key=_imbalance)] for cut in holding if cut]
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(learned), f"questions with a certain answer in {self.root}")
            learned = learned[: self.train_size]
        tested = [[*windows(self.tokenizer, q, n, self.longest)] for n, q in enumerate(self.val_questions)]
        self.train_set, self.val_set = learned, tested  # type: ignore[assignment]  # a list is as good as a Dataset

    def _files(self) -> tuple[Path, Path]:
        paths = sorted(path for path in self.root.glob("*") if path.name.endswith((".json", ".json.gz")))
        train = [path for path in paths if "train" in path.name]
        val = [path for path in paths if path not in train and ("eval" in path.name or "dev" in path.name)]
        for split, found in (("train", train), ("dev or eval", val)):
            if len(found) != 1:
                names = ", ".join(path.name for path in found) or "none"
                raise TrainingDataError(
                    f"data.root={str(self.root)!r} must have one .json or .json.gz file with {split} in its name, and "
                    f"has {names}"
                )
        return train[0], val[0]


def _imbalance(window: Window) -> int:
    """How much more of the window stands on one side of the answer than on the other, in pieces."""
    first, last = window.span.tolist()
    return int(abs(first + last - len(window.tokens)))
