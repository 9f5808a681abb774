"""Damage that is counted, writers that are killed, and errors that leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_egeria.caching.store.manifest import ENTRIES, INDEX, MANIFEST, Manifest, read_manifest
from lightning_egeria.caching.store.store import ActivationStore
from support.caching.harness import Run
from support.caching.parts import Chain, Classifier, ConvNet, Validated, at, images, loader


def damaged_run(compare, damage):
    """Train twice from one start; between the runs, ``damage`` gets the folder of the store. Return the statistics."""

    def program(run):
        for number in range(2):
            torch.manual_seed(0)
            run.fit(Classifier(ConvNet()), loader(images()), cache={"host_bytes": 0}, schedule={1: 2}, max_epochs=5)
            if run.cached and not number:
                (folder,) = run.cache_dir.iterdir()
                damage(folder)

    return compare(program).caches[-1].stats


def _flip(folder):
    data = np.memmap(folder / ENTRIES, np.uint8, "r+")
    slot = read_manifest(folder).slot_bytes
    for number in (3, 4, 5):
        data[number * slot + slot - 70] ^= 1
    data.flush()


def _truncate(folder):
    os.truncate(folder / ENTRIES, (folder / ENTRIES).stat().st_size // 2)


def _swap(folder):
    slot = read_manifest(folder).slot_bytes
    data = np.memmap(folder / ENTRIES, np.uint8, "r+")
    index = np.memmap(folder / INDEX, np.uint32, "r+")
    index[[3, 4]] = index[[4, 3]]
    part = data[: 23 * slot].reshape(23, slot)
    part[[3, 4]] = part[[4, 3]]
    data.flush()
    index.flush()


def _text(text):
    return lambda folder: (folder / MANIFEST).write_text(text)


DAMAGE = {
    "flipped bits": (_flip, range(3, 4)),
    "truncated file": (_truncate, range(10, 15)),
    "entries in the place of others": (_swap, range(2, 3)),
    "short index": (lambda folder: os.truncate(folder / INDEX, 12), range(21, 22)),
    "empty manifest": (_text(""), range(24, 25)),
    "manifest of another format": (_text('{"format": 99}'), range(24, 25)),
    "manifest that cannot be": (_text('{"format": 3, "entries": -1}'), range(24, 25)),
}


@pytest.mark.parametrize(("damage", "written"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_entries_are_written_anew(compare, damage, written):
    found = damaged_run(compare, damage)
    assert found.written in written
    assert found.off is None


WRITER = """
import sys, numpy as np
from pathlib import Path
from lightning_egeria.caching.store.manifest import Manifest
from lightning_egeria.caching.store.store import ActivationStore
folder = Path(sys.argv[1])
store = ActivationStore.create(folder, Manifest(folder.name, 10000, 4096, 64, "torch.float32", (0, 1), {}))
print("ready", flush=True)
for number in range(10000):
    store.write(number, np.full(4096, number % 251, np.uint8), (1024,), b"fields of %d" % number)
"""


def test_killed_writer_leaves_only_sound_entries(tmp_path):
    folder = tmp_path / "store"
    for delay in (0.02, 0.1):
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


def test_exception_leaves_nothing_open(tmp_path):
    def stop(trainer, module):
        raise ZeroDivisionError

    module, run = Classifier(), Run(True, tmp_path / "run")
    before = open_files()
    with pytest.raises(ZeroDivisionError):
        run.fit(module, None, at(10, stop), max_epochs=4)
    assert open_files() <= before
    assert "forward" not in vars(module.net.a) | vars(module.net.a[0])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_leaves_no_entries(tmp_path, monkeypatch, error, workers):
    """Though workers may have stores open."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    module, run, stored = Validated(), Run(True, tmp_path / "run"), []

    def stop(trainer, module):
        stored.extend((tmp_path / "home").rglob(ENTRIES))
        raise error

    val, cache = loader(shuffle=False, num_workers=workers), {"cache_dir": None}
    with pytest.raises((error, SystemExit)):
        run.fit(
            module,
            loader(num_workers=workers),
            at(14, stop),
            val=val,
            max_epochs=4,
            num_sanity_val_steps=2,
            cache=cache,
        )
    assert stored
    assert not [*(tmp_path / "home").rglob(ENTRIES)]


def test_an_error_of_a_frozen_layer_leaves_nothing(tmp_path, monkeypatch):
    """The batch that has it raises it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))

    class Embedding(Classifier):
        def __init__(self):
            super().__init__(Chain(torch.nn.Sequential(torch.nn.Embedding(24, 8), torch.nn.Flatten(1))))

    ids = torch.arange(24)[:, None]
    module, run = Embedding(), Run(True, tmp_path / "run")

    def spoil(trainer, module):
        ids[20] = 99

    data = torch.utils.data.TensorDataset(ids, torch.zeros(24, dtype=torch.int64))
    with pytest.raises(IndexError, match="out of range"):
        run.fit(module, loader(data, shuffle=False), at(2, spoil), cache={"cache_dir": None}, schedule={1: 1})
    assert not [*(tmp_path / "home").rglob(ENTRIES)]


ENDS_BADLY = """
import sys
from pathlib import Path
from support.caching.harness import Run
from support.caching.parts import Classifier, at, on
from lightning_egeria.caching.store.manifest import ENTRIES

def stop(trainer, module):
    raise ZeroDivisionError

def fails(*args):
    print(len([*Path(sys.argv[1]).rglob(ENTRIES)]))
    raise ValueError

run = Run(True, Path(sys.argv[1]) / "run")
run.fit(Classifier(), None, on(on_exception=fails), at(14, stop), max_epochs=4, cache={"cache_dir": None})
"""


@pytest.mark.slow
def test_an_error_in_on_exception_leaves_no_entries(tmp_path):
    """Lightning ends nothing then."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", ENDS_BADLY, str(tmp_path)], env=environment, capture_output=True, text=True
    )
    assert "ValueError" in done.stderr
    assert int(done.stdout.split()[-1]) > 0
    assert not [*tmp_path.rglob(ENTRIES)]
