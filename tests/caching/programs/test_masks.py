"""Transformers of several styles, whose blocks get padding masks: cached at the boundary that was asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from support.caching.parts import CLASSES, SAMPLES, Classifier, Validated, grid, loader

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


class PlacedBlock(Block):
    """Its last bits depend on the place in the batch, as those of kernels on a GPU may."""

    def forward(self, x, attn_mask=None):
        return super().forward(x, attn_mask) * (1 + 1e-7 * torch.arange(len(x), device=x.device)[:, None, None])


class TupleBlock(Block):
    """Takes the mask by position and returns a tuple, as Hugging Face's layers did for years."""

    def forward(self, hidden_states, attention_mask=None, output_attentions=False):
        return (super().forward(hidden_states, attention_mask),)


class LongLayer(nn.TransformerEncoderLayer):
    """Its last bits depend on the length."""

    def forward(self, x, **masks):
        return super().forward(x, **masks) * (1 + 1e-6 * x.shape[1])


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
        kind = {"layers": None, "additive in a tuple": TupleBlock, "by place": PlacedBlock}.get(style, Block)
        self.blocks = nn.ModuleList(
            kind() if kind is not None else nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, 0.0, batch_first=True)
            for _ in range(3)
        )

    def seen(self, real):
        """Which positions each position may look at."""
        keys = real[:, None, None, :]
        if self.style == "causal":
            return keys & torch.ones(2 * keys.shape[-1:], dtype=torch.bool, device=keys.device).tril()
        return keys.expand(-1, -1, keys.shape[-1], -1).clone() if self.style == "square" else keys

    def forward(self, tokens):
        real = tokens != 0
        x = self.embedding(tokens)
        if self.style == "encoder":
            x = self.encoder(x, src_key_padding_mask=~real)
        elif self.style == "layers":
            for block in self.blocks:
                x = block(x, src_key_padding_mask=~real)
        elif self.style in ("boolean", "by place"):
            for block in self.blocks:
                x = block(x, attn_mask=real[:, None, None, :])
        else:
            mask = (1.0 - self.seen(real).to(x.dtype)) * torch.finfo(x.dtype).min
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

    cached = compare(program)
    (stats,) = [one.stats for one in cached.caches]
    assert cached.depths == [[DEPTH]]
    assert stats.off is None
    assert stats.wrong == 0
    assert stats.hits >= SAMPLES


def padded_to_the_longest(samples):
    tokens = pad_sequence([one for one, _ in samples], batch_first=True)
    return tokens, torch.tensor([label for _, label in samples])


def lists_to_the_longest(samples):
    longest = max(len(one) for one, _ in samples)
    rows = [one.tolist() + [0] * (longest - len(one)) for one, _ in samples]
    return torch.tensor(rows), torch.tensor([label for _, label in samples])


def whole(module):
    """Give a module weights of -1, 0 and 1."""
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -1.5, 1.5).data.round_()
    return module


class Mixing(nn.Module):
    """Mixes positions, with whole numbers: no kernel can round otherwise at another length."""

    def __init__(self):
        super().__init__()
        self.linear = whole(nn.Linear(WIDTH, WIDTH))

    fill = -1000

    def forward(self, x, padding):
        return torch.relu(self.linear(x)) + x.masked_fill(padding[..., None], self.fill).amax(1, keepdim=True)


class Embedding(nn.Module):
    """Embeddings of tokens and of their positions."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places = whole(nn.Embedding(20, WIDTH)), whole(nn.Embedding(32, WIDTH))

    def forward(self, tokens, places=None):
        places = torch.arange(tokens.shape[1], device=tokens.device) if places is None else places
        return self.tokens(tokens) + self.places(places)


class Positions(nn.Module):
    """Layers behind an embedding; the program cuts the positions to the batch.

    Args:
        style: whether that happens ``"inside"`` of the embedding, or ``"outside"``.
    """

    def __init__(self, style):
        super().__init__()
        self.embedding, self.head, self.style = Embedding(), nn.Linear(WIDTH, CLASSES), style
        self.layers = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens, *([places] if self.style == "outside" else []))
        for layer in self.layers:
            x = layer(x, tokens == 0)
        real = (tokens != 0)[..., None]
        return self.head((x * real).sum(1) / real.sum(1))


class Leaking(Mixing):
    """Looks at the padding as well."""

    def forward(self, x, padding):
        return super().forward(x, torch.zeros_like(padding)) + x.shape[1] * (x.shape[1] > 9)


class Noticing(Mixing):
    """Notices whether there is any padding."""

    fill = 0


@pytest.mark.parametrize("kind", [Leaking, Noticing])
@pytest.mark.parametrize("collate", [padded_to_the_longest, lists_to_the_longest])
def test_layers_that_look_at_the_padding_get_their_own(compare, collate, kind):
    def program(run):
        net = Positions("inside")
        net.layers[0] = kind()
        data = loader([tokens_of(index) for index in range(SAMPLES)], collate_fn=collate)
        run.fit(Classifier(net), data, schedule={2: DEPTH}, max_epochs=8)

    compare(program, served=None)


class Pooling(Mixing):
    """Leaves one position."""

    def forward(self, x, padding):
        return super().forward(x, padding).amax(1, keepdim=True)


@pytest.mark.parametrize("pooled", [False, True])
def test_positions_are_no_samples_where_there_are_as_many(compare, pooled):
    """Batches are as long as they are large now and then."""

    def program(run):
        net = Positions("outside")
        if pooled:
            net.layers[1] = Pooling()
            net.layers[2] = nn.Linear(WIDTH, WIDTH)

            def forward(tokens):
                x = net.embedding(tokens, torch.arange(tokens.shape[1], device=tokens.device))
                return net.head(net.layers[2](net.layers[1](net.layers[0](x, tokens == 0), tokens == 0)).squeeze(1))

            net.forward = forward
        samples = [tokens_of(index) for index in range(SAMPLES)]
        samples = [(one[: 8 if index % 6 == 0 else 6], label) for index, (one, label) in enumerate(samples)]
        run.fit(Classifier(net), loader(samples, collate_fn=padded_to_the_longest), schedule={2: 3}, max_epochs=8)

    compare(program, served=None)


def test_samples_padded_one_by_one_are_not_cached(compare):
    """How far a sample is padded is written into its computation; it must not stop the training."""

    def program(run):
        data = loader([tokens_of(index) for index in range(SAMPLES)], collate_fn=to_one_length)
        run.fit(Classifier(Net("layers")), data, schedule={2: DEPTH}, max_epochs=4)

    cached = compare(program, served=False)
    assert any("are they padded one by one?" in text for text in cached.messages)


def test_nested_tensors_of_evaluation_are_left_to_torch(compare):
    """An encoder of torch leaves zeros at padded positions in validation, which a mean over all positions shows."""

    class Means(Net):
        def forward(self, tokens):
            return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=tokens == 0).mean(1))

    def program(run):
        net = Means("encoder")
        net.encoder.use_nested_tensor = True
        data = [loader(list(map(tokens_of, range(SAMPLES))), collate_fn=padded_together) for _ in range(2)]
        run.fit(Validated(net), data[0], val=data[1], schedule={2: DEPTH}, max_epochs=8)

    compare(program)
