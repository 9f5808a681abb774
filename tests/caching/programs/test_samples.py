"""Samples of every kind, and the functions that make batches of them."""

import collections
import dataclasses
import random
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from torchvision import tv_tensors
from torchvision.transforms import v2

from support.caching.parts import BATCH, WORKERS, Classifier, ConvNet, Samples, Stepping, grid, images, loader, vectors

Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    y: torch.Tensor
    name: str = ""


class Batch:
    """A class of the user's own, with `pin_memory` and `to`."""

    def __init__(self, samples):
        self.x, self.y = default_collate(samples)

    def to(self, device):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


class Unpacking(Classifier):
    """Trains with ``unpack(batch)``, which returns input and labels; notes the rest of the batch."""

    def __init__(self, unpack, run=None, net=None):
        super().__init__(net)
        self.unpack, self.run = unpack, run

    def training_step(self, batch, batch_idx):
        x, y, *rest = self.unpack(batch)
        if self.run is not None:
            self.run.note(rest)
        return F.cross_entropy(self.net(x), y)


# Samples (of the data set and an index), and how the step finds input, labels and the rest in the batch.
KINDS = {
    "list": (lambda d, i: [d.x[i], d.y[i]], lambda b: b),
    "dict": (lambda d, i: {"x": d.x[i], "y": d.y[i]}, lambda b: (b["x"], b["y"])),
    "nested": (
        lambda d, i: {"in": [{"x": d.x[i]}, i], "y": (d.y[i],)},
        lambda b: (b["in"][0]["x"], b["y"][0], b["in"][1]),
    ),
    "namedtuple": (lambda d, i: Pair(d.x[i], d.y[i]), lambda b: (b.x, b.y, type(b).__name__)),
    "numpy": (lambda d, i: (d.x[i].numpy(), d.y[i].numpy()), lambda b: b),
    "numpy doubles": (lambda d, i: (d.x[i].double().numpy(), int(d.y[i])), lambda b: (b[0].float(), b[1])),
    "integers": (lambda d, i: (d.x[i], int(d.y[i]), i), lambda b: b),
    "floats": (lambda d, i: (d.x[i], int(d.y[i]), i / 7), lambda b: b),
    "text": (lambda d, i: (d.x[i], d.y[i], f"sample {i}"), lambda b: b),
    "bytes": (lambda d, i: (d.x[i], d.y[i], b"%d" % i), lambda b: b),
    "bool": (lambda d, i: (d.x[i], d.y[i], i % 2 == 0), lambda b: b),
    "large integer": (lambda d, i: (d.x[i], d.y[i], 2**62 + i), lambda b: b),
    "numpy scalar": (lambda d, i: (d.x[i], d.y[i], np.float32(i / 3)), lambda b: b),
    "empty tensor": (lambda d, i: (d.x[i], d.y[i], torch.empty(0)), lambda b: b),
    "scalar tensor": (lambda d, i: (d.x[i], d.y[i], torch.tensor(i * 0.5)), lambda b: b),
    "bool tensor": (lambda d, i: (d.x[i], d.y[i], d.x[i] > 0), lambda b: b),
    "half": (lambda d, i: (d.x[i].half(), d.y[i]), lambda b: (b[0].float(), b[1])),
    "bfloat16": (lambda d, i: (d.x[i].bfloat16(), d.y[i]), lambda b: (b[0].float(), b[1])),
    "complex": (lambda d, i: (torch.complex(d.x[i], d.x[i]), d.y[i]), lambda b: (b[0].real.contiguous(), b[1])),
    "bytes as input": (lambda d, i: ((d.x[i] * 20 + 128).byte(), d.y[i]), lambda b: (b[0].float() / 255, b[1])),
    "same tensor twice": (lambda d, i: (d.x[i], d.y[i], d.x[i]), lambda b: b),
    "two views": (lambda d, i: (d.x[i], d.y[i], d.x[i] + 0.5), lambda b: b),
    "not contiguous": (lambda d, i: (d.x.T[:, i], d.y[i]), lambda b: b),
    "view of the whole": (lambda d, i: (d.x[i].expand(1, 8)[0], d.y[i]), lambda b: b),
    "requires grad": (lambda d, i: (d.x[i], d.y[i], nn.Parameter(torch.ones(2)).detach()), lambda b: b),
    "constant": (lambda d, i: (d.x[i], d.y[i], 1), lambda b: b),
    "index in a list": (lambda d, i: (d.x[i], d.y[i], [i, i + 1]), lambda b: b),
    "empty list": (lambda d, i: (d.x[i], d.y[i], [], {}), lambda b: b),
    "ordered dict": (lambda d, i: collections.OrderedDict(y=d.y[i], x=d.x[i]), lambda b: (b["x"], b["y"])),
    "default dict": (lambda d, i: collections.defaultdict(list, x=d.x[i], y=d.y[i]), lambda b: (b["x"], b["y"])),
    "keys that are numbers": (lambda d, i: {0: d.x[i], 1: d.y[i]}, lambda b: (b[0], b[1])),
}


@pytest.mark.parametrize("kind", grid(KINDS, every=4))
@WORKERS
def test_kind_of_a_sample(compare, kind, workers):
    sample, unpack = kind
    compare(lambda run: run.fit(Unpacking(unpack, run), loader(Samples(sample), num_workers=workers)))


def _pil(dataset, index):
    return Image.fromarray((dataset.x[index].view(2, 4) * 20 + 128).byte().numpy()), int(dataset.y[index])


def _stack_images(samples):
    pictures = [torch.from_numpy(np.array(image)).flatten().float() / 255 for image, _ in samples]
    return torch.stack(pictures), torch.tensor([label for _, label in samples])


def _columns(samples):
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


# Collate functions: of (x, y) samples.
COLLATES = {
    "stack": _columns,
    "stack with out": lambda s: (
        torch.stack([x for x, _ in s], out=torch.empty(len(s), 8)),
        torch.stack([y for _, y in s]),
    ),
    "cat": lambda s: (torch.cat([x[None] for x, _ in s]), torch.cat([y[None] for _, y in s])),
    "cat and view": lambda s: (torch.cat([x for x, _ in s]).view(len(s), -1), torch.tensor([int(y) for _, y in s])),
    "numpy": lambda s: (torch.from_numpy(np.stack([x.numpy() for x, _ in s])), torch.stack([y for _, y in s])),
    "lists": lambda s: (torch.tensor([x.tolist() for x, _ in s]), torch.tensor([int(y) for _, y in s])),
    "new tensor": lambda s: (
        torch.zeros(len(s), 8).copy_(torch.stack([x for x, _ in s])),
        torch.stack([y for _, y in s]),
    ),
    "filled": lambda s: (_filled([x for x, _ in s]), torch.stack([y for _, y in s])),
    "padded": lambda s: (pad_sequence([x for x, _ in s], batch_first=True), torch.stack([y for _, y in s])),
    "zip": lambda s: tuple(torch.stack(column) for column in zip(*s, strict=True)),
    "default": default_collate,
    "default then scaled": lambda s: (lambda b: (b[0] * 2, b[1]))(default_collate(s)),
    "scaled then stacked": lambda s: (torch.stack([x * 2 for x, _ in s]), torch.stack([y for _, y in s])),
    "centred on the batch": lambda s: (lambda b: (b[0] - b[0].mean(0), b[1]))(default_collate(s)),
    "sorted": lambda s: default_collate(sorted(s, key=lambda pair: int(pair[1]))),
    "sorted by input": lambda s: default_collate(sorted(s, key=lambda pair: float(pair[0].sum()))),
    "reversed": lambda s: default_collate(s[::-1]),
    "filtered": lambda s: default_collate([pair for pair in s if pair[0][0] < 1.5]),
    "first twice": lambda s: default_collate([s[0], *s]),
    "own class": Batch,
    "record": lambda s: Record(*default_collate(s), "made"),
    "mixed": lambda s: (lambda b: (torch.lerp(b[0], b[0].flip(0), 0.3), b[1]))(default_collate(s)),
    "mixed by chance": lambda s: (lambda b: (torch.lerp(b[0], b[0].flip(0), float(torch.rand(()))), b[1]))(
        default_collate(s)
    ),
    "noise": lambda s: (lambda b: (b[0] + 0.1 * torch.randn_like(b[0]), b[1]))(default_collate(s)),
    "shuffled by python": lambda s: default_collate(random.sample(s, len(s))),
    "mixed now and then": lambda s: (lambda b: (b[0].flip(0) if random.random() < 0.1 else b[0], b[1]))(
        default_collate(s)
    ),
    "in place": lambda s: (lambda b: (b[0].mul_(2), b[1]))(default_collate(s)),
    "several": lambda s: (lambda b: (b[0], b[1], b[0].clone(), len(s)))(default_collate(s)),
    "mask": lambda s: (lambda b: (b[0], b[1], b[0] > 0))(default_collate(s)),
}


def _filled(rows):
    whole = torch.empty(len(rows), 8)
    for place, row in enumerate(rows):
        whole[place] = row
    return whole


def _unpacked(batch):
    return (batch.x, batch.y) if isinstance(batch, Batch | Record) else batch


# Rows are not those of the samples in order.
NOT_OF_ONE_SAMPLE = {"centred on the batch", "mixed", "mixed by chance", "noise", "shuffled by python"}
NOT_OF_ONE_SAMPLE |= {"sorted", "sorted by input", "reversed", "first twice", "filtered"}


@pytest.mark.parametrize("name", grid(list(COLLATES), every=4))
@WORKERS
def test_collate_function(compare, name, workers):
    served = None if name in NOT_OF_ONE_SAMPLE or "now and then" in name else True
    data = {"collate_fn": COLLATES[name], "num_workers": workers}
    compare(lambda run: run.fit(Unpacking(_unpacked, run), loader(**data)), served=served)


def test_collate_function_changes_fields_in_place(compare):
    def collate(samples):
        return torch.stack([x for x, _, _ in samples]), [(y.add_(1), numbers.pop()) for _, y, numbers in samples]

    def unpack(batch):
        return batch[0], torch.stack([y for y, _ in batch[1]]) % 3, batch[1]

    def program(run):
        data = loader(Samples(lambda d, i: (d.x[i], d.y[i].clone(), [i, i + 1])), collate_fn=collate)
        run.fit(Unpacking(unpack, run), data, max_epochs=5)

    compare(program, served=True)


def test_users_own_way_to_collate_tensors(compare):
    def scaled(batch, *, collate_fn_map=None):
        return torch.stack(batch) * 2

    with mock.patch.dict(default_collate_fn_map, {torch.Tensor: scaled}):
        compare(lambda run: run.fit(Unpacking(lambda b: (b[0], b[1] // 2), run), loader()), served=True)


def test_images_of_the_python_library(compare):
    compare(lambda run: run.fit(Classifier(), loader(Samples(_pil), collate_fn=_stack_images)))


EXTRAS = [None, {1, 2}, object, 10**40, -(10**40), "🙂", 1j, range(3), np.datetime64("2020-01-01")]


@pytest.mark.parametrize("extra", grid(EXTRAS, every=2))
def test_fields_that_are_no_tensors(compare, extra):
    def collate(samples):
        return *default_collate([pair[:2] for pair in samples]), [str(pair[2]) for pair in samples]

    compare(
        lambda run: run.fit(
            Unpacking(list, run), loader(Samples(lambda d, i: (d.x[i], d.y[i], extra)), collate_fn=collate)
        )
    )


# Texts: token ids of several lengths.
def _text(dataset, index):
    length = 2 + index % 5
    return {"ids": (torch.arange(length) * (index + 1)) % 19 + 1, "label": int(dataset.y[index])}


def _pad(samples):
    ids = pad_sequence([sample["ids"] for sample in samples], batch_first=True)
    return {"ids": ids, "mask": ids != 0, "label": torch.tensor([sample["label"] for sample in samples])}


def _pad_to_eight(samples):
    batch = _pad(samples)
    for name in ("ids", "mask"):
        batch[name] = F.pad(batch[name], (0, 8 - batch[name].size(1)))
    return batch


def _with_lengths(samples):
    return _pad(samples) | {"lengths": torch.tensor([len(sample["ids"]) for sample in samples])}


def _packed(samples):
    ordered = sorted(samples, key=lambda sample: -len(sample["ids"]))
    return {"packed": pack_sequence([sample["ids"] for sample in ordered])} | _pad(ordered)


class Texts(nn.Module):
    def __init__(self, masked=True):
        super().__init__()
        self.embedding = nn.Embedding(20, 8, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(3)
        )
        self.head, self.masked = nn.Linear(8, 3), masked

    def forward(self, ids, mask):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=~mask if self.masked else None)
        return self.head((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


class TextClassifier(Classifier):
    def training_step(self, batch, batch_idx):
        mask = batch["mask"] if "mask" in batch else batch["ids"] != 0
        return F.cross_entropy(self.net(batch["ids"], mask), batch["label"])


@pytest.mark.parametrize(
    ("collate", "masked"), grid([_pad, _pad_to_eight, _with_lengths, _packed], [True, False], every=3)
)
@WORKERS
def test_texts_of_several_lengths(compare, collate, workers, masked):
    def program(run):
        data = loader(Samples(_text), collate_fn=collate, num_workers=workers)
        run.fit(TextClassifier(Texts(masked)), data, schedule={2: 2, 9: 3}, max_epochs=4)

    compare(program, served=None)


def test_padding_is_read(compare):
    """The ids are looked at now and then."""

    class Looks(TextClassifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 1:
                self.log("words", batch["ids"].ne(0).float().sum())
            return super().training_step(batch, batch_idx)

    compare(lambda run: run.fit(Looks(Texts()), loader(Samples(_text), collate_fn=_pad)), served=None)


# Data sets.
DATASETS = {
    "subset": lambda: Subset(vectors(40), list(range(0, 40, 2))),
    "subset of a subset": lambda: Subset(Subset(vectors(40), list(range(30))), list(range(5, 25))),
    "concatenated": lambda: vectors(12) + vectors(12, seed=2),
    "stacked": lambda: torch.utils.data.StackDataset(vectors(24).tensors[0], vectors(24).tensors[1]),
    "list": lambda: list(zip(*vectors().tensors, strict=True)),
    "tensors of one kind": lambda: TensorDataset(vectors().tensors[0], torch.arange(24) % 3),
    "random split": lambda: torch.utils.data.random_split(vectors(40), [24, 16])[0],
    "duplicates": lambda: Subset(vectors(), [0, 1, 2, 3] * 6),
    "few": lambda: vectors(8),
}


@pytest.mark.usefixtures("written_at_once")
@pytest.mark.parametrize("dataset", grid(DATASETS, every=4))
def test_data_set(compare, dataset):
    compare(lambda run: run.fit(Classifier(), loader(dataset()), max_epochs=4))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_with_channels_last_networks(compare, channels):
    def program(run):
        net = ConvNet(channels).to(memory_format=torch.channels_last)
        run.fit(Classifier(net), loader(images(channels=channels)))

    compare(program)


def test_batch_of_one_row_remains(compare):
    compare(lambda run: run.fit(Classifier(), loader(vectors(BATCH * 3 + 2)), max_epochs=4))


def test_lists_of_several_lengths_are_told(compare, caplog):
    def sample(data, index):
        return data.x[index], [torch.ones(4)] * (index % 3), data.y[index]

    def collate(samples):
        xs, _, ys = zip(*samples, strict=True)
        return torch.stack(xs), torch.stack(ys)

    with caplog.at_level("INFO"):
        compare(lambda run: run.fit(Classifier(), loader(Samples(sample), collate_fn=collate)), served=None)
    assert caplog.text.count("samples differ in their structure (lists of several lengths, or None?)") == 1


class Together(Samples):
    """Loads a batch at once, by ``load(dataset, ids)``."""

    def __init__(self, load):
        super().__init__(lambda data, index: (data.x[index], data.y[index]))
        self.load = load

    def __getitems__(self, ids):
        return self.load(self, ids)


def _alone(data, ids):
    return [data[index] for index in ids]


def _ready(data, ids):
    return data.x[ids], data.y[ids]


def _scaled(data, ids):
    return list(zip(data.x[ids] / data.x[ids].abs().max(), data.y[ids], strict=True))


def _cleaned(data, ids):
    return [data[index] for index in ids if index % 7 != 6]


def _nothing_alone(data, ids):
    return [(data.x[index], data.y[index]) for index in ids]


@WORKERS
@pytest.mark.parametrize(
    ("load", "served"), [(_alone, True), (_ready, False), (_scaled, False), (_cleaned, False), (_nothing_alone, False)]
)
def test_a_dataset_loads_batches_at_once(compare, load, served, workers):
    def program(run):
        data = Together(load)
        if load is _nothing_alone:
            data.sample = None
        collate = (lambda batch: batch) if load is _ready else None
        run.fit(Classifier(), loader(data, collate_fn=collate, num_workers=workers), max_epochs=4)

    told = compare(program, served=served)
    assert served or "__getitems__" in " ".join(told.messages)


def test_attributes_of_tensors_in_a_batch(compare):
    """Set by the collate function, and by the dataset."""

    def collate(samples):
        x, y = default_collate(samples)
        x.scale, y.smoothing = 0.5, 0.1
        return x, y

    def step(module, x, y):
        return F.cross_entropy(module.net(x) * x.scale, y, label_smoothing=y.smoothing)

    def program(run):
        run.fit(Stepping(step), loader(collate_fn=collate))

    compare(program)


def test_attributes_of_tensors_of_a_sample(compare):
    def noted(data, index):
        x = data.x[index].clone()
        x.times = 1 + index % 3
        return x, data.y[index]

    def collate(samples):
        return torch.stack([x * x.times for x, _ in samples]), torch.stack([y for _, y in samples])

    def program(run):
        run.fit(Classifier(), loader(Samples(noted), collate_fn=collate))

    compare(program, served=None)


@pytest.mark.parametrize("last", [[], [v2.ToPureTensor()]])
def test_images_of_torchvision_are_told_to_be_loaded_each_time(compare, caplog, last):
    transform = v2.Compose([v2.ToDtype(torch.float32), *last])

    def sample(data, index):
        return transform(tv_tensors.Image(data.x[index].view(2, 2, 2))), data.y[index]

    def step(module, x, y):
        return F.cross_entropy(module.net(x.flatten(1)), y)

    with caplog.at_level("INFO"):
        run = compare(lambda run: run.fit(Stepping(step), loader(Samples(sample)), max_epochs=5), served=True)
    assert ("fields of type Image cannot be stored" in caplog.text) == (not last)
    assert (run.caches[0].stats.not_loaded > 0) == bool(last)


class Framed(torch.Tensor):
    """A kind of tensor of its own, as those of torchvision."""


@pytest.mark.parametrize("place", ["step", "collate"])
def test_inputs_of_another_kind(compare, place):
    def framed(x):
        return torch.as_tensor(x).as_subclass(Framed).as_subclass(torch.Tensor)

    def collate(samples):
        x, y = default_collate(samples)
        return framed(x), y

    def program(run):
        if place == "step":
            run.fit(Stepping(lambda module, x, y: F.cross_entropy(module.net(framed(x)), y)))
        else:
            run.fit(Classifier(), loader(collate_fn=collate))

    compare(program, served=None)
