"""Batches are loaded as planned, in the worker or here."""

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from lightning_egeria.caching.loading import PlannedDataset, as_it_is
from lightning_egeria.caching.plan import Mode, Plan
from lightning_egeria.caching.record.keys import Keys
from lightning_egeria.caching.record.sending import Sent, receive
from lightning_egeria.caching.record.tape import Tape
from lightning_egeria.caching.record.tensors import LazyTensor, plain
from support.caching.lazies import is_lazy
from support.caching.parts import Samples, vectors

IDS = (4, 9, 2)


def planned(sample=lambda data, index: (data.x[index], data.y[index]), collate=default_collate):
    return PlannedDataset(Samples(sample), collate)


def received(dataset, plan):
    """The batch in the training process, after a journey from a worker."""
    loaded = pickle.loads(pickle.dumps(dataset.__getitems__(plan)))
    places = []

    def load(wanted):
        places.extend(wanted)
        return dataset.tensors(plan, wanted)

    tape = Tape(Keys(), len(plan.ids), load, lambda: None)
    return receive(loaded.batch, tape), loaded, tape, places


def test_plain_batch_is_that_of_the_collate_function():
    dataset = PlannedDataset(vectors(), default_collate)
    batch, expected = dataset.__getitems__(Plan(0, IDS)).batch, default_collate([vectors()[n] for n in IDS])
    assert all(one.equal(other) for one, other in zip(batch, expected, strict=True))


COLLATES = {
    "default": default_collate,
    "scaled": lambda samples: [default_collate(samples)[0] * 2, default_collate(samples)[1]],
    "padded": lambda samples: (
        torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True),
        torch.tensor([int(y) for _, y in samples]),
    ),
    "dictionary": lambda samples: {"x": torch.stack([x for x, _ in samples]), "n": len(samples)},
    "sorted": lambda samples: default_collate(sorted(samples, key=lambda sample: int(sample[1]))),
    "cast": lambda samples: torch.stack([x for x, _ in samples]).double(),
}


@pytest.mark.parametrize("collate", COLLATES.values(), ids=COLLATES)
def test_followed_batch_has_the_values_of_a_plain_one(collate):
    dataset = planned(collate=collate)
    batch, loaded, _, places = received(dataset, Plan(0, IDS, mode=Mode.PROBE))
    wanted = collate([vectors()[index] for index in IDS])
    for one, other in zip(torch.utils._pytree.tree_leaves(batch), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert plain(one).equal(other) if isinstance(one, torch.Tensor) else one == other
    assert places == []
    assert loaded.drew is None
    assert len(loaded.fields) == 3


def test_input_is_lazy_and_labels_are_plain():
    batch, *_ = received(planned(), Plan(0, IDS, mode=Mode.FOLLOWED, inputs=(0,)))
    assert isinstance(batch[0], LazyTensor)
    assert type(batch[1]) is torch.Tensor


def _noise(data, index):
    return data.x[index] + torch.rand(8), data.y[index]


def _numpy_noise(data, index):
    return data.x[index] + np.random.rand(), data.y[index]


def _counts(data, index):
    data.count += 1
    return data.x[index], data.y[index]


@pytest.mark.parametrize(
    ("sample", "drew"),
    [
        (_noise, "a global random generator"),
        (_numpy_noise, "a global random generator"),
        (_counts, "the dataset's attribute 'count'"),
        (lambda data, index: (data.x[index], index), None),
    ],
)
def test_draws_and_counters_are_seen(sample, drew):
    dataset = planned(sample)
    dataset.dataset.count = 0
    assert dataset.__getitems__(Plan(0, IDS, mode=Mode.PROBE)).drew == drew


def test_seeds_decide_all_randomness():
    dataset = planned(lambda data, index: data.x[index] + torch.rand(()) + np.random.rand())
    state = torch.get_rng_state()
    first, again, other = (dataset.fetch([1, 2], seeds) for seeds in ((7, 8), (7, 8), (7, 9)))
    assert torch.get_rng_state().equal(state)
    assert first[0].equal(again[0])
    assert first[1].equal(again[1])
    assert first[0].equal(other[0])
    assert not first[1].equal(other[1])


def test_tensors_are_loaded_without_a_draw():
    dataset = planned(_noise)
    state = torch.get_rng_state()
    (label,) = dataset.tensors(Plan(0, IDS), [(1, 1)])
    assert label.equal(vectors()[9][1])
    assert torch.get_rng_state().equal(state)


def test_samples_of_several_structures_are_loaded_plainly():
    dataset = planned(lambda data, index: data.x[index] if index == 9 else (data.x[index],), collate=as_it_is)
    loaded = dataset.__getitems__(Plan(0, IDS, mode=Mode.PROBE))
    assert loaded.plan.mode is Mode.PLAIN
    assert not any(isinstance(leaf, LazyTensor | Sent) for leaf in torch.utils._pytree.tree_leaves(loaded.batch))


def test_whole_batches_are_fetched_at_once():
    class Whole(Samples):
        def __getitems__(self, indices):
            return [(self.x[index], self.y[index]) for index in indices]

    dataset = PlannedDataset(Whole(None), default_collate)
    assert dataset.__getitems__(Plan(0, IDS)).batch[1].equal(vectors()[list(IDS)][1])


def test_sample_that_is_not_stored_is_loaded():
    """The folder of the store is gone."""
    plan = Plan(0, IDS, mode=Mode.FOLLOWED, inputs=(0,), structure=(None, None), entries=IDS)
    plan = dataclasses.replace(plan, stores=(), stored=(-1,) * 3, stamps=(0,) * 3)
    batch, loaded, _, places = received(planned(), plan)
    assert loaded.lazy == (False,) * 3
    assert batch[0].mean().equal(vectors()[list(IDS)][0].mean())
    assert places == []
    assert not is_lazy(batch[0])
