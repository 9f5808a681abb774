"""Batches with the ids of their samples."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_egeria.core.batches.reading import BatchSource, why_no_ids
from support.models import vectors


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ids_are_those_of_the_samples(workers):
    data = vectors(21)
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
    source = BatchSource(loader)
    for _ in range(2):
        seen = []
        for (x, _), ids in source:
            assert torch.equal(x, data.tensors[0][list(ids)])
            seen += ids
        assert sorted(seen) == list(range(21))
    source.close()
    source.close()


def test_order_and_random_numbers_are_the_loaders():
    loader = DataLoader(vectors(10), batch_size=4, sampler=RandomSampler(vectors(10)))
    torch.manual_seed(3)
    plain, after = [x for x, _ in loader], torch.rand(1)
    torch.manual_seed(3)
    found = [batch[0] for batch, _ in BatchSource(loader)]
    assert all(map(torch.equal, plain, found))
    assert torch.equal(after, torch.rand(1))


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(6.0)


class OwnWay(DataLoader):
    def __iter__(self):
        return iter([torch.zeros(2)])


@pytest.mark.parametrize("loader", [DataLoader(Stream(), 2), OwnWay(vectors(4), 2), [torch.zeros(2)]])
def test_others_have_no_ids(loader):
    source = BatchSource(loader)
    assert not source.has_ids
    assert {ids for _, ids in source} == {None}


def test_reason_without_ids():
    assert why_no_ids(DataLoader(vectors(4), 2)) is None
    assert why_no_ids(DataLoader(vectors(4), batch_size=None)).startswith("the DataLoader makes no batches")
