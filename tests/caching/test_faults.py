"""Whatever happens to the cache, training is what it would have been without it."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from cached_runs import Classifier, fit, images, loader_of
from test_same_training import assert_same_training, pair
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_egeria.caching.directory import CacheDirectory
from lightning_egeria.caching.store import ENTRIES, INDEX, MANIFEST, ActivationStore, Manifest, read_manifest

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated")

FROM_THE_START = {1: 2}


class At(L.Callback):
    """Does something before one step."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step == self.step:
            self.action(pl_module)


def store_in(cache_dir):
    (folder,) = cache_dir.iterdir()
    return folder


def run_twice(cache_dir, between, warning=None):
    """Train with the cache, do something to it, train again; the second run must not notice."""
    plain, first = pair(Classifier)
    _, second = pair(Classifier)
    fit(plain, loader_of(images()), FROM_THE_START, epochs=4)
    fit(first, loader_of(images()), FROM_THE_START, {"cache_dir": cache_dir}, epochs=4)
    between(store_in(cache_dir))
    wrapped = fit(second, loader_of(images()), FROM_THE_START, {"cache_dir": cache_dir}, epochs=4)
    assert_same_training(plain, second)
    assert wrapped.stats.hits > 50
    return wrapped


def test_flipped_bits_are_misses(tmp_path):
    def flip(folder):
        data = np.memmap(folder / ENTRIES, np.uint8, "r+")
        slot = read_manifest(folder).slot_bytes
        for number in (3, 4, 5):
            data[number * slot + 500] ^= 1
        data.flush()

    wrapped = run_twice(tmp_path / "cache", flip)
    assert wrapped.stats.wrong == 3
    assert wrapped.stats.written == 3


def test_a_truncated_file_is_missing_entries(tmp_path):
    def truncate(folder):
        os.truncate(folder / ENTRIES, (folder / ENTRIES).stat().st_size // 2)

    wrapped = run_twice(tmp_path / "cache", truncate)
    assert 15 <= wrapped.stats.wrong <= 25


def test_an_entry_in_the_place_of_another_is_a_miss(tmp_path):
    def swap(folder):
        slot = read_manifest(folder).slot_bytes
        data = np.memmap(folder / ENTRIES, np.uint8, "r+")
        index = np.memmap(folder / INDEX, np.uint32, "r+")
        index[[3, 4]] = index[[4, 3]]
        part = data[: 39 * slot].reshape(39, slot)
        part[[3, 4]] = part[[4, 3]]
        data.flush()
        index.flush()

    assert run_twice(tmp_path / "cache", swap).stats.wrong == 2


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', '{"format": 1, "entries": -1}'])
def test_a_damaged_manifest_costs_the_store(tmp_path, text):
    wrapped = run_twice(tmp_path / "cache", lambda folder: (folder / MANIFEST).write_text(text))
    assert wrapped.stats.written == 40


def test_a_short_index_costs_the_entries_behind_its_end(tmp_path):
    wrapped = run_twice(tmp_path / "cache", lambda folder: os.truncate(folder / INDEX, 12))
    assert wrapped.stats.written == 37


def test_other_data_get_a_store_of_their_own(tmp_path):
    plain, second = pair(Classifier)
    _, first = pair(Classifier)
    fit(plain, loader_of(images(seed=1)), FROM_THE_START, epochs=4)
    fit(first, loader_of(images()), FROM_THE_START, {"cache_dir": tmp_path / "cache"}, epochs=4)
    wrapped = fit(second, loader_of(images(seed=1)), FROM_THE_START, {"cache_dir": tmp_path / "cache"}, epochs=4)
    assert_same_training(plain, second)
    assert wrapped.stats.written == 40


class Still(Classifier):
    """Does not learn, so that two runs on different data have the same weights."""

    def __init__(self):
        super().__init__(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def test_data_that_changed_under_the_cache_are_found(tmp_path):
    """The three samples of the fingerprint are the same; those of the batch that is examined are not."""
    changed = images()
    changed.tensors[0][1:19] += 1
    changed.tensors[0][21:39] += 1
    first, second = pair(Still)
    plain, _ = pair(Still)
    fit(plain, loader_of(changed), {1: 1}, epochs=6)
    fit(first, loader_of(images()), {1: 1}, {"cache_dir": tmp_path / "cache"}, epochs=4)
    with pytest.warns(UserWarning, match=r"what is cached of sample \d+ is not what it gives now; all .* is dropped"):
        wrapped = fit(second, loader_of(changed), {1: 1}, {"cache_dir": tmp_path / "cache"}, epochs=6)
    assert_same_training(plain, second)
    assert wrapped.stats.wrong > 0
    assert wrapped.stats.hits > 50


def test_entries_that_differ_in_the_last_bits_are_said_to(tmp_path, caplog):
    other = images()
    other.tensors[0][1:19] *= 1 + 2**-22  # those of the fingerprint are the same
    first, second = pair(Still)
    fit(first, loader_of(images()), {1: 1}, {"cache_dir": tmp_path / "cache"})
    with caplog.at_level("INFO", "lightning.pytorch"):
        wrapped = fit(second, loader_of(other), {1: 1}, {"cache_dir": tmp_path / "cache"})
    assert "the last bits depend on where in a batch a sample is, and may differ" in caplog.text
    assert wrapped.stats.off is None
    assert wrapped.stats.hits > 0


class Repaired(Dataset):
    """A few samples of which are other ones later on."""

    def __init__(self, labels=(), inputs=()):
        self.data, self.labels, self.inputs = images(), labels, inputs

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return image + (index in self.inputs), (int(label) + (index in self.labels)) % 4


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("host_bytes", [0, 10**9])
@pytest.mark.parametrize("repaired", [{"labels": (25, 33, 38)}, {"inputs": (25, 33, 38)}])
def test_samples_that_were_repaired_since_the_last_run(tmp_path, repaired, host_bytes, workers):
    plain, first = pair(Classifier)
    _, second = pair(Classifier)
    _, third = pair(Classifier)
    cache = {"cache_dir": tmp_path / "cache", "host_bytes": host_bytes}
    fit(first, DataLoader(Repaired(), 8, num_workers=workers), FROM_THE_START, cache, epochs=5)
    fit(plain, DataLoader(Repaired(**repaired), 8, num_workers=workers), FROM_THE_START, epochs=5)
    wrapped = fit(second, DataLoader(Repaired(**repaired), 8, num_workers=workers), FROM_THE_START, cache, epochs=5)
    assert_same_training(plain, second)
    assert wrapped.stats.wrong == 3
    assert wrapped.stats.written == 3
    assert wrapped.stats.not_loaded > 50  # once all are known to be right
    wrapped = fit(third, DataLoader(Repaired(**repaired), 8, num_workers=workers), FROM_THE_START, cache, epochs=5)
    assert_same_training(plain, third)
    assert wrapped.stats.wrong == wrapped.stats.written == 0


def change(pl_module):
    with torch.no_grad():
        pl_module.net.stem[0].weight.mul_(0.5)


def change_data(pl_module):
    pl_module.net.stem[0].weight.data.mul_(0.5)


def replace_data(pl_module):
    pl_module.net.stem[0].weight.data = pl_module.net.stem[0].weight.data * 0.5


def swap_all(pl_module):
    """As an exponential moving average does."""
    for parameter in pl_module.parameters():
        parameter.data.copy_(parameter.data * 0.9)


def change_statistics(pl_module):
    pl_module.net.stem[1].running_mean.add_(1.0)


@pytest.mark.parametrize("action", [change, change_data, replace_data, swap_all, change_statistics])
@pytest.mark.parametrize("workers", [0, 2])
def test_changed_weights_drop_what_was_cached(tmp_path, action, workers):
    plain, cached = pair(Classifier)
    options = {"epochs": 8, "callbacks": [At(18, action)]}
    fit(plain, loader_of(images(), num_workers=workers), {5: 2}, **options)
    cache = {"cache_dir": tmp_path / "cache"}
    with pytest.warns(UserWarning, match="the weights of frozen layers have changed; all that was cached of them is"):
        wrapped = fit(cached, loader_of(images(), num_workers=workers), {5: 2}, cache, **options)
    assert_same_training(plain, cached)
    assert wrapped.stats.written == 80
    assert wrapped.stats.hits > 80


def test_weights_that_keep_changing_end_the_cache(tmp_path):
    plain, cached = pair(Classifier)
    callbacks = [At(step, change) for step in range(10, 38, 2)]
    fit(plain, loader_of(images()), {5: 2}, epochs=8, callbacks=callbacks)
    with pytest.warns(UserWarning, match="weights of frozen layers have changed") as caught:
        wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, 8, callbacks)
    assert_same_training(plain, cached)
    assert "have changed, for the 3. time" in wrapped.stats.off
    told = [str(w.message) for w in caught if "cache" in str(w.message)]
    assert len(told) == 2  # the first time, and the last


def test_a_weight_that_changes_and_changes_back_is_none(tmp_path):
    def there_and_back(pl_module):
        with torch.no_grad():
            pl_module.net.stem[0].weight.mul_(2).div_(2)

    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, epochs=8)
    callbacks = [At(18, there_and_back)]
    wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, 8, callbacks)
    assert_same_training(plain, cached)
    assert wrapped.stats.written == 40


def test_a_full_disk_ends_the_recording(tmp_path, monkeypatch):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, epochs=6)
    written = os.pwritev
    count = iter(range(10**6))

    def until_full(*args):
        if next(count) > 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(*args)

    monkeypatch.setattr(os, "pwritev", until_full)
    with pytest.warns(UserWarning, match=r"no more outputs .* written: writing to .* failed: No space left on device"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, epochs=6)
    assert_same_training(plain, cached)
    assert 0 < wrapped.stats.written < 40
    assert wrapped.stats.hits > 20


def test_what_is_in_the_way_at_every_freeze_is_told_once(tmp_path):
    plain, cached = pair(Classifier)
    schedule = {5: 1, 10: 2, 15: 0, 20: 2}
    fit(plain, loader_of(images()), schedule, epochs=6)
    cache = {"cache_dir": tmp_path / "cache", "max_bytes": 16384}
    with pytest.warns(UserWarning, match="max_bytes=16384 is reached") as caught:
        fit(cached, loader_of(images()), schedule, cache, epochs=6)
    assert_same_training(plain, cached)
    assert len([w for w in caught if "no more outputs" in str(w.message)]) == 1


def test_max_bytes_are_of_all_stores(tmp_path):
    """Those of other runs count too, and are not removed while they are open."""
    first, second = pair(Classifier)
    fit(first, loader_of(images()), {2: 2}, {"cache_dir": tmp_path})
    other = ActivationStore(next(tmp_path.iterdir()))
    try:
        taken = CacheDirectory(tmp_path).summaries()[0].bytes_on_disk
        cache = {"cache_dir": tmp_path, "max_bytes": taken + 50_000}
        with pytest.warns(UserWarning, match="max_bytes=.* is reached"):
            wrapped = fit(second, loader_of(images(seed=1)), {2: 2}, cache)
        assert len(list(tmp_path.iterdir())) == 2
        assert 0 < wrapped.stats.written < 40
    finally:
        other.close()


def test_a_disk_that_is_too_full_is_not_filled(tmp_path):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, epochs=4)
    cache = {"cache_dir": tmp_path / "cache", "min_free_bytes": shutil.disk_usage(tmp_path).total}
    with pytest.warns(UserWarning, match="less than min_free_bytes=.* would be left on the disk"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, cache, epochs=4)
    assert_same_training(plain, cached)
    assert wrapped.stats.written == 0


def test_a_directory_that_cannot_be_made_keeps_the_cache_off(tmp_path):
    (tmp_path / "file").write_text("")
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2})
    with pytest.warns(UserWarning, match=r"cache of the frozen layers is off: the cache directory .* cannot be made"):
        fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "file" / "cache"})
    assert_same_training(plain, cached)


def test_a_directory_that_others_may_write_to_keeps_the_cache_off(tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2})
    with pytest.warns(UserWarning, match="off: others may write to the cache directory"):
        fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"})
    assert_same_training(plain, cached)


def test_a_read_only_directory_keeps_the_cache_off(tmp_path, monkeypatch):
    """The user's rights are not asked: root may write anywhere."""
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images()), {5: 2}, epochs=6)
    opened = os.open

    def read_only(path, flags, *args, **kwargs):
        if str(tmp_path / "cache") in str(path) and flags & os.O_CREAT:
            raise OSError(errno.EROFS, "Read-only file system")
        return opened(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.warns(UserWarning, match="Read-only file system. Training goes on without it"):
        wrapped = fit(cached, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, epochs=6)
    assert_same_training(plain, cached)
    assert "Read-only" in wrapped.stats.off


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [8, 27])
def test_a_directory_that_is_deleted(tmp_path, step, workers):
    plain, cached = pair(Classifier)
    fit(plain, loader_of(images(), num_workers=workers), {5: 2}, epochs=8)
    callbacks = [At(step, lambda _: shutil.rmtree(tmp_path / "cache"))]
    cache = {"cache_dir": tmp_path / "cache"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped = fit(cached, loader_of(images(), num_workers=workers), {5: 2}, cache, 8, callbacks)
    assert_same_training(plain, cached)
    told = [str(w.message) for w in caught if "no more outputs" in str(w.message)]
    assert len(told) == (step == 8)  # or all was there already, and stays readable where it is open
    assert wrapped.stats.off is None


WRITER = """
import sys, numpy as np
from pathlib import Path
from lightning_egeria.caching.store import ActivationStore, Manifest
folder = Path(sys.argv[1])
store = ActivationStore.create(folder, Manifest(folder.name, 10000, 4096, 64, "torch.float32", (0, 1), {}))
print("ready", flush=True)
for number in range(10000):
    store.write(number, np.full(4096, number % 251, np.uint8), (1024,), b"fields of %d" % number)
"""


def test_a_writer_that_is_killed_leaves_only_sound_entries(tmp_path):
    folder = tmp_path / "store"
    for delay in (0.02, 0.05, 0.1):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert process.stdout.readline() == b"ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        store = ActivationStore(folder)
        present = np.flatnonzero(store.index)
        assert len(present)
        into = np.empty(4096, np.uint8)
        for number in present:
            assert store.read(int(number), into) == (1024,)
            assert (into == number % 251).all()
            assert store.read_fields(int(number)) == b"fields of %d" % number
        store.close()


def test_half_an_entry_is_a_miss(tmp_path):
    """The power went while the pages were written: the index says that the entry is there."""
    folder = tmp_path / "store"
    store = ActivationStore.create(folder, Manifest("store", 4, 4096, 64, "torch.float32", (0, 1), {}))
    store.write(1, np.full(4096, 7, np.uint8), (1024,), b"fields")
    data = np.memmap(folder / ENTRIES, np.uint8, "r+")
    start = store.manifest.slot_bytes + 2048
    data[start : start + 1024] = 0
    data.flush()
    assert store.read(1, np.empty(4096, np.uint8)) is None
    assert store.read_fields(1) == b"fields"
    store.close()
    store = ActivationStore(folder)
    assert store.read(1, np.empty(4096, np.uint8)) is None
    store.close()


def open_files():
    return {str(file) for file in Path("/proc/self/fd").glob("*")}


def test_an_exception_leaves_nothing_open(tmp_path):
    class StoppedError(Exception):
        pass

    def stop(pl_module):
        raise StoppedError

    module, _ = pair(Classifier)
    before = open_files()
    with pytest.raises(StoppedError):
        fit(module, loader_of(images()), {5: 2}, {"cache_dir": tmp_path / "cache"}, 8, [At(18, stop)])
    assert open_files() <= before
    assert "forward" not in vars(module.net) | vars(module.net.stem[0])
