"""Searches beside the cache of the frozen prefix: the run without the cache, bit for bit."""

import pytest
import torch

from lightning_egeria import Choice, FrozenPrefixCache, LogUniform, PrefixFreezing
from lightning_egeria.errors import TrainingDataError
from lightning_egeria.methods.tuning.tunables import FrozenDepth
from support.methods import scripted, tuner
from support.models import Classifier, ConvNet, bright, equal, fit, loader

OPTIONS = {"first_steps": 3, "max_trials": 5}


def run(callbacks, folder=None, lr=0.05):
    torch.manual_seed(0)
    module, plain = Classifier(ConvNet(dropout=0), lr=lr), loader(bright())
    data = FrozenPrefixCache(plain, cache_dir=folder, min_free_bytes=0) if folder else plain
    fit(module, *callbacks, data=data, epochs=6)
    return module, callbacks[-1].searches, data.stats if folder else None


@pytest.mark.parametrize("at_epochs", [(0,), (0, 2)])
def test_searches_before_and_behind_a_freeze(at_epochs, tmp_path):
    def made():
        return [scripted({4: 1, 16: 2}), tuner({"lr": LogUniform(1e-3, 1)}, at_epochs=at_epochs, **OPTIONS)]

    plain, searches, _ = run(made(), lr=2e-3)
    cached, again, stats = run(made(), tmp_path, lr=2e-3)
    assert searches[0].winner
    assert [one.branches for one in again] == [one.branches for one in searches]
    assert cached.losses == plain.losses
    assert equal(cached, plain)
    assert stats.hits > 0


def test_the_frozen_depth_of_a_branch(tmp_path, monkeypatch):
    monkeypatch.setattr(FrozenDepth, "changes_cost", False)  # speeds in seconds differ from run to run

    def made():
        spaces = {"frozen_depth": Choice([0, 1, 2]), "lr": LogUniform(1e-3, 1)}
        return [PrefixFreezing(), tuner(spaces, at_epochs=(0, 2), seed=4, **OPTIONS)]

    plain, searches, _ = run(made())
    cached, again, stats = run(made(), tmp_path)
    assert [one.setting for one in again] == [one.setting for one in searches]
    assert max(one.setting["frozen_depth"] for one in searches) > 0
    assert cached.losses == plain.losses
    assert equal(cached, plain)
    assert stats.hits > 0


def test_the_batch_size_cannot_be_tuned(tmp_path):
    with pytest.raises(TrainingDataError, match="has its own way of going through the data"):
        run([PrefixFreezing(), tuner({"batch_size": Choice([4, 8])})], tmp_path)
