"""Steps that are repeated in halves: training is as without, and one device uses larger batches whole."""

import pytest
import torch

from lightning_egeria import AdaptiveBatchSize, FrozenPrefixCache
from lightning_egeria.methods.goodput.control import BatchSizeControl
from lightning_egeria.methods.goodput.profile import Profile
from support.goodput import SavesAfter, Seeing, adaptive, numbered, own_generator, trained
from support.methods import scripted
from support.models import Classifier, ConvNet, equal, fit, loader


@pytest.fixture
def without_halves(monkeypatch):
    """Turn repeating off."""

    def turn_off():
        monkeypatch.setattr(BatchSizeControl, "repeats", lambda *_: 0)

    return turn_off


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}])
def test_training_is_that_without_them(optimizer, options, without_halves):
    runs = []
    for repeats in (True, False):
        if not repeats:
            without_halves()
        torch.manual_seed(0)
        module = Classifier(ConvNet(), optimizer=optimizer)  # dropout and running statistics
        data = AdaptiveBatchSize(loader(), 16, batch_sizes={4: 16}, learning_rate="none")
        fit(module, data=data, epochs=8, **options)
        runs.append(module)
        assert (data.control.noise.estimates > 3) == repeats
        assert not data.control.noise.biased
    assert runs[0].losses == runs[1].losses
    assert equal(*runs)


def test_so_it_is_beside_freezing_and_the_cache(without_halves):
    runs, hits = [], []
    for repeats, cached in ((True, True), (True, False), (False, False)):
        if not repeats:
            without_halves()
        torch.manual_seed(0)
        module = Classifier(ConvNet(dropout=0))
        data = AdaptiveBatchSize(loader(), 16, batch_sizes={4: 16}, learning_rate="none")
        around = FrozenPrefixCache(data, min_free_bytes=0) if cached else data
        fit(module, scripted({6: 1}), data=around, epochs=6)
        runs.append(module)
        hits.append(around.stats.hits if cached else 0)
        assert (data.control.noise.estimates > 3) == repeats
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert equal(runs[0], runs[1])
    assert equal(runs[1], runs[2])
    assert hits[0] > 40


def test_resumed_it_is_the_same(tmp_path):
    def data():
        return adaptive(numbered(**own_generator()), batch_sizes={3: 16})

    first, second = data(), data()
    whole, _ = trained(first, SavesAfter(tmp_path / "one", 9), epochs=3)
    resumed, _ = trained(second, epochs=3, ckpt_path=tmp_path / "one")
    assert resumed.losses == whole.losses[-len(resumed.losses) :]
    assert equal(resumed, whole)
    assert second.control.noise.state() == first.control.noise.state()


def test_where_steps_cost_the_same_a_larger_batch_comes_whole(monkeypatch):
    add = Profile.add
    monkeypatch.setattr(
        Profile, "add", lambda self, where, _, *rest, **more: add(self, where, 1 + 1e-6 * where.local, *rest, **more)
    )
    data = adaptive(numbered(160), change_every_n_steps=10)
    trained(data, epochs=4)
    assert [(change.local > 8, change.batches) for change in data.changes[:1]] == [(True, 1)]
    assert data.control.noise.biased is False


class Narrow(Seeing):
    """That takes no small batches later on."""

    def training_step(self, batch, batch_idx):
        if self.global_step > 4 and len(batch[0]) < 16:
            raise RuntimeError("not this size")
        return super().training_step(batch, batch_idx)


def test_where_halves_cannot_run_training_goes_on():
    data, module = adaptive(numbered(160), batch_sizes={2: 16}), Narrow()
    with pytest.warns(UserWarning, match="half of a batch could not be run .*: RuntimeError: not this size"):
        trained(data, module=module)
    assert data.control.halves is False
    assert len(module.losses) > 10
