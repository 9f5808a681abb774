"""Networks for sequences, and LightningModules of several parts."""

import contextlib
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from support.caching import harness
from support.caching.parts import (
    CLASSES,
    SAMPLES,
    Chain,
    Classifier,
    Net,
    Samples,
    Stepping,
    block,
    grid,
    loader,
    vectors,
)


# Sequences.
class Encoder(nn.Module):
    def __init__(self, **options):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **{"dropout": 0.0} | options)
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        return self.head(self.encoder(self.embedding(ids)).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind, layers=1):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.first, self.second = kind(8, 8, layers, batch_first=True), kind(8, 8, layers, batch_first=True)
        self.third, self.head = nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, ids):
        states, _ = self.first(self.embedding(ids))
        states, _ = self.second(states)
        return self.head(self.third(states[:, -1]).tanh())


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, ids):
        lengths = (ids > 4).sum(1).clamp(min=1).cpu()
        states = pack_padded_sequence(self.embedding(ids), lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            states, _ = layer(states)
        return self.head(pad_packed_sequence(states, batch_first=True)[0].mean(1))


SEQUENCE_NETS = {
    "encoder": Encoder,
    "encoder, norm first": lambda: Encoder(norm_first=True),
    "encoder, gelu": lambda: Encoder(activation="gelu"),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU, layers=2),
    "embedding bag": lambda: nn.Sequential(
        nn.EmbeddingBag(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    ),
}


def _ids(length=5):
    ids = torch.randint(0, 20, (SAMPLES, length), generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(ids, vectors().tensors[1])


@pytest.mark.parametrize(("net", "dropout"), grid(SEQUENCE_NETS, [0.0, 0.2], every=7))
def test_network_for_sequences(compare, net, dropout):
    def program(run):
        module = Classifier(net())
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = dropout
        run.fit(module, loader(_ids()))

    compare(program)


def test_packed_sequences(compare):
    compare(lambda run: run.fit(Classifier(Packed()), loader(_ids())), served=None)


# Modules that hold more than one network, or train in other ways.
def test_network_in_float64(compare):
    dataset = Samples(lambda d, i: (d.x[i].double(), d.y[i]))
    compare(lambda run: run.fit(Classifier(Net().double()), loader(dataset)))


def test_layers_are_the_modules_own(compare):
    """No network inside: the LightningModule has the layers itself."""

    class Flat(Classifier):
        def __init__(self):
            super().__init__(nn.Identity())
            self.a, self.b, self.c, self.head = Chain().children()

        def loss_of(self, x, y):
            return F.cross_entropy(self.head(self.c(self.b(self.a(x)))), y)

    compare(lambda run: run.fit(Flat()))


def test_backbone_and_head(compare):
    """Two modules, called one after the other by the step, which reads the features."""

    class Parts(Classifier):
        def __init__(self):
            super().__init__(nn.Identity())
            self.backbone, self.top = (
                nn.Sequential(*list(Net().children())[:2]),
                nn.Sequential(*list(Net().children())[2:]),
            )

        def loss_of(self, x, y):
            features = self.backbone(x)
            self.log("norm", features.norm())
            return F.cross_entropy(self.top(features), y)

    compare(lambda run: run.fit(Parts()))


@pytest.mark.parametrize(
    "context", [torch.no_grad, contextlib.nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_front_in_a_context(compare, context):
    class Split(Net):
        def forward(self, x):
            with context():
                features = self.b(self.a(x))
            return self.head(self.c(features.float()))

    compare(
        lambda run: run.fit(Classifier(Split()), freezing={"layer_modules": ["net.a", "net.b", "net.c"]}),
        served=None,
        freezes=context is not torch.no_grad,
    )


def test_autoencoder_reads_its_input_as_target(compare):
    class Decodes(Net):
        def __init__(self):
            super().__init__(classes=8)

    compare(lambda run: run.fit(Stepping(lambda module, x, y: F.mse_loss(module.net(x), x), Decodes())))


def test_denoising_autoencoder(compare):
    def step(module, x, y):
        return F.mse_loss(module.net(x + 0.1 * torch.randn_like(x)), x)

    compare(lambda run: run.fit(Stepping(step, Net(classes=8))), served=None)


def test_loss_looks_at_a_frozen_weight(compare):
    def program(run):
        def step(module, x, y):
            loss = F.cross_entropy(module.net(x), y)
            return loss + module.net.a[0].weight.norm() * module.net.head.weight.norm() if run.batches else loss

        run.fit(Stepping(step))

    compare(program)


COMPILED = {
    "network in place": lambda module, backend: module.net.compile(backend=backend),
    "network": lambda module, backend: setattr(module, "net", torch.compile(module.net, backend=backend)),
    "step": lambda module, backend: torch.compile(module, backend=backend),
    "training step": lambda module, backend: setattr(
        module, "training_step", torch.compile(module.training_step, backend=backend)
    ),
    "loss": lambda module, backend: setattr(module, "loss_of", torch.compile(module.loss_of, backend=backend)),
    "frozen layer": lambda module, backend: module.net.a.compile(backend=backend),
    "frozen layer, wrapped": lambda module, backend: setattr(
        module.net, "a", torch.compile(module.net.a, backend=backend)
    ),
    "layer that trains": lambda module, backend: module.net.c.compile(backend=backend),
}


FUNCTIONS = [COMPILED["loss"], COMPILED["training step"]]  # nobody can tell that they are compiled


class Backend:
    """Compiles to the code as it is, so bits stay the same, and counts."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


# Of the compiler, where it compiles a module of which a part is compiled already.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("way", grid(COMPILED, every=8))
def test_compiled(compare, way, caplog):
    """Cached steps run uncompiled, the others compiled as without the cache."""
    caplog.set_level("INFO")
    counts = []

    def program(run):
        torch.compiler.reset()
        module, backend = Classifier(), Backend()
        compiled = way(module, backend)
        run.fit(module if compiled is None else compiled, val=loader(shuffle=False), max_epochs=6)
        counts.append(backend.count)

    compare(program)
    assert 0 < counts[1] <= counts[0]
    assert caplog.text.count("cached steps run uncompiled") == (way not in FUNCTIONS)


@pytest.mark.slow
def test_compiled_by_inductor(compare, tmp_path, monkeypatch):
    """Whose code has other last bits: only the way of training is the same."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # else its threads stay, as do compiled headers
    monkeypatch.setattr(torch._inductor.config, "cpp_cache_precompile_headers", False, raising=False)
    weights = []

    def program(run):
        torch.compiler.reset()
        module = Classifier(Chain())
        module.net.compile()
        run.fit(module)
        weights.append([weight.detach() for weight in module.parameters()])

    plain = harness.ran(program, False, tmp_path / "plain")
    cached = harness.ran(program, True, tmp_path / "cached")
    assert (plain.error, cached.error) == (None, None)
    assert cached.caches[0].stats.hits > 0
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other)


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(0), lambda one: torch.rand((), generator=one)),
    "numpy": (lambda: np.random.default_rng(0), lambda one: float(one.random())),
    "python": (lambda: random.Random(0), lambda one: one.random()),
}


@pytest.mark.parametrize(("new", "draw"), GENERATORS.values(), ids=GENERATORS)
def test_layer_draws_from_a_generator_of_its_own(compare, new, draw):
    """Nothing is cached, and trials have drawn nothing."""

    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.generator = new()

        def forward(self, x):
            return x + draw(self.generator)

    compare(lambda run: run.fit(Classifier(Chain(b=block(nn.Linear(8, 8), Noisy())))), served=None)


@pytest.mark.parametrize("place", ["buffer", "attribute"])
def test_sparse_tensor_in_a_layer(compare, place):
    class Sparse(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            if place == "buffer":
                self.register_buffer("mask", torch.eye(8).to_sparse(), persistent=False)
            else:
                self.mask = torch.eye(8).to_sparse()

        def forward(self, x):
            return super().forward(torch.sparse.mm(self.mask, x.T).T)

    compare(lambda run: run.fit(Classifier(Chain(b=Sparse()))), served=place == "attribute")
