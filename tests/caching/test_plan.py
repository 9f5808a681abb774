"""What goes to the loading side and comes back."""

import pickle

import pytest
import torch
from lazies import Source, is_lazy

from lightning_egeria.caching.plan import Loaded, Mode, Plan, Sent, operation


def test_plan_loads_plainly_by_default():
    plan = Plan(3, (5, 7))
    assert plan.mode is Mode.PLAIN
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_what_is_sent_can_be_pickled():
    loaded = Loaded([Sent((((0, 0), None, None),), torch.ones(2))], Plan(0, (1,)))
    (sent,) = pickle.loads(pickle.dumps(loaded)).batch
    assert sent.value.equal(torch.ones(2))


@pytest.mark.parametrize("name", ["aten.stack.default", "aten.add.Tensor", "aten.constant_pad_nd.default"])
def test_operation_is_found_by_its_name(name):
    assert str(operation(name)) == name


def test_pinning_loads_nothing(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device=None: pinned.append(self) or self)
    source = Source(torch.randn(4, 2))
    known = Source(torch.randn(4, 2)).batch()
    known.node.compute()
    loaded = Loaded({"x": source.batch(), "y": torch.ones(3), "known": known, "text": "a"}, Plan(0, ()))
    assert loaded.pin_memory() is loaded
    assert is_lazy(loaded.batch["x"])
    assert source.loaded == []
    assert [tuple(one.shape) for one in pinned] == [(3,), (4, 2)]
