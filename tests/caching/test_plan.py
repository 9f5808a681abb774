"""What goes to the loading side and comes back."""

import pickle

import torch
from lazies import Source, is_lazy

from lightning_egeria.caching.plan import Loaded, Mode, Plan


def test_plan_loads_plainly_by_default():
    plan = Plan(3, (5, 7))
    assert plan.mode is Mode.PLAIN
    assert pickle.loads(pickle.dumps(plan)) == plan


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
