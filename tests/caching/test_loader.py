"""Whose batches are planned, and who gets them."""

import contextlib

import pytest
import torch
from lightning import LightningModule
from lightning.pytorch.loops.fetchers import _DataFetcher
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from lightning_egeria.caching.loader import LOOK_AHEAD_BATCHES, Line, has_samples_once, why_not
from lightning_egeria.caching.plan import Plan
from lightning_egeria.caching.stats import Accounts, CacheStats
from support.caching.parts import Samples, loader, vectors


class Own(DataLoader):
    def __iter__(self):
        return super().__iter__()


class Generated(IterableDataset):
    def __iter__(self):
        return iter([])


class Endless:
    def __getitem__(self, index):
        return index


class Unmeasured(Sampler):
    def __iter__(self):
        return iter([0])


REFUSED = {
    "list": ([1, 2], "the data come from a list, expected one torch DataLoader"),
    "subclass": (Own(vectors()), "Own has its own way of going through the data"),
    "iterable": (DataLoader(Generated()), "an IterableDataset has no sample ids"),
    "no batches": (DataLoader(vectors(), batch_size=None), "samples have no ids"),
    "endless": (DataLoader(Endless(), sampler=SequentialSampler(range(3))), "the dataset Endless has no length"),
    "no length": (DataLoader(vectors(), sampler=Unmeasured()), "the DataLoader has no length"),
}


@pytest.mark.parametrize(("data", "reason"), REFUSED.values(), ids=REFUSED)
def test_loader_whose_batches_cannot_be_planned(data, reason):
    assert reason in why_not(data, LightningModule().training_step)


def test_ordinary_loader_is_planned():
    assert why_not(loader(), LightningModule().training_step) is None


def test_step_that_fetches_batches_is_not_planned():
    class Iterates(LightningModule):
        def training_step(self, dataloader_iter):
            return None

    reason = why_not(loader(), Iterates().training_step)
    assert reason == "training_step takes dataloader_iter, and fetches its own batches. Take a batch instead"


DATA = vectors()
SAMPLERS = {
    "random": (RandomSampler(DATA), True),
    "in order": (SequentialSampler(DATA), True),
    "subset": (SubsetRandomSampler([1, 2, 3]), True),
    "distributed": (DistributedSampler(DATA, num_replicas=2, rank=0), True),
    "repeated subset": (SubsetRandomSampler([1, 1]), False),
    "replacement": (RandomSampler(DATA, replacement=True), False),
    "more than all": (RandomSampler(DATA, num_samples=100), False),
    "weighted": (WeightedRandomSampler([1.0] * 24, 24), False),
    "unknown": (Unmeasured(), False),
}


@pytest.mark.parametrize(("sampler", "once"), SAMPLERS.values(), ids=SAMPLERS)
def test_samples_come_once(sampler, once):
    assert has_samples_once(loader(sampler=sampler)) is once


def test_batch_sampler_of_the_user_may_repeat():
    class Batches(BatchSampler):
        pass

    assert not has_samples_once(loader(batch_sampler=Batches(SequentialSampler(DATA), 4, False)))


class Stream:
    """Plans nothing, and notes what is asked for."""

    def __init__(self):
        self.frozen, self.reads_ahead = None, False
        self.planned, self.received, self.epochs, self.closed = [], [], [], []
        self.accounts = Accounts(CacheStats())

    def begin_epoch(self, *epoch):
        self.epochs.append(epoch[:2])

    def plan(self, ids):
        self.planned.append(ids)
        return Plan(len(self.planned) - 1, tuple(ids))

    def last_look(self, plan):
        return plan

    def receive(self, loaded, waited):
        self.received.append((loaded.plan.number, len(self.planned)))
        return loaded.batch, f"batch {loaded.plan.number}"

    def close(self, remove):
        self.closed.append(remove)


class Fetcher(_DataFetcher):
    """A loop of Lightning, as far as the loader sees it."""

    def fetch(self, data):
        return list(data)


@pytest.fixture
def line():
    made, arrived = [], []

    def make(data):
        made.append(
            Line(
                data,
                lambda dataset, elsewhere: Stream(),
                lambda once: (5, 7 if once else None),
                arrived.append,
                begins=lambda: True,
                looking=contextlib.nullcontext,
            )
        )
        made[-1].arrived = arrived
        return made[-1]

    yield make
    for one in made:
        one.close(remove=False)


def same(batches, others):
    pairs = zip(batches, others, strict=True)
    return all(one.equal(other) for batch, wanted in pairs for one, other in zip(batch, wanted, strict=True))


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"num_workers": 1}, {"drop_last": True, "batch_size": 5}])
def test_loop_gets_the_batches_of_the_loader(line, options):
    data, batches, draws = loader(**options), [], []
    one = line(data)
    for read in (list, lambda _: Fetcher().fetch(one.loader)):
        torch.manual_seed(3)
        batches.append(read(data))
        draws.append(torch.rand(()))
    assert same(*batches)
    assert draws[0] == draws[1]
    assert len(one.stream.planned) == len(batches[0])
    assert one.stream.epochs == [(5, 7)]
    assert one.arrived == [*(f"batch {n}" for n in range(len(batches[0]))), None]


def test_another_reader_gets_ordinary_batches(line):
    one = line(loader(shuffle=False))
    assert same(one.loader, loader(shuffle=False))
    assert one.stream.planned == []
    assert one.arrived == []


def test_loader_looks_like_the_users_own(line):
    data = loader()
    found = line(data).loader
    assert isinstance(found, DataLoader)
    assert (len(found), found.dataset, found.batch_size) == (len(data), data.dataset, data.batch_size)
    assert type(found).__name__ == "DataLoader"


@pytest.mark.parametrize(("sampler", "ahead"), [(SequentialSampler(DATA), LOOK_AHEAD_BATCHES), (Unmeasured(), 0)])
def test_known_samplers_are_read_ahead(line, sampler, ahead):
    one = line(loader(DATA, sampler=sampler, batch_size=2) if ahead else loader(batch_sampler=_Batches()))
    one.stream.frozen, one.stream.reads_ahead = "frozen modules", True
    Fetcher().fetch(one.loader)
    assert max(planned - number - 1 for number, planned in one.stream.received) == ahead


class _Batches:
    def __len__(self):
        return 6

    def __iter__(self):
        return iter([[0, 1]] * 6)


def test_without_entries_nothing_is_read_ahead(line):
    one = line(loader())
    Fetcher().fetch(one.loader)
    assert [planned - number for number, planned in one.stream.received] == [1] * 4


def test_loop_that_ends_early_is_told(line):
    one = line(loader())

    class Ends(_DataFetcher):
        def fetch(self):
            batches = iter(one.loader)
            next(batches)
            batches.close()

    Ends().fetch()
    assert one.arrived == ["batch 0", None]


def test_persistent_workers_are_kept_and_stopped(line):
    one = line(loader(num_workers=1, persistent_workers=True))
    for _ in range(2):
        assert len(Fetcher().fetch(one.loader)) == 4
    one.close(remove=True)
    assert one.stream.closed == [True]


def test_data_set_may_be_exchanged(line):
    """The user may exchange the data set between two epochs."""
    one = line(loader(shuffle=False))
    one.loader.__dict__["dataset"] = Samples(lambda data, index: (data.x[index] + 1, data.y[index]))
    assert Fetcher().fetch(one.loader)[0][0].equal(vectors()[:6][0] + 1)
