"""The order of an epoch is repeated, whatever drew it, for any number of processes."""

import json

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_egeria.core.training.order import EpochOrder, digest_of, share_of

DATA = list(range(23))


class ByEpoch:
    """Shuffles by the epoch that Lightning names."""

    epoch = 0

    def __len__(self):
        return 23

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist())


class ByNumpy:
    """Shuffles with numpy's generators, its own or the global one."""

    def __init__(self, own):
        self.own = own

    def __len__(self):
        return 23

    def __iter__(self):
        return iter((self.own or np.random).permutation(23).tolist())


SAMPLERS = {
    "random": lambda: RandomSampler(DATA),
    "own generator": lambda: RandomSampler(DATA, generator=torch.Generator().manual_seed(5)),
    "sequential": lambda: SequentialSampler(DATA),
    "subset": lambda: SubsetRandomSampler(DATA[3:]),
    "numpy": lambda: ByNumpy(None),
    "own generator of numpy": lambda: ByNumpy(np.random.default_rng(2)),
    "weighted": lambda: WeightedRandomSampler([1.0] * 23, 17),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_of_one_process_is_repeated(name):
    sampler = SAMPLERS[name]()
    loader = DataLoader(DATA, sampler=sampler)
    list(sampler)  # an epoch before
    order = EpochOrder.now(loader, sampler)
    seen = list(sampler)
    drawn = torch.rand(3)
    assert order.ids(sampler) == seen
    order.begun.restore([sampler])
    list(sampler)
    assert torch.equal(torch.rand(3), drawn)  # `ids` has moved nothing
    again = EpochOrder.from_state(json.loads(json.dumps(order.state())))
    assert again.ids(SAMPLERS[name]()) == seen


@pytest.mark.parametrize("joined", [False, True])
def test_the_order_of_a_named_epoch_is_repeated(joined):
    own = ByEpoch()
    sampler = BatchSampler(own, 4, False) if joined else own
    own.set_epoch(2)
    order, seen = EpochOrder.now(DataLoader(DATA), sampler), list(own)
    own.set_epoch(0)
    assert EpochOrder.from_state(order.state()).ids(sampler, joined) == seen


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
def test_what_was_dealt_to_two_is_dealt_to_any(wrapped, shuffle):
    own = SubsetRandomSampler(DATA[:9]) if wrapped else SequentialSampler(DATA)
    shares = []
    for rank in range(2):
        torch.manual_seed(0)
        if wrapped:
            dealing = DistributedSamplerWrapper(own, num_replicas=2, rank=rank, shuffle=shuffle, seed=4)
        else:
            dealing = DistributedSampler(DATA, 2, rank, shuffle=shuffle, seed=4)
        dealing.set_epoch(3)
        order = EpochOrder.now(DataLoader(DATA, sampler=dealing), own)
        shares.append(list(dealing))
    whole = order.ids(own)
    assert order.replicas == 2
    assert sorted(whole) == DATA[:9] if wrapped else DATA
    assert [share_of(whole, rank, 2) for rank in range(2)] == shares
    assert share_of(whole, 0, 1) == whole
    assert len({len(share_of(whole, rank, 4)) for rank in range(4)}) == 1


def test_batches_count_as_their_samples():
    class Buckets:
        batch_size = 2

        def __len__(self):
            return 2

        def __iter__(self):
            return iter([[3, 1], [2]])

    loader = DataLoader(DATA, batch_sampler=Buckets())
    assert EpochOrder.now(loader, loader.batch_sampler).ids(loader.batch_sampler, yields_batches=True) == [3, 1, 2]


def test_more_processes_than_samples():
    assert [share_of([7], rank, 3) for rank in range(3)] == [[7], [7], [7]]


def test_digests_tell_orders_apart():
    assert digest_of([1, 23]) != digest_of([12, 3])
    assert digest_of(iter(["a", (1, 2)])) == digest_of(["a", (1, 2)])
