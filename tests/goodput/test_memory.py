"""A larger batch is tried, and nothing remains of it."""

import copy

import pytest
import torch

from lightning_egeria.core.snapshots.random_state import RandomState
from lightning_egeria.errors import RowsError
from lightning_egeria.methods.goodput.memory import enlarged, fits_in_memory, run_in_halves
from support.models import After, Classifier, ConvNet, fit, images, loader


class Failing(Classifier):
    largest = 20
    error = torch.OutOfMemoryError("out of memory")

    def training_step(self, batch, batch_idx):
        if len(batch[0]) > self.largest:
            raise self.error
        return super().training_step(batch, batch_idx)


def test_a_trial_leaves_no_trace():
    torch.manual_seed(0)
    module, found = Failing(ConvNet()), []
    batch = (torch.randn(8, 1, 8, 8), torch.arange(8) % 3)

    def look(trainer, _):
        before = copy.deepcopy(module.state_dict()), RandomState.current(), list(module.losses)
        gradients = [p.grad.clone() for p in module.parameters()]
        for size in (20, 21):
            found.append(fits_in_memory(trainer, enlarged(batch, 8, size), 0))
        assert all(torch.equal(value, before[0][name]) for name, value in module.state_dict().items())
        assert all(torch.equal(p.grad, kept) for p, kept in zip(module.parameters(), gradients, strict=True))
        assert (RandomState.current(), list(module.losses)) == before[1:]

    fit(module, After(look, 2), data=loader(images(40)), epochs=1)
    assert found == [True, False]


def test_another_error_says_nothing_of_memory():
    module, found = Failing(ConvNet()), []
    module.error = ValueError("not this size")

    def look(trainer, _):
        found.append(fits_in_memory(trainer, (torch.randn(21, 1, 8, 8), torch.arange(21) % 3), 0))

    fit(module, After(look, 1), epochs=1)
    assert found == [module.error]


def test_batches_of_any_structure_are_enlarged():
    batch = {"a": torch.arange(4).view(2, 2), "b": [torch.tensor([5, 6])], "text": "kept", "one": torch.tensor(3)}
    larger = enlarged(batch, 2, 5)
    assert larger["a"].tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]
    assert larger["b"][0].tolist() == [5, 6, 5, 6, 5]
    assert (larger["text"], int(larger["one"])) == ("kept", 3)
    names = {"rows": torch.zeros(2, 1), "names": ["a", "b"], "pairs": [("c", "d")]}
    larger = enlarged(names, 2, 3)
    assert (larger["names"], larger["pairs"]) == (["a", "b", "a"], [("c", "d", "c")])
    assert enlarged({"text": ["a", "b"]}, 2, 3) == {"text": ["a", "b", "a"]}
    with pytest.raises(RowsError):
        enlarged({"text": "none"}, 2, 5)


def test_halves_have_the_gradients_of_their_samples():
    torch.manual_seed(0)
    module, found = Classifier(ConvNet(dropout=0)), []
    batch = (torch.randn(8, 1, 8, 8), torch.arange(8) % 3)

    def look(trainer, _):
        weights = copy.deepcopy(module.state_dict())
        halves = run_in_halves(trainer, batch, 8, 0)
        assert halves.ended > halves.began
        for gradients, part in ((halves.first, slice(4)), (halves.second, slice(4, 8))):
            twin = Classifier(ConvNet(dropout=0))
            twin.load_state_dict(weights)
            twin.training_step((batch[0][part], batch[1][part]), 0).backward()
            pairs = zip(module.parameters(), twin.parameters(), strict=True)
            found.append(all(torch.equal(gradients[ours], other.grad) for ours, other in pairs))
        assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())

    fit(module, After(look, 2), epochs=1)
    assert found == [True, True]
