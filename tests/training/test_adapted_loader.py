"""Places in an epoch, for a checkpoint."""

import itertools

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from support.goodput import Seeing, numbered, own_generator
from support.models import trainer_of


@pytest.fixture
def adapt():
    trainer = trainer_of()
    trainer.strategy._lightning_module = Seeing()
    told = []

    def adapted(data, **changes):
        for name, value in changes.items():
            setattr(trainer, name, value)
        return AdaptedLoader(data, trainer, told.append)

    adapted.told = told
    return adapted


def drawn(adapted, count):
    batches = iter(adapted.loader.batch_sampler)
    return [next(batches) for _ in range(count)]


def test_the_users_loader_stays_as_it_is(adapt):
    data = numbered()
    before = data.batch_sampler
    adapted = adapt(data)
    adapted.batches.change(4)
    assert data.batch_sampler is before
    assert len(data) == 10
    assert len(adapted.loader) == 20
    assert adapted.samples == 80
    assert type(adapted.loader) is DataLoader


@pytest.mark.parametrize(("limit", "batches"), [(3, 3), (0.5, 5), (1.0, 10), (200, 10), (0, 0)])
def test_a_limit_on_batches_is_one_on_samples(limit, batches, adapt):
    adapted = adapt(numbered(), limit_train_batches=limit)
    assert len(adapted.batches) == batches
    adapted.batches.change(4)
    assert len(adapted.batches) == 2 * batches


@pytest.mark.parametrize("samples", [80, 75])
def test_a_place_is_found_again(samples, adapt):
    first = adapt(numbered(samples, **own_generator()))
    before = drawn(first, 10)
    state = first.state(3)
    assert not state["place"]["over"]
    assert adapt(numbered(samples, **own_generator())).state(3)["place"] is None  # nothing drawn
    second = adapt(numbered(samples, **own_generator()))
    second.resume(state)
    assert len(second.batches) == 10
    assert drawn(second, 7) == before[3:]
    assert second.state(5)["place"]["sizes"] == [8] * 5
    assert second.state(5)["place"]["digest"] != state["place"]["digest"]
    assert drawn(second, 3) == drawn(first, 3)  # the next epoch
    assert adapt.told == []


def test_an_epoch_that_is_over_begins_the_next(adapt):
    first = adapt(numbered(**own_generator()))
    drawn(first, 10)
    state = first.state(10)
    assert state["place"]["over"]
    second = adapt(numbered(**own_generator()))
    second.resume(state)
    assert drawn(second, 10) == drawn(first, 10)


def test_another_order_begins_again(adapt):
    first = adapt(numbered(**own_generator()))
    drawn(first, 4)
    state = first.state(2)
    second = adapt(numbered(shuffle=True, generator=torch.Generator().manual_seed(7)))
    state["place"]["digest"] = "other"
    second.resume(state)
    assert "cannot be repeated" in adapt.told[0]
    assert len(second.batches) == 2 + 10
    assert sorted(itertools.chain.from_iterable(drawn(second, 10))) == list(range(80))
    assert second.state(4)["place"]["batches"] == 2
