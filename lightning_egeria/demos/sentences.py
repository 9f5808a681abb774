"""Classification of sentences with a pre-trained BERT-style encoder."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.errors import ArgumentError, first_of

PAD = 0
# Names of a layer's parts in torch, and in the files of Hugging Face's BertModel.
PARTS = {
    "self_attn.out_proj": "attention.output.dense",
    "norm1": "attention.output.LayerNorm",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "norm2": "output.LayerNorm",
}
TABLES = {"words": "word_embeddings", "places": "position_embeddings", "kinds": "token_type_embeddings"}


class BertEncoder(nn.Module):
    """The encoder of BERT (Devlin et al., NAACL 2019); the defaults are those of MiniLM-L6 (arXiv:2002.10957).

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
        words: int = 30522,
        width: int = 384,
        layers: int = 6,
        heads: int = 12,
        dropout: float = 0.1,
        longest: int = 512,
    ) -> None:
        super().__init__()
        self.width = width
        self.words = nn.Embedding(words, width, padding_idx=PAD)
        self.places, self.kinds = nn.Embedding(longest, width), nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, eps=1e-12), nn.Dropout(dropout)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", 1e-12, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[B, T]`, padded with 0, to contextual embeddings `[B, T, width]`."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: Tensor = self.dropout(self.norm(self.words(tokens) + self.places(places) + self.kinds.weight[0]))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=tokens == PAD)
        return x


class SentenceNet(nn.Module):
    """Mean of the embeddings of a sentence's tokens, and a linear layer on it.

    Args:
        encoder: the encoder, with `width` as the width of its output.
        num_classes: number of classes.
    """

    def __init__(self, encoder: BertEncoder, num_classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.width, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens `[B, T]`, padded with 0, to logits `[B, num_classes]`."""
        real = (tokens != PAD).unsqueeze(-1)
        logits: Tensor = self.head((self.encoder(tokens) * real).sum(1) / real.sum(1))
        return logits


class SentenceClassifier(ImageClassifier):
    """Train a `SentenceNet` with cross entropy on batches `(tokens [B, T], labels [B])`.

    Logs `train/loss`, `val/loss` and `val/acc`.

    Args:
        net: maps tokens `[B, T]` to logits `[B, num_classes]`.
        num_classes: number of classes.
        optimizer, scheduler, scheduler_interval, scheduler_length_name: as for `ScheduledModule`.
        weights: file of the encoder's initial weights, as for `load_bert`.
    """

    def __init__(
        self,
        net: SentenceNet,
        num_classes: int,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[..., LRScheduler] | None = None,
        scheduler_interval: Literal["step", "epoch"] = "step",
        scheduler_length_name: str | None = None,
        weights: str | None = None,
    ) -> None:
        super().__init__(net, num_classes, optimizer, scheduler, scheduler_interval, scheduler_length_name)
        if weights is not None:
            load_bert(net.encoder, weights)


def load_bert(encoder: BertEncoder, path: str) -> None:
    """Load an encoder from a safetensors file with the names of Hugging Face's `BertModel`.

    A matrix may be int8 with the scale of each row in `NAME.scale`.

    Args:
        encoder: the encoder.
        path: the file.

    Raises:
        ArgumentError: if the file does not exist, or holds another network.
    """
    if not Path(path).is_file():
        raise ArgumentError(f"model.weights={path}: no such file")
    raw = load_file(path)
    theirs = {
        name: value.float() * raw[f"{name}.scale"].float() if value.dtype == torch.int8 else value
        for name, value in raw.items()
        if not name.endswith(".scale")
    }
    try:
        state = _renamed(theirs, len(encoder.layers))
    except KeyError as error:
        raise ArgumentError(f"model.weights={path} holds another network: it has no {error.args[0]!r}") from error
    own = encoder.state_dict()
    if wrong := [name for name in sorted(own) if own[name].shape != state[name].shape]:
        raise ArgumentError(f"model.weights={path} holds another network; tensors that differ: {first_of(wrong)}")
    encoder.load_state_dict(state)


def _renamed(theirs: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Return the tensors of a `BertModel` under the names of a `BertEncoder`."""
    found = {f"{ours}.weight": theirs[f"embeddings.{name}.weight"] for ours, name in TABLES.items()}
    for kind in ("weight", "bias"):
        found[f"norm.{kind}"] = theirs[f"embeddings.LayerNorm.{kind}"]
        for number in range(layers):
            ours, layer = f"layers.{number}", f"encoder.layer.{number}"
            three = [theirs[f"{layer}.attention.self.{name}.{kind}"] for name in ("query", "key", "value")]
            found[f"{ours}.self_attn.in_proj_{kind}"] = torch.cat(three)
            for part, name in PARTS.items():
                found[f"{ours}.{part}.{kind}"] = theirs[f"{layer}.{name}.{kind}"]
    return found
