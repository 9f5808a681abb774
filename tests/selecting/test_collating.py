"""A collate function that changes the order of the samples is found."""

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.selecting.collating import InOrder, WithSamples
from support.models import images
from support.selecting import Indexed, Noting, trained

SAMPLES = [(torch.tensor([float(length)]), length) for length in (3, 1, 2, 5)]


def by_length(samples):
    return default_collate(sorted(samples, key=lambda sample: sample[1]))


def with_random_masks(samples):
    x, lengths = default_collate(samples)
    return torch.rand(len(x), 2), lengths


def test_the_batch_is_the_users_and_no_random_number_moves():
    for collate in (default_collate, with_random_masks):
        torch.manual_seed(0)
        plain, after = collate(SAMPLES), torch.rand(1)
        torch.manual_seed(0)
        found = InOrder(collate)(SAMPLES)
        assert all(map(torch.equal, plain, found))
        assert torch.equal(after, torch.rand(1))


def test_another_order_is_refused():
    with pytest.raises(UnsupportedError, match="changes the order of the samples"):
        InOrder(by_length)(SAMPLES)
    in_order = sorted(SAMPLES, key=lambda sample: sample[1])
    with pytest.raises(UnsupportedError, match=r"Keep the order, or use staleness=0"):
        InOrder(by_length)(in_order)  # in this batch nothing moves, in others it would


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stale_losses_are_never_paired_with_other_samples(workers):
    def backwards(samples):
        return default_collate(sorted(samples, key=lambda sample: -sample[2]))

    data = DataLoader(Indexed(images(40)), 8, shuffle=True, collate_fn=backwards, num_workers=workers)
    module = Noting()
    with pytest.raises(UnsupportedError, match="a stale loss would belong to another sample"):
        trained(module=module, batches=data, staleness=1)
    assert module.losses == []
    trained(module=module, batches=data)


def with_mask(samples):
    return torch.tensor(samples), torch.ones(4, 4)


def test_first_batches_show_their_layout():
    collate = WithSamples(with_mask, torch.zeros(()), joins=False, looks=True)
    found = [collate([1.0, 2.0, 3.0, 4.0]) for _ in range(3)]
    assert [one.layout for one in found] == [{"": None, "/0": 0, "/1": None}] * 2 + [None]
    assert all(one.samples is None for one in found)


def test_a_collate_function_that_wants_all_samples_shows_none():
    def whole(samples):
        first, second, third, fourth = samples
        return torch.tensor([first, second, third, fourth])

    assert WithSamples(whole, torch.zeros(()), joins=False, looks=True)([1.0, 2.0, 3.0, 4.0]).layout is None


def test_padding_as_long_as_there_are_samples_is_none_of_them():
    """Without the last sample, the longest, the positions are one fewer, as the samples are."""

    def with_positions(samples):
        return torch.tensor(samples), torch.arange(max(samples))[None], torch.ones(max(samples), 2)

    found = WithSamples(with_positions, torch.zeros(()), joins=False, looks=True)([1, 2, 3, 4])
    assert found.layout == {"": None, "/0": 0, "/1": None, "/2": None}
