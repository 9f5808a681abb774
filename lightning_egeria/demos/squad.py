"""SQuAD: questions with answers that are parts of a paragraph, tokenised to word pieces."""

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
QUESTION, PARAGRAPH, SHARED = range(3)  # kinds of pieces; SHARED: of paragraph words that also occur in the question
NOWHERE = -1  # place of an answer that is not in the window

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Question(NamedTuple):
    """A question about a paragraph.

    Attributes:
        text: text of the question.
        paragraph: text of the paragraph.
        answers: answers of several people, each a part of the paragraph.
        start: index of the first answer's first character in the paragraph.
        certain: whether ``start`` is certain; the same words may occur elsewhere in the paragraph.
    """

    text: str
    paragraph: str
    answers: tuple[str, ...]
    start: int
    certain: bool


class Window(NamedTuple):
    """A question and the part of its paragraph that fits into one input, `T` pieces together.

    Attributes:
        tokens: numbers of the pieces, int64 `[T]`.
        kinds: int64 `[T]`, each `QUESTION`, `PARAGRAPH` or `SHARED`: pieces of paragraph words that also occur in the
            question, as in Chen et al. (ACL 2017).
        span: places of the first and the last piece of the first answer, int64 `[2]`; `NOWHERE` if not in this window.
        characters: start and end in the paragraph of the characters of each piece, int64 `[T, 2]`.
        question: number of the question in the split.
    """

    tokens: Tensor
    kinds: Tensor
    span: Tensor
    characters: Tensor
    question: int


def read_questions(path: Path) -> list[Question]:
    """Read a file in the format of SQuAD 1.1 (Rajpurkar et al., EMNLP 2016), plain or gzipped.

    Raises:
        TrainingDataError: if the file has another format.
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
                # Files rebuilt from texts alone record how they found the start.
                certain=asked.get("start_source") != "first_occurrence",
            )
            for article in articles
            for paragraph in article["paragraphs"]
            for asked in paragraph["qas"]
        ]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise TrainingDataError(f"{path} is not in the format of SQuAD 1.1: {error!r}") from error


def word_pieces(texts: Sequence[str], largest: int) -> Tokenizer:
    """Learn a WordPiece vocabulary from texts, in lower case and without accents, as in BERT.

    The same texts give the same vocabulary in every process, so that trained weights can be used again.

    Args:
        texts: the texts.
        largest: largest number of pieces, including special pieces and letters.

    >>> word_pieces(["a man and a woman"] * 2, largest=40).encode("A woman, a manwoman").tokens
    ['a', 'woman', '[UNK]', 'a', 'man', '##w', '##oman']
    """
    normalizer = BertNormalizer()
    letters = sorted({letter for text in texts for letter in normalizer.normalize_str(text) if not letter.isspace()})
    learner = Tokenizer(WordPiece(unk_token=SPECIAL[UNKNOWN]))
    learner.normalizer, learner.pre_tokenizer = normalizer, BertPreTokenizer()
    # The trainer numbers letters inside words in a varying order, and decides between equally frequent pairs by these
    # numbers. Passing the letters as special pieces fixes their numbers.
    first = [*SPECIAL, *(f"##{letter}" for letter in letters)]
    learner.train_from_iterator(texts, WordPieceTrainer(vocab_size=largest, special_tokens=first, show_progress=False))
    # The tokenizer in use has no special pieces, because it would search the texts for them.
    tokenizer = Tokenizer(WordPiece(learner.get_vocab(), unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, BertPreTokenizer()
    return tokenizer


def windows(tokenizer: Tokenizer, question: Question, number: int, longest: int) -> Iterator[Window]:
    """Yield a question with its paragraph; a paragraph that is too long is split into parts that overlap by half.

    Args:
        tokenizer: the tokenizer.
        question: the question; it may take half of a window, the rest is cut off.
        number: number of the question in the split.
        longest: largest number of pieces in a window.

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
    """Return the word of each piece, as the numbers of all its pieces."""
    pieces: dict[int | None, tuple[int, ...]] = {}
    for word, piece in zip(encoding.word_ids, encoding.ids, strict=True):
        pieces[word] = (*pieces.get(word, ()), piece)
    return [pieces[word] for word in encoding.word_ids]


def _kinds(asked: Encoding, read: Encoding) -> list[int]:
    known = set(_words(asked))
    return [SHARED if word in known else PARAGRAPH for word in _words(read)]


def _span(offsets: Sequence[tuple[int, int]], start: int, stop: int) -> tuple[int, int] | None:
    """Return the first and the last piece with characters from `start` to `stop`."""
    inside = [place for place, (first, end) in enumerate(offsets) if first < stop and end > start]
    return (inside[0], inside[-1]) if inside else None


def padded(samples: Sequence[Sequence[Window]]) -> Batch:
    """Collate all windows of some questions: each attribute of `Window` with a batch axis in front, padded with 0."""
    tokens, kinds, spans, characters, numbers = zip(*(window for sample in samples for window in sample), strict=True)
    return (
        pad_sequence(list(tokens), batch_first=True, padding_value=PAD),
        pad_sequence(list(kinds), batch_first=True, padding_value=QUESTION),
        torch.stack(spans),
        pad_sequence(list(characters), batch_first=True),
        torch.tensor(numbers),
    )


class SquadData(InMemoryData):
    """Questions of SQuAD 1.1 from two files in `root`, such as `train-v1.1.json` and `dev-v1.1.json`.

    The file for training has `train` in its name, the one for validation `eval` or `dev`. Both end in `.json` or
    `.json.gz`. Batches are `(tokens [B, T], kinds [B, T], spans [B, 2], characters [B, T, 2], questions [B])`, the
    attributes of `Window`, padded with 0. In training, each question has one window, with the first answer near its
    middle; questions with an uncertain start, or an answer that fits into no window, are left out. In validation, a
    batch has all windows of its questions.

    Args:
        root: folder of the data.
        batch_size: questions of one batch.
        train_size: number of training questions, from the first on; None takes all. The vocabulary uses all.
        longest: largest number of pieces in a window.
        largest_vocabulary: largest number of word pieces.
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
            raise ArgumentError(f"longest must be at least 8, got {longest}")
        self.root, self.train_size = Path(root), train_size
        self.longest, self.largest_vocabulary = longest, largest_vocabulary

    def setup(self, stage: str) -> None:
        """Read both splits and learn the vocabulary of the training texts, once.

        Raises:
            TrainingDataError: if there is not exactly one file for each split, or a file has another format.
        """
        if hasattr(self, "train_set"):
            return
        train, self.val_questions = (read_questions(path) for path in self._files())
        texts = dict.fromkeys(text for question in train for text in (question.paragraph, question.text))
        self.tokenizer = word_pieces(list(texts), self.largest_vocabulary)
        cuts = ([*windows(self.tokenizer, q, n, self.longest)] for n, q in enumerate(train) if q.certain)
        holding = [[window for window in cut if window.span[0] != NOWHERE] for cut in cuts]
        # In validation, every place but those at the ends of the paragraph is near the middle of some window.
        learned = [[min(cut, key=_imbalance)] for cut in holding if cut]
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(learned), f"questions with a certain answer in {self.root}")
            learned = learned[: self.train_size]
        tested = [[*windows(self.tokenizer, q, n, self.longest)] for n, q in enumerate(self.val_questions)]
        self.train_set, self.val_set = learned, tested  # type: ignore[assignment]  # a list works as a Dataset

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
    """Return the difference in pieces between the two sides of the answer."""
    first, last = window.span.tolist()
    return int(abs(first + last - len(window.tokens)))
