"""Masked language modelling, to pre-train the encoder of question answering."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_egeria.demos.classifier import HEADS
from lightning_egeria.demos.question_answering import Encoder
from lightning_egeria.demos.schedules import ScheduledModule
from lightning_egeria.demos.squad import MASK, Batch


class WordGuesser(nn.Module):
    """Predicts masked word pieces.

    Args:
        encoder: the encoder; the head shares its embedding.
    """

    def __init__(self, encoder: Encoder) -> None:
        super().__init__()
        self.encoder = encoder
        width, table = encoder.width, encoder.embedding.words.weight
        last = nn.Linear(width, len(table))
        last.weight = table
        self.head = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), last)

    def forward(self, tokens: Tensor, kinds: Tensor, asked: Tensor) -> Tensor:
        """Map tokens `[B, T]` and kinds `[B, T]` to logits `[N, words]` of the `N` places in `asked [B, T]`."""
        logits: Tensor = self.head(self.encoder(tokens, kinds)[asked])
        return logits


def masked(tokens: Tensor, words: int) -> tuple[Tensor, Tensor]:
    """Mask some pieces as in BERT's pre-training (Devlin et al., NAACL 2019, section 3.1).

    Args:
        tokens: `[B, T]`.
        words: number of word pieces.

    Returns:
        The masked tokens `[B, T]`, and the places to predict, bool `[B, T]`: 15 % of the pieces that are not special.
        Of these, 80 % become `[MASK]`, 10 % a random piece, and 10 % stay.
    """
    asked = (torch.rand(tokens.shape, device=tokens.device) < 0.15) & (tokens > MASK)
    chance = torch.rand(tokens.shape, device=tokens.device)
    other = torch.randint_like(tokens, MASK + 1, words)
    gaps = torch.where(chance < 0.8, MASK, torch.where(chance < 0.9, other, tokens))
    return torch.where(asked, gaps, tokens), asked


class MaskedLanguageModel(ScheduledModule):
    """Train a `WordGuesser` with cross entropy of the masked pieces; logs `train/loss` and `val/loss`.

    The inputs are the questions and paragraphs of question answering.

    Args:
        net: the network.
        optimizer, scheduler, scheduler_interval, scheduler_length_name: as for `ScheduledModule`.
    """

    def __init__(
        self,
        net: WordGuesser,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        scheduler_interval: str = "step",
        scheduler_length_name: str | None = None,
    ) -> None:
        super().__init__(optimizer, scheduler, scheduler_interval, scheduler_length_name)
        self.net = net

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the mean cross entropy of the masked pieces, a scalar."""
        loss = self._loss(batch)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss over the validation set, with new random masks each time."""
        self.log("val/loss", self._loss(batch), prog_bar=True, sync_dist=True)

    def save_encoder(self, path: Path) -> None:
        """Write all weights but the head to a safetensors file, for `QuestionAnswerer(weights=...)`."""
        state = self.net.state_dict()
        save_file({name: value.contiguous() for name, value in state.items() if not name.startswith(HEADS)}, path)

    def _loss(self, batch: Batch) -> Tensor:
        tokens, kinds = batch[:2]
        gaps, asked = masked(tokens, self.net.encoder.embedding.words.num_embeddings)
        return F.cross_entropy(self.net(gaps, kinds, asked), tokens[asked])
