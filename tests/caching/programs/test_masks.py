"""Transformers of several styles, whose blocks get padding masks: cached at the boundary that was asked for."""

import pytest
import torch
import torch.nn.functional as F
from programs.parts import CLASSES, SAMPLES, Classifier, grid, loader
from torch import nn
from torch.nn.utils.rnn import pad_sequence

WIDTH, HEADS, LENGTH = 16, 2, 16
DEPTH = 3  # the embedding and two blocks


class Block(nn.Module):
    """Attention and a perceptron, each behind a normalisation, as in timm and Hugging Face's models."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def attended(self, x, mask):
        query, key, value = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).flatten(2))

    def forward(self, x, attn_mask=None):
        x = x + self.attended(self.norm1(x), attn_mask)
        return x + self.mlp(self.norm2(x))


class TupleBlock(Block):
    """Takes the mask by position and returns a tuple, as Hugging Face's layers did for years."""

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        return (super().forward(hidden_states, attention_mask),)


class Net(nn.Module):
    """A classifier of sequences of tokens padded with 0.

    Args:
        style: how the blocks are called and masked.
    """

    def __init__(self, style):
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, WIDTH, padding_idx=0), nn.Linear(WIDTH, CLASSES)
        self.style = style
        if style == "encoder":
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
            return
        kind = {"layers": None, "additive in a tuple": TupleBlock}.get(style, Block)
        self.blocks = nn.ModuleList(
            kind() if kind is not None else nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
            for _ in range(3)
        )

    def forward(self, tokens):
        real = tokens != 0
        x = self.embedding(tokens)
        if self.style == "encoder":
            x = self.encoder(x, src_key_padding_mask=~real)
        elif self.style == "layers":
            for block in self.blocks:
                x = block(x, src_key_padding_mask=~real)
        elif self.style == "boolean":
            for block in self.blocks:
                x = block(x, attn_mask=real[:, None, None, :])
        else:
            mask = (1.0 - real[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
            for block in self.blocks:
                x = block(x, mask)[0] if self.style == "additive in a tuple" else block(x, attn_mask=mask)
        return self.head((x * real[..., None]).sum(1) / real.sum(1, keepdim=True))


def tokens_of(index):
    length = 3 + index % 11
    return (torch.arange(length) * (index + 1)) % 19 + 1, index % CLASSES


def to_one_length(samples):
    tokens = [F.pad(one, (0, LENGTH - len(one))) for one, _ in samples]
    return torch.stack(tokens), torch.tensor([label for _, label in samples])


def padded_together(samples):
    tokens = pad_sequence([one for one, _ in samples], batch_first=True)
    return F.pad(tokens, (0, LENGTH - tokens.shape[1])), torch.tensor([label for _, label in samples])


def as_lists(samples):
    """The collate function pads plain numbers, so that no tensor of a sample reaches the network."""
    rows = [one.tolist() + [0] * (LENGTH - len(one)) for one, _ in samples]
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


@pytest.mark.parametrize(
    ("style", "collate"),
    grid(["encoder", "layers", "boolean", "additive", "additive in a tuple"], [padded_together, as_lists]),
)
def test_the_boundary_that_was_asked_for_is_cached(compare, style, collate):
    def program(run):
        data = loader([tokens_of(index) for index in range(SAMPLES)], collate_fn=collate)
        run.fit(Classifier(Net(style)), data, schedule={2: DEPTH}, max_epochs=4)
        run.depth = run.caches[0].stats.depth if run.caches else None

    cached = compare(program, dropout=True)  # attention has another kernel in evaluation mode
    (stats,) = [one.stats for one in cached.caches]
    assert cached.depths == [[DEPTH]]
    assert stats.off is None
    assert stats.wrong == 0
    assert stats.hits >= SAMPLES
    assert cached.depth == DEPTH


def test_samples_padded_one_by_one_are_not_cached(compare):
    """How far a sample is padded is written into its computation; it must not stop the training."""

    def program(run):
        data = loader([tokens_of(index) for index in range(SAMPLES)], collate_fn=to_one_length)
        run.fit(Classifier(Net("layers")), data, schedule={2: DEPTH}, max_epochs=4)

    cached = compare(program, served=False, dropout=True)
    assert any("are they padded one by one?" in text for text in cached.messages)
