"""A classifier of sentences, and the weights that it begins with."""

from functools import partial

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

from lightning_egeria.demos.intents import padded
from lightning_egeria.demos.sentences import BertEncoder, SentenceClassifier, SentenceNet, load_bert
from lightning_egeria.errors import ArgumentError
from support.models import trainer_of

WIDTH = 8


def encoder(layers=2, **arguments):
    return BertEncoder(words=20, width=WIDTH, layers=layers, heads=2, longest=16, **arguments).eval()


def of_hugging_face(layers=2):
    """Random tensors with the names of a `BertModel`, float32."""
    torch.manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (20, WIDTH),
        "embeddings.position_embeddings.weight": (16, WIDTH),
        "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
    }
    for number in range(layers):
        for name, out, into in (
            *((f"attention.self.{part}", WIDTH, WIDTH) for part in ("query", "key", "value")),
            ("attention.output.dense", WIDTH, WIDTH),
            ("intermediate.dense", 4 * WIDTH, WIDTH),
            ("output.dense", WIDTH, 4 * WIDTH),
        ):
            shapes[f"encoder.layer.{number}.{name}.weight"] = (out, into)
            shapes[f"encoder.layer.{number}.{name}.bias"] = (out,)
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes[f"encoder.layer.{number}.{name}.weight"] = (WIDTH,)
            shapes[f"encoder.layer.{number}.{name}.bias"] = (WIDTH,)
    return {name: torch.randn(shape) / 4 for name, shape in shapes.items()}


def by_hand(theirs, tokens):
    """BERT's forward for one sentence without padding, from its definition."""

    def linear(name, x):
        return x @ theirs[f"{name}.weight"].T + theirs[f"{name}.bias"]

    def norm(name, x):
        return torch.layer_norm(x, (WIDTH,), theirs[f"{name}.weight"], theirs[f"{name}.bias"], 1e-12)

    embedded = theirs["embeddings.word_embeddings.weight"][tokens]
    places = theirs["embeddings.position_embeddings.weight"][: len(tokens)]
    x = norm("embeddings.LayerNorm", embedded + places + theirs["embeddings.token_type_embeddings.weight"][0])
    for number in range(2):
        layer = f"encoder.layer.{number}"
        query, key, value = (linear(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value"))
        heads = [
            ((query[:, at] @ key[:, at].T) / (WIDTH / 2) ** 0.5).softmax(1) @ value[:, at]
            for at in (slice(0, WIDTH // 2), slice(WIDTH // 2, WIDTH))
        ]
        attended = linear(f"{layer}.attention.output.dense", torch.cat(heads, 1))
        x = norm(f"{layer}.attention.output.LayerNorm", x + attended)
        inner = torch.nn.functional.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
    return x


def test_the_weights_of_bert_give_its_output(tmp_path):
    theirs, net = of_hugging_face(), encoder()
    save_file(theirs, tmp_path / "bert.safetensors")
    load_bert(net, str(tmp_path / "bert.safetensors"))
    with torch.no_grad():
        found = net(torch.tensor([[3, 5, 7, 0, 0], [2, 4, 6, 8, 9]]))
    assert torch.allclose(found[0, :3], by_hand(theirs, [3, 5, 7]), atol=1e-5)
    assert torch.allclose(found[1], by_hand(theirs, [2, 4, 6, 8, 9]), atol=1e-5)


def test_matrices_may_be_int8_with_scales(tmp_path):
    theirs, rounded, net = of_hugging_face(), {}, encoder()
    for name, value in theirs.items():
        if value.ndim == 2 and "position" not in name:
            scale = value.abs().amax(1, keepdim=True) / 127
            rounded[name] = (value / scale).round().to(torch.int8)
            rounded[f"{name}.scale"] = scale.half()
        else:
            rounded[name] = value.half()
    save_file(rounded, tmp_path / "bert.safetensors")
    load_bert(net, str(tmp_path / "bert.safetensors"))
    expected = theirs["encoder.layer.1.output.dense.weight"]
    assert torch.allclose(net.layers[1].linear2.weight, expected, atol=0.02)
    assert not torch.equal(net.layers[1].linear2.weight, expected)


def test_another_network_is_named(tmp_path):
    path = str(tmp_path / "bert.safetensors")
    with pytest.raises(ArgumentError, match=r"bert.safetensors: no such file"):
        load_bert(encoder(), path)
    save_file(of_hugging_face(layers=1), path)
    with pytest.raises(ArgumentError, match=r"another network: it has no 'encoder.layer.1"):
        load_bert(encoder(), path)
    save_file(of_hugging_face(), path)
    wider = BertEncoder(words=20, width=WIDTH, layers=2, heads=2, longest=32)
    with pytest.raises(ArgumentError, match=r"tensors that differ: 'places.weight'"):
        load_bert(wider, path)


def test_it_learns(tmp_path):
    torch.manual_seed(0)
    samples = [
        (torch.randint(2 + 4 * kind, 4 + 4 * kind, (3 + at % 4,)), 2 * kind) for at in range(16) for kind in (0, 1)
    ]
    path = tmp_path / "bert.safetensors"
    save_file(of_hugging_face(), path)
    net = SentenceNet(encoder(dropout=0.0), 3).train()
    model = SentenceClassifier(net, 3, partial(torch.optim.AdamW, lr=0.02), weights=str(path))
    loader = DataLoader(samples, batch_size=8, collate_fn=padded)
    trainer = trainer_of(epochs=3, default_root_dir=tmp_path)
    trainer.fit(model, loader, loader)
    assert trainer.callback_metrics["val/acc"] == 1
