"""Batches read ahead: each branch has those of training, and training goes on behind them."""

import copy
import itertools

import pytest
import torch

from lightning_egeria.core.training.feed import BranchFeed, Feed
from lightning_egeria.errors import TrainingDataError


class Fetcher:
    """Draws a random number for each batch, as augmentation does."""

    def __init__(self, count=6):
        self.count, self.fetched, self.profiled = count, 0, False

    def __iter__(self):
        self.fetched = 0
        return self

    def __next__(self):
        if self.fetched == self.count:
            raise StopIteration
        self.fetched += 1
        return torch.rand(2), self.fetched - 1, 0

    @property
    def done(self):
        return self.fetched == self.count


def drawn(batches, count):
    """Each batch, and what training on it would draw next."""
    return [(item[0].tolist(), float(torch.rand(()))) for item in itertools.islice(batches, count)]


def test_each_branch_has_the_batches_of_training():
    torch.manual_seed(0)
    plain = drawn(Fetcher(), 5)
    torch.manual_seed(0)
    feed = Feed(Fetcher())
    first = drawn(feed.ahead.from_here(0), 3)
    second = drawn(feed.ahead.from_here(0), 3)
    third = drawn(feed.ahead.from_here(1), 2)
    assert first == second == plain[:3]
    assert third == plain[1:3]
    drawn(feed.ahead.from_here(0), 3)
    feed.skip(3)
    assert drawn(iter(lambda: next(feed), None), 2) == plain[3:]


def test_training_on_a_read_batch_has_its_random_numbers():
    torch.manual_seed(0)
    plain = drawn(Fetcher(), 4)
    torch.manual_seed(0)
    feed = Feed(Fetcher())
    drawn(feed.ahead.from_here(0), 3)  # a branch that is given up
    feed.ahead.kept[0].random.restore()
    assert drawn(iter(lambda: next(feed), None), 4) == plain


def test_a_loader_that_ends_early_is_named():
    feed = Feed(Fetcher(2))
    with pytest.raises(TrainingDataError, match="ended after 2 batches of a trial"):
        drawn(feed.ahead.from_here(0), 3)


def test_training_gets_what_longer_branches_have_read():
    feed = Feed(Fetcher())
    read = [item[1] for item in itertools.islice(feed.ahead.from_here(0), 6)]
    feed.skip(2)
    left = []
    while not feed.done:
        left.append(next(feed)[1])
    assert (read, left) == ([0, 1, 2, 3, 4, 5], [2, 3, 4, 5])


def test_a_branch_that_changes_its_batch_changes_no_other():
    feed = Feed(Fetcher())
    (item,) = itertools.islice(feed.ahead.from_here(0), 1)
    before = item[0].clone()
    item[0].zero_()
    (again,) = itertools.islice(feed.ahead.from_here(0), 1)
    assert torch.equal(again[0], before)
    assert torch.equal(next(feed)[0], before)


def test_it_stands_for_the_fetcher():
    calls = []
    fetcher = Fetcher()
    feed = Feed(fetcher)
    feed.before_batch["the test"] = lambda: calls.append(1)
    feed.profiled = True
    assert fetcher.profiled
    assert (feed.room(), feed.room(copies=2)) == (2**27, 2**26)  # batches of 8 bytes in a GiB
    assert copy.deepcopy(feed).profiled
    assert iter(feed) is feed
    assert [next(feed)[1] for _ in range(6)] == list(range(6))
    assert (len(calls), feed.done, feed.fetcher) == (6, True, fetcher)
    assert BranchFeed(iter([1]), lambda: None).done is False
