"""The batch size changes, and the order of the samples does not."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from lightning_egeria.core.batches.batch_sampler import MutableBatchSampler
from lightning_egeria.errors import ArgumentError, TrainingDataError


def flat(batches):
    return list(itertools.chain.from_iterable(batches))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "size"), [(10, 3), (12, 3), (2, 3), (0, 3)])
def test_unchanged_it_is_the_batch_sampler_of_torch(samples, size, drop_last):
    ours, plain = MutableBatchSampler(range(samples), size, drop_last), BatchSampler(range(samples), size, drop_last)
    for _ in range(2):
        assert len(ours) == len(plain)
        assert list(ours) == list(plain)


def test_it_draws_the_random_numbers_of_torch():
    runs = []
    for kind in (BatchSampler, MutableBatchSampler):
        torch.manual_seed(0)
        batches = kind(RandomSampler(range(20)), 3, False)
        loader = DataLoader(range(20), batch_sampler=batches)
        runs.append([[(batch.tolist(), float(torch.rand(()))) for batch in loader] for _ in range(2)])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("samples", [20, 21])
def test_it_draws_from_a_generator_as_torch_does(samples, drop_last):
    runs = []
    for kind in (BatchSampler, MutableBatchSampler):
        sampler = RandomSampler(range(samples), generator=torch.Generator().manual_seed(0))
        batches = kind(sampler, 4, drop_last)
        runs.append([list(itertools.islice(batches, len(batches))) for _ in range(2)] + [list(batches), list(batches)])
    assert runs[0] == runs[1]


@given(
    samples=st.integers(1, 40),
    first=st.integers(1, 9),
    changes=st.dictionaries(st.integers(0, 12), st.tuples(st.integers(1, 9), st.integers(0, 5))),
    drop_last=st.booleans(),
    joined=st.booleans(),
)
def test_each_sample_comes_once_in_order(samples, first, changes, drop_last, joined):
    if joined:
        drop_last = False
        batches = MutableBatchSampler.like(Bucketed(samples, first))
    else:
        batches = MutableBatchSampler(range(samples), first, drop_last)
    drawn, number = [], 0
    for epoch in range(2):
        begun, iterator = len(drawn), iter(batches)
        while True:
            if number in changes:
                size, later = changes[number]
                batches.change(size, batches.drawn + later)
            expected, length, size = batches.drawn, len(batches), batches.batch_size
            batch = next(iterator, None)
            if batch is None:
                break
            number += 1
            assert expected < length
            assert length == len(batches) or joined  # whose last batch may be shorter than anyone can know
            assert len(batch) == size or batches.drawn == len(batches)
            assert batches.size_of(batches.drawn - 1) == len(batch)
            drawn.append(batch)
        assert batches.drawn == len(batches)
        seen = flat(drawn[begun:])
        assert seen == list(range(samples))[: len(seen)]
        assert samples - len(seen) < (size if drop_last else 1), epoch


def test_a_later_change_holds_from_its_batch_on():
    batches = MutableBatchSampler(range(20), 2)
    drawn = iter(batches)
    assert next(drawn) == [0, 1]
    batches.change(4, at=3)
    assert (batches.batch_size, len(batches)) == (2, 3 + 4)
    assert list(drawn) == [[2, 3], [4, 5], [6, 7, 8, 9], [10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]


def test_a_change_behind_the_end_holds_in_the_next_epoch():
    batches = MutableBatchSampler(range(6), 2)
    drawn = iter(batches)
    next(drawn)
    batches.change(3, at=8)
    assert list(drawn) == [[2, 3], [4, 5]]
    assert len(list(batches)) == 2
    assert batches.batch_size == 3


def test_an_epoch_is_left_and_resumed():
    batches = MutableBatchSampler(range(10), 4)
    batches.resume([9, 8, 7, 6, 5, 4, 3, 2, 1, 0], [1, 2])
    assert len(batches) == 4
    assert list(batches) == [[6, 5, 4, 3], [2, 1, 0]]
    assert (batches.drawn, batches.samples_before(3)) == (4, 7)
    assert list(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_an_epoch_may_end_early():
    batches = MutableBatchSampler(range(10), 2)
    batches.most_samples = 6
    assert len(batches) == 3
    batches.change(4)
    assert len(batches) == 2
    assert list(batches) == [[0, 1, 2, 3], [4, 5]]


class Bucketed:
    """A batch sampler as users write one, with its own order of batches."""

    def __init__(self, samples, batch_size):
        self.samples, self.batch_size = samples, batch_size

    def __len__(self):
        return -(-self.samples // self.batch_size)

    def __iter__(self):
        for start in range(0, self.samples, self.batch_size):
            yield list(range(start, min(start + self.batch_size, self.samples)))


def test_batches_of_a_batch_sampler_pass_until_a_change():
    class Backwards(Bucketed):
        def __iter__(self):
            return reversed(list(super().__iter__()))

    batches = MutableBatchSampler.like(Backwards(7, 3))
    assert list(batches) == [[6], [3, 4, 5], [0, 1, 2]]
    drawn = iter(batches)
    assert next(drawn) == [6]
    batches.change(2)
    assert list(drawn) == [[3, 4], [5, 0], [1, 2]]
    assert list(batches) == [[6, 3], [4, 5], [0, 1], [2]]


@pytest.mark.parametrize("workers", [0, 2])
def test_with_workers_and_ranks_each_sample_comes_once(workers):
    data = TensorDataset(torch.arange(37))
    seen = []
    for rank in range(2):
        sampler = DistributedSampler(data, 2, rank, shuffle=True, seed=3)
        batches = MutableBatchSampler.like(BatchSampler(sampler, 3, False))
        loader = DataLoader(data, batch_sampler=batches, num_workers=workers)
        values = []
        for number, (batch,) in enumerate(loader):
            if number == 1:
                batches.change(5)
                asked = batches.drawn  # before the change
            assert len(batch) == (3 if number <= (asked - 1 if number else 0) else 5) or number == len(batches) - 1
            values += batch.tolist()
        assert values == list(sampler)
        seen += values
    assert sorted(set(seen)) == list(range(37))


def test_wrong_sizes_and_sources_are_refused():
    for size in (0, 1.5, True):
        with pytest.raises(ArgumentError, match="batch_size must be an integer of at least 1, got"):
            MutableBatchSampler(range(3), size)
    with pytest.raises(ArgumentError, match="batch_size must be"):
        MutableBatchSampler(range(3), 1).change(0)
    with pytest.raises(ArgumentError, match="source must have a length, got list_iterator"):
        MutableBatchSampler(iter([1]), 1)
    with pytest.raises(TrainingDataError, match="the batch sampler list has no batch_size"):
        MutableBatchSampler.like([[1], [2]])

    class Endless:
        batch_size = 3

    with pytest.raises(TrainingDataError, match="Endless has no length"):
        MutableBatchSampler.like(Endless())

    class Varied(Bucketed):
        def __iter__(self):
            yield [0, 1, 2, 3]

    with pytest.raises(TrainingDataError, match="Varied yields a batch of 4 samples, expected its batch_size of 3"):
        list(MutableBatchSampler.like(Varied(4, 3)))
