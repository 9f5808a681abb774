"""Hooks of the user that read or change a batch: its inputs must be there."""

import functools
import inspect
from unittest import mock

import lightning as L
import pytest
import torch
from cached_runs import Classifier, fit, images, loader_of
from lightning.pytorch import callbacks
from lightning.pytorch.utilities import rank_zero_only
from test_same_training import assert_same_training, pair

from lightning_egeria import KnowledgeGuidedFreezing, RunRecorder
from lightning_egeria.caching.hooks import uses_argument

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

USE_BATCHES = {"SpikeDetection", "ThroughputMonitor"}
SHIPPED = [kind for _, kind in inspect.getmembers(callbacks, inspect.isclass) if issubclass(kind, L.Callback)]


@pytest.mark.parametrize("kind", [*SHIPPED, KnowledgeGuidedFreezing, RunRecorder])
def test_which_callbacks_use_batches(kind):
    callback = object.__new__(kind)
    assert not uses_argument(callback, "on_train_batch_start", 2)
    assert uses_argument(callback, "on_train_batch_end", 3) == (kind.__name__ in USE_BATCHES)


class Hooks:
    def none(self, outputs, batch, batch_idx):
        return outputs, batch_idx

    def none_of_them(self, *_):
        pass

    def other_name(self, o, b, i):
        return b

    def in_closure(self, outputs, batch, batch_idx):
        return lambda: batch

    def in_comprehension(self, outputs, batch, batch_idx):
        return [batch[0] for _ in range(batch_idx)]

    def all_of_them(self, *arguments):
        return len(arguments)

    def by_name_only(self, *, batch=None):
        return batch

    @rank_zero_only
    @torch.no_grad()
    def decorated(self, outputs, batch, batch_idx):
        return batch

    @rank_zero_only
    def decorated_none(self, outputs, batch, batch_idx):
        return outputs

    @functools.cache  # noqa: B019 - it has no code
    def opaque(self, outputs, batch, batch_idx):
        pass

    no_code = mock.Mock()


USED = {"other_name", "in_closure", "in_comprehension", "all_of_them", "decorated", "opaque", "no_code"}


@pytest.mark.parametrize("name", [name for name in vars(Hooks) if not name.startswith("_")])
def test_what_counts_as_use(name):
    assert uses_argument(Hooks(), name, 1) == (name in USED)


class Child(Hooks):
    def none(self, outputs, batch, batch_idx):
        self.calls = 1
        return super().none(outputs, batch, batch_idx)

    def other_name(self, *arguments):
        return super().other_name(*arguments)

    def none_of_them(self, outputs, batch, batch_idx):
        return batch, super().none_of_them(outputs, batch, batch_idx)


def test_what_is_handed_to_the_parent_is_used_there_or_not():
    used = {name: uses_argument(Child(), name, 1) for name in ("none", "other_name", "none_of_them")}
    assert used == {"none": False, "other_name": True, "none_of_them": True}


def test_a_callback_made_of_functions():
    assert uses_argument(callbacks.LambdaCallback(on_train_batch_end=lambda t, m, o, b, i: b), "on_train_batch_end", 3)
    unused = callbacks.LambdaCallback(on_train_batch_end=lambda t, m, o, b, i: i)
    assert not uses_argument(unused, "on_train_batch_end", 3)


class Means(Classifier):
    """Follows the mean of the input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.mean.mul_(0.9).add_(0.1 * batch[0].mean((0, 2, 3)))


class MeansBefore(L.Callback):
    def __init__(self):
        self.means = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.means.append(float(batch[0].mean()))


def test_a_hook_that_reads_the_input_finds_it(tmp_path, caplog):
    plain, cached = pair(Means)
    fit(plain, loader_of(images()), {5: 2})
    with caplog.at_level("INFO", "lightning.pytorch"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"})
    assert_same_training(plain, cached)  # the buffer included
    assert wrapped.stats.hits > 40
    assert wrapped.stats.not_loaded == 0
    assert "inputs are loaded all the same (Means.on_train_batch_end uses them)" in caplog.text


def test_a_callback_that_reads_the_input_finds_it(tmp_path, caplog):
    plain, cached = pair(Classifier)
    means = MeansBefore(), MeansBefore()
    fit(plain, loader_of(images()), {5: 2}, callbacks=means[:1])
    with caplog.at_level("INFO", "lightning.pytorch"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, callbacks=means[1:])
    assert_same_training(plain, cached)
    assert means[0].means == means[1].means
    assert wrapped.stats.hits > 40
    assert "inputs are loaded all the same (MeansBefore.on_train_batch_start uses them)" in caplog.text


class ChangesTheBatch(L.Callback):
    """In place, before the network is called."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= 12:
            batch[0].mul_(2)


def test_a_callback_that_changes_the_input_later_ends_the_cache(tmp_path):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, callbacks=[ChangesTheBatch()])
    with pytest.warns(UserWarning, match="off: the network was not given what the data loader gave"):
        fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, callbacks=[ChangesTheBatch()])
    assert_same_training(plain, cached)
