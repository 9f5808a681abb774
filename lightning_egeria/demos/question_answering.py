"""Question answering: BERT's encoder, a head that finds answers, and a LightningModule that trains both."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torchmetrics.text import SQuAD

from lightning_egeria.demos.classifier import load_weights
from lightning_egeria.demos.schedules import ScheduledModule
from lightning_egeria.demos.squad import NOWHERE, PAD, QUESTION, Batch

LONGEST_ANSWER = 30  # pieces


def waves(longest: int, width: int) -> Tensor:
    """Return sinusoidal position encodings, `[longest, width]` (Vaswani et al., NeurIPS 2017, section 3.5)."""
    angles = torch.arange(longest)[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)


class Embedding(nn.Module):
    """Embedding of pieces, places and kinds, summed and normalised."""

    def __init__(self, words: int, width: int, dropout: float, longest: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.kinds = nn.Parameter(torch.empty(3, width))
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        for table in (self.words.weight, self.kinds):
            nn.init.normal_(table, std=0.02)
        # Learned, as in BERT, but from sinusoidal values: this data set is too small to learn which places are near.
        self.places = nn.Parameter(0.02 * waves(longest, width))

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        """Map `[B, T]` and `[B, T]` to `[B, T, width]`."""
        x = self.words(tokens) + self.places[: tokens.shape[1]] + self.kinds[kinds]
        out: Tensor = self.dropout(self.norm(x))
        return out


class Encoder(nn.Module):
    """The encoder of BERT (Devlin et al., NAACL 2019), with a third kind of pieces.

    Args:
        words: size of the vocabulary.
        width: width of the activations.
        layers: number of transformer layers.
        heads: attention heads in each layer.
        dropout: dropout probability.
        longest: number of positions.
    """

    def __init__(
        self,
        words: int = 8000,
        width: int = 256,
        layers: int = 6,
        heads: int = 4,
        dropout: float = 0.1,
        longest: int = 256,
    ) -> None:
        super().__init__()
        self.width = width
        self.embedding = Embedding(words, width, dropout, longest)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, activation="gelu", batch_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        """Map pieces `[B, T]` and their kinds `[B, T]` to contextual embeddings `[B, T, width]`."""
        x: Tensor = self.embedding(tokens, kinds)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=tokens == PAD)
        return x


class AnswerFinder(nn.Module):
    """Scores each piece of a paragraph as first and as last piece of the answer.

    Args:
        encoder: the encoder, with `width` as the width of its output.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.width, 2)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        """Map pieces `[B, T]` and kinds `[B, T]` to logits `[B, T, 2]`, minus infinity outside the paragraph."""
        logits: Tensor = self.head(self.encoder(tokens, kinds))
        return logits.masked_fill((kinds == QUESTION)[:, :, None], -torch.inf)


def best_spans(logits: Tensor, longest: int = LONGEST_ANSWER) -> tuple[Tensor, Tensor]:
    """Find the most likely answer of each window.

    Args:
        logits: logits of the first and the last piece, `[B, T, 2]`.
        longest: largest number of pieces of an answer.

    Returns:
        The sums of both logits `[B]`, and the places of the first and the last piece `[B, 2]`.

    >>> _, spans = best_spans(torch.tensor([[[5.0, 0.0], [4.0, 0.0], [0.0, 3.0], [0.0, 6.0]]]), longest=2)
    >>> spans
    tensor([[1, 2]])
    """
    length = logits.shape[1]
    possible = torch.ones(length, length, dtype=torch.bool, device=logits.device).triu().tril(longest - 1)
    sums = logits[:, :, None, 0] + logits[:, None, :, 1]
    best, place = sums.masked_fill(~possible, -torch.inf).flatten(1).max(1)
    return best, torch.stack([place // length, place % length], 1)


class QuestionAnswerer(ScheduledModule):
    """Train `net` with cross entropy of the answers' first and last pieces.

    Logs `train/loss`, `val/loss`, `val/f1` and `val/exact`. The last two are SQuAD's scores (Rajpurkar et al., EMNLP
    2016), from 0 to 1, of the most likely answer in all windows of a question. The texts of the questions come from the
    Trainer's data module.

    Args:
        net: maps tokens `[B, T]` and kinds `[B, T]` to logits `[B, T, 2]`.
        optimizer, scheduler, scheduler_interval, scheduler_length_name: as for `ScheduledModule`.
        weights: file of initial weights, as for `load_weights`.
    """

    def __init__(
        self,
        net: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        scheduler_interval: str = "step",
        scheduler_length_name: str | None = None,
        weights: str | None = None,
    ) -> None:
        super().__init__(optimizer, scheduler, scheduler_interval, scheduler_length_name)
        self.net = net
        if weights is not None:
            load_weights(net, weights)
        self.val_scores = SQuAD()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the answers' first and last pieces, a scalar."""
        tokens, kinds, spans, _, _ = batch
        loss = F.cross_entropy(self.net(tokens, kinds), spans)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss of windows with an answer, and collect the predicted answers."""
        tokens, kinds, spans, characters, numbers = batch
        logits = self.net(tokens, kinds)
        held = (spans != NOWHERE).all(1)
        if held.any():
            loss = F.cross_entropy(logits[held], spans[held])
            self.log("val/loss", loss, prog_bar=True, sync_dist=True, batch_size=int(held.sum()))
        scores, found = best_spans(logits.float())
        windows = torch.arange(len(found), device=found.device)
        starts, stops = characters[windows, found[:, 0], 0].tolist(), characters[windows, found[:, 1], 1].tolist()
        questions = self.trainer.datamodule.val_questions  # type: ignore[attr-defined]  # Lightning sets it
        answers: dict[int, str] = {}
        for window in scores.argsort().tolist():  # the best window of a question comes last and overwrites the others
            number = int(numbers[window])
            answers[number] = questions[number].paragraph[starts[window] : stops[window]]
        self.val_scores.update(
            [{"id": str(number), "prediction_text": answer} for number, answer in answers.items()],
            [_expected(number, questions[number].answers) for number in answers],
        )

    def on_validation_epoch_end(self) -> None:
        """Log the scores over the validation set."""
        scores = self.val_scores.compute()
        self.val_scores.reset()
        self.log("val/f1", scores["f1"] / 100, prog_bar=True, sync_dist=True)
        self.log("val/exact", scores["exact_match"] / 100, sync_dist=True)


def _expected(number: int, answers: tuple[str, ...]) -> dict[str, Any]:
    """Return the reference answers in the format of the metric."""
    return {"id": str(number), "answers": {"text": list(answers), "answer_start": [0] * len(answers)}}
