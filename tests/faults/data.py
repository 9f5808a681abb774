"""Data sets that raise, change, repeat themselves, or come in another order or number."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler, TensorDataset

from faults.held import check, fault
from faults.job import CACHE, CHECKPOINT, EPOCHS, SAMPLES, EpochOrder, Job, images
from faults.processes import run
from faults.trainer import clean, ended_well, same_as_uninterrupted


class ItemError(Exception):
    """Raised by a job's own data set."""


class Raising(Dataset[Any]):
    """Cannot give one of its items at the so-manieth time that it is asked for any."""

    def __init__(self, at: int) -> None:
        self.samples, self.at, self.asked = images(), at, 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        if self.asked == self.at:
            raise ItemError(f"item {index}")
        return self.samples[index]


@fault("data set", "an item raises", "the user's own error, nothing left; started again, it ends as if uninterrupted")
def item_raises(chance: random.Random, folder: Path) -> None:
    ended = run(Job(folder, dataset=Raising(chance.randrange(1, SAMPLES * EPOCHS // 2))))
    clean(ended)
    check(ended.result is not None and "item" in ended.result["ended"], f"not the user's own error: {ended.result}")
    same_as_uninterrupted(run(Job(folder)))


def _same_with_and_without(folder: Path, **arguments: Any) -> None:
    """A job gives the same with the cache that is there already as without one."""
    (folder / CHECKPOINT).unlink(missing_ok=True)
    found = ended_well(run(Job(folder, **arguments)))
    expected = ended_well(run(Job(folder / "uncached", cached=False, **arguments)))
    check(found["parameters"] == expected["parameters"], "the cache changes the parameters")
    check(found["events"] == expected["events"], "the cache changes the freezes")
    check((folder / CACHE).is_dir(), "there was no cache")


@fault("data set", "some or all items are others in the next run", "as without a cache: outdated entries are misses")
def items_change(chance: random.Random, folder: Path) -> None:
    same_as_uninterrupted(run(Job(folder)))
    images_, labels = (tensor.clone() for tensor in images().tensors)
    changed = chance.sample(range(SAMPLES), chance.choice((1, 3, 10, SAMPLES)))
    images_[changed] += 1
    _same_with_and_without(folder, dataset=TensorDataset(images_, labels))


@fault("data set", "only the labels are others in the next run", "as without a cache: they are those of now")
def labels_change(chance: random.Random, folder: Path) -> None:
    same_as_uninterrupted(run(Job(folder)))
    images_, labels = (tensor.clone() for tensor in images().tensors)
    changed = chance.sample(range(SAMPLES), chance.choice((1, 3, 10, SAMPLES)))
    labels[changed] = (labels[changed] + 1) % 4
    _same_with_and_without(folder, dataset=TensorDataset(images_, labels))


class Repeating(EpochOrder):
    """Draws with replacement."""

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randint(self.count, (self.count,), generator=generator).tolist())


class OtherOrder(Sampler[int]):
    """Another permutation in each epoch than `EpochOrder` has."""

    def __init__(self, seed: int) -> None:
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SAMPLES


@fault("data set", "samples repeat and are left out", "as without a cache")
def repeats(chance: random.Random, folder: Path) -> None:
    _same_with_and_without(folder, sampler=Repeating(SAMPLES))


@fault("data set", "another order in the next run", "as without a cache, from the entries of the first")
def other_order(chance: random.Random, folder: Path) -> None:
    same_as_uninterrupted(run(Job(folder)))
    _same_with_and_without(folder, sampler=OtherOrder(chance.randrange(10**6)))


@fault("data set", "more or fewer samples in the next run", "as without a cache")
def length_changes(chance: random.Random, folder: Path) -> None:
    same_as_uninterrupted(run(Job(folder)))
    count = chance.choice((SAMPLES - 8, SAMPLES - 1, SAMPLES + 1, SAMPLES + 8))
    more = images(64, seed=1)
    both = [torch.cat(pair)[:count] for pair in zip(images().tensors, more.tensors, strict=True)]
    _same_with_and_without(folder, dataset=TensorDataset(*both))
