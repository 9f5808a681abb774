"""Random training programs train with the cache as without it.

An example is a network, the parts of it that are frozen from the start, a data set, a loader, a schedule of further
freezes, a way to call the network, and acts: what the program does beside training, at which moment of which batches.
"""

import copy
import dataclasses
import io
import pickle
import tempfile
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate

from support.caching import harness
from support.caching.parts import SAMPLES, Classifier, ConvNet, Net, Samples, images, loader, on, vectors


class Skip(Net):
    """Reads what the first layer returned, behind the boundary."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(8, 3)

    def forward(self, x):
        a = self.a(x)
        return self.head(self.c(self.b(a))) + self.side(a)


class Checkpointed(Net):
    def forward(self, x):
        return self.head(checkpoint(nn.Sequential(self.a, self.b, self.c), x, use_reentrant=False))


class Towers(Net):
    """Two towers, of which each has its own map into the head."""

    def __init__(self):
        super().__init__()
        self.other, self.side = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(16, 3)

    def forward(self, x):
        a, other = self.a(x), self.other(x)
        return self.head(self.c(self.b(a))) + self.side(torch.cat([other, a * other], 1))


class Adapted(Net):
    """Adapters beside the second and the third layer."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x):
        a = self.a(x)
        b = self.b(a) + self.high(self.low(a))
        return self.head(self.c(b) + 0.5 * self.high(self.low(b)))


class Attending(Net):
    """What a trained layer makes of the input asks a frozen memory."""

    def __init__(self):
        super().__init__()
        self.side = nn.Linear(8, 8)

    def forward(self, x):
        keys, values = self.a(x), self.b(self.a(x.flip(-1)))
        weights = (self.side(x).unsqueeze(2) * keys.unsqueeze(1)).softmax(-1)
        return self.head(self.c((weights @ values.unsqueeze(2)).squeeze(2)))


NETS = {
    "mlp": Net,
    "convolutions": ConvNet,
    "skip": Skip,
    "checkpointed": Checkpointed,
    "towers": Towers,
    "adapted": Adapted,
    "attending": Attending,
}
PARTS = ["a", "a.0", "b", "b.0", "c", "other", "side", "low"]  # that may be frozen from the start, where a net has them

# How the step comes by its logits.
FORWARDS = {
    "plain": lambda module, x: module.net(x),
    "normalised": lambda module, x: module.net((x - 0.1) / 0.7),
    "scaled in place": lambda module, x: module.net(x.mul_(0.5)),
    "cast": lambda module, x: module.net(x.double().float()),
    "cloned": lambda module, x: module.net(x.clone()),
    "mixed": lambda module, x: module.net(torch.lerp(x, x.flip(0), torch.rand(()))),
    "noisy": lambda module, x: module.net(x + 0.1 * torch.randn_like(x)),
    "checkpointed": lambda module, x: checkpoint(module.net, x, use_reentrant=False),
    "cut": lambda module, x: module.net(x.contiguous()[:]),
    "in parts": lambda module, x: torch.cat([module.net(part) for part in x.chunk(2)]),
    "all but a row": lambda module, x: F.pad(module.net(x[1:]), (0, 0, 1, 0)),
    "twice": lambda module, x: (module.net(x) + module.net(x)) / 2,
    "both directions": lambda module, x: module.net(x) + module.net(x.flip(-1)),
}


def _saved(x):
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


READS = {
    "mean": lambda x: x.mean(),
    "numpy": lambda x: x.numpy().copy(),
    "item": lambda x: x.flatten()[3].item(),
    "repr": repr,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "saved": _saved,
    "rows": lambda x: [row.sum() for row in x],
    "compared": lambda x: (torch.equal(x, x + 0), (x > 0).sum()),
    "random": lambda x: torch.rand_like(x),
    "metadata": lambda x: (x.shape, x.dtype, x.stride(), x.requires_grad, x.is_leaf),
    "data": lambda x: x.data[1:].clone(),
    "view": lambda x: x.view(len(x), -1).std(1),
}


@dataclasses.dataclass
class Moment:
    """What an act may look at."""

    run: harness.Run
    module: Classifier
    trainer: object
    dataset: object
    memory: list
    x: torch.Tensor
    y: torch.Tensor


def _weights(change):
    def act(moment):
        with torch.no_grad():
            change(moment.module.net.a[0].weight)

    return act


def _forward(call, grad=False):
    def act(moment):
        with torch.set_grad_enabled(grad):
            moment.run.note(call(moment.module, moment.x))

    return act


def _evaluated(module, x):
    modes = {part: part.training for part in module.net.modules()}
    out = module.net.eval()(x)
    for part, mode in modes.items():
        part.training = mode
    return out


def _hook(part, now):
    def act(moment):
        module = part(moment.module.net)
        if now:
            module.register_forward_hook(lambda part, args, out: moment.run.note((args[0].mean(), out.std())))
        else:
            module.register_forward_hook(lambda part, args, out: moment.memory.append((args[0], out)))

    return act


def _relabel(moment):
    moment.dataset.y.copy_((moment.dataset.y + 1) % 3)


def _set_labels(moment):
    moment.dataset.y = moment.dataset.y.roll(1)


# Anywhere in a batch.
ACTS = {
    **{f"read {name}": (lambda moment, read=read: moment.run.note(read(moment.x))) for name, read in READS.items()},
    "keep the batch": lambda moment: moment.memory.append((moment.x, moment.y)),
    "look at what was kept": lambda moment: moment.run.note(moment.memory[-3:]),
    "forward": _forward(lambda module, x: module.net(x)),
    "forward with gradient": _forward(lambda module, x: module.net(x), grad=True),
    "forward of another input": _forward(lambda module, x: module.net(x.flip(0) * 2)),
    "forward of some rows": _forward(lambda module, x: module.net(x[:2])),
    "forward of the front": _forward(lambda module, x: module.net.b(module.net.a(x))),
    "forward of one layer": _forward(lambda module, x: module.net.a(x)),
    "forward of a copy": _forward(lambda module, x: copy.deepcopy(module.net)(x)),
    "forward in evaluation mode": _forward(_evaluated),
    "forward of noise": _forward(lambda module, x: module.net(torch.randn_like(x))),
    "functional call": _forward(
        lambda module, x: torch.func.functional_call(module.net, {"a.0.bias": module.net.a[0].bias + 1}, (x,))
    ),
    "hook in front": _hook(lambda net: net.a, now=True),
    "hook at the boundary": _hook(lambda net: net.b, now=True),
    "hook behind": _hook(lambda net: net.c, now=True),
    "hook that keeps": _hook(lambda net: net.a[0], now=False),
    "weights": _weights(lambda weight: weight.mul_(1.1)),
    "one weight": _weights(lambda weight: weight.view(-1)[5:6].add_(0.1)),
    "weights by data": lambda moment: moment.module.net.a[0].weight.data.mul_(0.9),
    "running statistics": lambda moment: moment.module.net.b[1].running_mean.add_(0.1),
    "setting": lambda moment: setattr(moment.module.net.a[1], "eps", 0.01),
    "draw": lambda moment: moment.run.note(torch.rand(2)),
    "draw by numpy": lambda moment: moment.run.note(np.random.rand()),
    "one sample": lambda moment: moment.run.note(moment.trainer.train_dataloader.dataset[2]),
    "first batch of the loader": lambda moment: moment.run.note(next(iter(moment.trainer.train_dataloader))),
    "loader's length": lambda moment: moment.run.note(len(moment.trainer.train_dataloader)),
    "train mode": lambda moment: moment.module.train() and None,
}
# In front of the forward.
BEFORE = ACTS | {
    "input in place": lambda moment: moment.x.mul_(1.5),
    "one row in place": lambda moment: moment.x[0].zero_(),
    "input by numpy": lambda moment: np.negative(moment.x.numpy(), out=moment.x.numpy()),
    "labels in place": lambda moment: moment.y.fill_(1),
}
# At the end of an epoch.
EPOCHLY = {
    "labels of the data": _relabel,
    "labels replaced": _set_labels,
    "inputs of the data": lambda moment: moment.dataset.x.mul_(1.1),
    "setting of the data": lambda moment: setattr(moment.dataset, "shift", moment.dataset.shift + 1),
    "weights": ACTS["weights"],
    "whole loader": lambda moment: moment.run.note([x.mean() for x, _ in moment.trainer.train_dataloader]),
    "hook in front": ACTS["hook in front"],
    "what was kept": ACTS["look at what was kept"],
}
PLACES = {"batch start": BEFORE, "before": BEFORE, "after": ACTS, "batch end": BEFORE, "epoch end": EPOCHLY}

SAMPLE_KINDS = {
    "fixed": lambda dataset, index: (dataset.x[index] + dataset.shift, dataset.y[index]),
    "numpy": lambda dataset, index: (dataset.x[index].numpy() + dataset.shift, int(dataset.y[index])),
    "random": lambda dataset, index: (dataset.x[index] + torch.rand(()), dataset.y[index]),
    "rarely random": lambda dataset, index: (
        dataset.x[index] + (torch.rand(()) if index % 20 == 3 else dataset.shift),
        dataset.y[index],
    ),
}


def _padded(samples):
    return nn.utils.rnn.pad_sequence([torch.as_tensor(x) for x, _ in samples], batch_first=True), torch.tensor(
        [int(y) for _, y in samples]
    )


COLLATES = {
    "default": default_collate,
    "padded": _padded,
    "sorted": lambda samples: default_collate(sorted(samples, key=lambda sample: int(sample[1]))),
    "scaled": lambda samples: (lambda batch: [batch[0] * 2, batch[1]])(default_collate(samples)),
}


@dataclasses.dataclass(frozen=True)
class Act:
    place: str
    name: str
    period: int
    phase: int

    def is_due(self, batch):
        return batch > 0 and batch % self.period == self.phase % self.period


def _act(place):
    names, small = st.sampled_from(sorted(PLACES[place])), st.integers(1, 6)
    return st.builds(Act, st.just(place), names, small, small)


@dataclasses.dataclass(frozen=True)
class Example:
    net: str
    frozen: frozenset
    evaluates: bool
    forward: str
    forward_period: int
    sample: str
    collate: str
    batch_size: int
    shuffle: bool
    validates: bool
    accumulates: int
    schedule: tuple
    disk_seconds: float
    acts: tuple


EXAMPLES = st.builds(
    Example,
    net=st.sampled_from(sorted(NETS)),
    frozen=st.one_of(st.just(frozenset()), st.frozensets(st.sampled_from(PARTS), max_size=4)),
    evaluates=st.booleans(),
    forward=st.sampled_from(["plain"] * 5 + sorted(FORWARDS)),
    forward_period=st.integers(1, 4),
    sample=st.sampled_from(["fixed", "fixed", *SAMPLE_KINDS]),
    collate=st.sampled_from(["default", "default", *COLLATES]),
    batch_size=st.sampled_from([6, 6, 8, 5]),
    shuffle=st.booleans(),
    validates=st.booleans(),
    accumulates=st.sampled_from([1, 1, 2]),
    schedule=st.sampled_from(
        [(), (), ((2, 2),), ((1, 2),), ((2, 1), (5, 2)), ((1, 2), (7, 0)), ((1, 1), (6, 0), (8, 2))]
    ),
    disk_seconds=st.sampled_from([0.0, 0.0, 0.005]),
    acts=st.lists(st.sampled_from(sorted(PLACES)).flatmap(_act), max_size=4).map(tuple),
)


class Trains(Classifier):
    def __init__(self, example, run, dataset):
        super().__init__(NETS[example.net]())
        self.example, self.run, self.dataset, self.memory = example, run, dataset, []

    def act(self, place, trainer, x=None, y=None):
        for act in self.example.acts:
            if act.place == place and (place == "epoch end" or act.is_due(self.run.batches)):
                PLACES[place][act.name](Moment(self.run, self, trainer, self.dataset, self.memory, x, y))

    def loss_of(self, x, y):
        self.act("before", self.trainer, x, y)
        unusual = self.run.batches > 0 and self.run.batches % self.example.forward_period == 0
        loss = F.cross_entropy(FORWARDS[self.example.forward if unusual else "plain"](self, x), y)
        self.act("after", self.trainer, x, y)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


def train(example, run):
    """The training program of an example."""
    data = images() if example.net == "convolutions" else vectors()
    dataset = Samples(SAMPLE_KINDS[example.sample], shift=0)
    dataset.x, dataset.y = (part.clone() for part in data.tensors)
    options = {
        "batch_size": example.batch_size,
        "shuffle": example.shuffle,
        "drop_last": SAMPLES % example.batch_size == 1,
    }
    module = Trains(example, run, dataset)
    for path, part in module.net.named_modules():
        if path in example.frozen:
            part.requires_grad_(False).train(not example.evaluates)
    acts = on(
        on_train_batch_start=lambda trainer, module, batch, _: module.act("batch start", trainer, *batch),
        on_train_batch_end=lambda trainer, module, _, batch, __: module.act("batch end", trainer, *batch),
        on_train_epoch_end=lambda trainer, module: module.act("epoch end", trainer),
    )
    run.fit(
        module,
        loader(dataset, collate_fn=COLLATES[example.collate], **options),
        acts,
        val=loader(data, shuffle=False) if example.validates else None,
        schedule=dict(example.schedule),
        accumulate_grad_batches=example.accumulates,
        max_epochs=4,
    )
    run.note(module.memory)


served = []


def check(example):
    with tempfile.TemporaryDirectory() as folder:
        plain = harness.ran(lambda run: train(example, run), False, Path(folder) / "plain")
        hypothesis.assume(plain.error is None)  # such as a change in place of what autograd needs
        cached = harness.ran(
            lambda run: train(example, run), True, Path(folder) / "cached", disk_seconds=example.disk_seconds
        )
        harness.assert_same(plain, cached)
        assert cached.warnings <= plain.warnings
        assert len(set(cached.messages)) == len(cached.messages)
        served.append(cached.caches[0].stats.hits > 0)


SETTINGS = {"deadline": None, "suppress_health_check": list(hypothesis.HealthCheck)}


def test_random_programs():
    served.clear()
    hypothesis.settings(max_examples=15, **SETTINGS)(hypothesis.given(EXAMPLES)(check))()
    assert sum(served) > len(served) / 3  # a cache that is always off would prove nothing


@pytest.mark.slow
def test_many_random_programs():
    served.clear()
    hypothesis.settings(max_examples=500, **SETTINGS)(hypothesis.given(EXAMPLES)(check))()
    assert sum(served) > len(served) / 3
