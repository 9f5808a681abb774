"""Translation: sentence pairs from text files, a transformer, and a LightningModule without any freezing code."""

import gzip
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.text import SacreBLEUScore

from lightning_egeria.demos.data import InMemoryData
from lightning_egeria.demos.schedules import ScheduledModule
from lightning_egeria.errors import TrainingDataError

PAD, BEGIN, END, UNKNOWN = range(4)


class Vocabulary:
    """The words of a language by number: four special ones, then those that occur at least twice.

    Args:
        sentences: sentences of the language.
        largest: largest number of words; keeps the most frequent ones.

    >>> vocabulary = Vocabulary(["a man and a dog", "a man"])
    >>> vocabulary.encode("a cat and a man")
    [1, 4, 3, 3, 4, 5, 2]
    >>> vocabulary.decode([1, 4, 5, 99, 2, 4])
    'a man <unknown>'
    """

    def __init__(self, sentences: Iterable[str], largest: int = 8000) -> None:
        counts = Counter(word for sentence in sentences for word in self.split(sentence))
        words = sorted((word for word, count in counts.items() if count > 1), key=lambda word: (-counts[word], word))
        self.words = ["<pad>", "<begin>", "<end>", "<unknown>", *words][:largest]
        self._numbers = {word: number for number, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    @staticmethod
    def split(sentence: str) -> list[str]:
        """Return words and punctuation marks in lower case."""
        spaced = "".join(c if c.isalnum() or c in "'-" else f" {c} " for c in sentence.lower())
        return spaced.split()

    def encode(self, sentence: str) -> list[int]:
        """Return the numbers of the words, with beginning and end marks."""
        return [BEGIN, *(self._numbers.get(word, UNKNOWN) for word in self.split(sentence)), END]

    def decode(self, numbers: Sequence[int]) -> str:
        """Return the words up to the end mark in one line; a number without a word is `<unknown>`."""
        end = numbers.index(END) if END in numbers else len(numbers)
        known = (number if number < len(self.words) else UNKNOWN for number in numbers[:end])
        return " ".join(self.words[number] for number in known if number > END)


def padded(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Collate pairs to sources `[B, S]` and targets `[B, T]`, each padded with 0 to the longest."""
    source, target = zip(*pairs, strict=True)
    return pad_sequence(list(source), batch_first=True), pad_sequence(list(target), batch_first=True)


class TranslationData(InMemoryData):
    """Sentence pairs, one sentence a line, from `train.en`, `train.de`, `val.en` and `val.de` in `root`, or `.gz`.

    This is the format of Multi30k (Elliott et al., 2016). Batches are `(source [B, S], target [B, T])`, padded with 0;
    both have beginning and end marks.

    Args:
        root: folder of the data.
        source, target: languages: the suffixes of the files.
        batch_size: pairs of one batch.
        train_size: number of training pairs, from the first on; None takes all.
        largest_vocabulary: largest number of words of each language.
        num_workers: processes of each data loader.
    """

    collate_fn = staticmethod(padded)

    def __init__(
        self,
        root: str,
        source: str = "en",
        target: str = "de",
        batch_size: int = 128,
        train_size: int | None = None,
        largest_vocabulary: int = 8000,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, num_workers)
        self.root, self.languages, self.train_size = Path(root), (source, target), train_size
        self.largest_vocabulary = largest_vocabulary

    def setup(self, stage: str) -> None:
        """Read both splits and build the vocabularies from the training sentences, once.

        Raises:
            TrainingDataError: if a file is missing, or the two files of a split differ in length.
        """
        if hasattr(self, "train_set"):
            return
        train = self._read("train")
        if self.train_size is not None:
            self.check_train_size(self.train_size, len(train), f"pairs in {self.root}")
            train = train[: self.train_size]
        languages = zip(*train, strict=True)
        self.vocabularies = tuple(Vocabulary(sentences, self.largest_vocabulary) for sentences in languages)
        splits = self._encoded(train), self._encoded(self._read("val"))
        self.train_set, self.val_set = splits  # type: ignore[assignment]  # a list works as a Dataset

    def _encoded(self, pairs: list[tuple[str, str]]) -> list[tuple[Tensor, Tensor]]:
        source, target = self.vocabularies
        return [(torch.tensor(source.encode(a)), torch.tensor(target.encode(b))) for a, b in pairs]

    def _read(self, split: str) -> list[tuple[str, str]]:
        first, second = (self._lines(f"{split}.{language}") for language in self.languages)
        if len(first) != len(second):
            raise TrainingDataError(
                f"data.root={str(self.root)!r}: {split}.{self.languages[0]} has {len(first)} lines, but "
                f"{split}.{self.languages[1]} has {len(second)}. Line n of one must translate line n of the other"
            )
        return list(zip(first, second, strict=True))

    def _lines(self, name: str) -> list[str]:
        if (self.root / f"{name}.gz").is_file():
            with gzip.open(self.root / f"{name}.gz", "rt", encoding="utf-8") as file:
                return file.read().splitlines()
        if not (self.root / name).is_file():
            raise TrainingDataError(f"data.root={str(self.root)!r} has neither {name} nor {name}.gz")
        return (self.root / name).read_text(encoding="utf-8").splitlines()


class TranslationTransformer(nn.Module):
    """The transformer of Vaswani et al. (NeurIPS 2017) with learned positions and pre-normalisation.

    Args:
        source_words, target_words: sizes of the vocabularies.
        width: width of the activations.
        layers: number of encoder layers, and of decoder layers.
        heads: attention heads in each layer.
        dropout: dropout probability.
        longest: number of positions.
    """

    def __init__(
        self,
        source_words: int = 8000,
        target_words: int = 8000,
        width: int = 256,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
        longest: int = 128,
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(source_words, width, padding_idx=PAD)
        self.target = nn.Embedding(target_words, width, padding_idx=PAD)
        self.source_places, self.target_places = nn.Embedding(longest, width), nn.Embedding(longest, width)
        arguments: dict[str, Any] = {"batch_first": True, "norm_first": True, "dropout": dropout}
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, **arguments) for _ in range(layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, heads, 4 * width, **arguments) for _ in range(layers)
        )
        self.decoder_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, target_words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Map `[B, S]` and the beginning of the translation `[B, T]` to logits of the next words `[B, T, words]`."""
        return self.decode(self.encode(source), source == PAD, target)

    def encode(self, source: Tensor) -> Tensor:
        """Map sentences `[B, S]` to contextual embeddings `[B, S, width]`."""
        x = self.source(source) + self.source_places(torch.arange(source.shape[1], device=source.device))
        for layer in self.encoder:
            x = layer(x, src_key_padding_mask=source == PAD)
        meaning: Tensor = self.encoder_norm(x)
        return meaning

    def decode(self, meaning: Tensor, padding: Tensor, target: Tensor) -> Tensor:
        """Map embeddings `[B, S, width]`, their padding `[B, S]` and targets `[B, T]` to logits `[B, T, words]`."""
        length = target.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=target.device).triu(1)
        x = self.target(target) + self.target_places(torch.arange(length, device=target.device))
        for layer in self.decoder:
            x = layer(x, meaning, tgt_mask=later, memory_key_padding_mask=padding)
        logits: Tensor = self.head(self.decoder_norm(x))
        return logits


class Translator(ScheduledModule):
    """Train a `TranslationTransformer` with cross entropy; logs `train/loss`, `val/loss` and `val/bleu`.

    BLEU is SacreBLEU of greedy translations, in lower case. The words come from the Trainer's data module.

    Args:
        net: the network; its vocabularies must be large enough for the words of both languages.
        optimizer, scheduler, scheduler_interval, scheduler_length_name: as for `ScheduledModule`.
        label_smoothing: label smoothing of the cross entropy.
        longest: largest number of words in a translation.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        scheduler_interval: str = "step",
        scheduler_length_name: str | None = None,
        label_smoothing: float = 0.1,
        longest: int = 40,
    ) -> None:
        super().__init__(optimizer, scheduler, scheduler_interval, scheduler_length_name)
        self.net = net
        self.label_smoothing, self.longest = label_smoothing, longest
        self.val_bleu = SacreBLEUScore(lowercase=True)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the next words, a scalar."""
        loss = self._loss(batch, self.label_smoothing)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and BLEU over the validation set."""
        source, target = batch
        self.log("val/loss", self._loss(batch, 0.0), prog_bar=True, sync_dist=True)
        vocabulary = self.trainer.datamodule.vocabularies[1]  # type: ignore[attr-defined]  # Lightning sets it
        translated = [vocabulary.decode(row) for row in self.translate(source).tolist()]
        self.val_bleu(translated, [[vocabulary.decode(row[1:])] for row in target.tolist()])
        self.log("val/bleu", self.val_bleu, prog_bar=True)

    @torch.no_grad()
    def translate(self, source: Tensor) -> Tensor:
        """Translate `[B, S]` greedily, word by word, to `[B, up to longest]`."""
        net: Any = self.net
        meaning, padding = net.encode(source), source == PAD
        target = torch.full((len(source), 1), BEGIN, device=source.device)
        for _ in range(self.longest):
            word = net.decode(meaning, padding, target)[:, -1].argmax(-1, keepdim=True)
            target = torch.cat([target, word], 1)
            if (target == END).any(1).all():
                break
        return target[:, 1:]

    def _loss(self, batch: tuple[Tensor, Tensor], smoothing: float) -> Tensor:
        source, target = batch
        logits = self.net(source, target[:, :-1])
        return F.cross_entropy(
            logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD, label_smoothing=smoothing
        )
