"""Jobs that share a device step by step."""

import fcntl
import itertools
import multiprocessing
import time

import lightning as L
import pytest

from lightning_egeria import DeviceTurns
from lightning_egeria.errors import ArgumentError
from support.models import Classifier, equal, fit


class Log(L.Callback):
    """Adds a line to a file at the start of each batch, or at its end."""

    def __init__(self, path, start=None, end=None):
        self.path, self.start, self.end = path, start, end

    def on_train_batch_start(self, *args):
        if self.start is not None:
            self.write(self.start)
            time.sleep(0.02)

    def on_train_batch_end(self, *args):
        if self.end is not None:
            self.write(self.end)

    def write(self, line):
        with self.path.open("a") as file:
            file.write(f"{line}\n")


def job(name, folder, ready):
    log = folder / "log"
    ready.wait()
    # Callbacks are called in order: both lines are written while the job has its turn.
    fit(Classifier(), Log(log, end=f"end {name}"), DeviceTurns(folder / "device"), Log(log, start=f"start {name}"))


@pytest.mark.slow
def test_two_jobs_take_turns(tmp_path):
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(2)
    jobs = [context.Process(target=job, args=(name, tmp_path, ready)) for name in ("a", "b")]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join(120)
        assert one.exitcode == 0
        one.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 60
    names = [line.split()[1] for line in lines[::2]]
    for start, end, name in zip(lines[::2], lines[1::2], names, strict=True):
        assert (start, end) == (f"start {name}", f"end {name}")
    # From when the second one has come until the first one has gone, they alternate.
    other = "b" if names[0] == "a" else "a"
    both = names[names.index(other) : len(names) - names[::-1].index(names[0])]
    repeated = sum(first == second for first, second in itertools.pairwise(both))
    assert repeated <= len(both) // 4


def test_training_is_the_same(tmp_path):
    plain, shared = Classifier(), Classifier()
    fit(plain)
    fit(shared, DeviceTurns(tmp_path / "device"))
    assert shared.losses == plain.losses
    assert equal(shared, plain)


def assert_free(path):
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class Fails(Classifier):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("it fails")
        return super().training_step(batch, batch_idx)


def test_a_failed_job_leaves_the_device(tmp_path):
    turns = DeviceTurns(tmp_path / "device")
    with pytest.raises(RuntimeError, match="it fails"):
        fit(Fails(), turns)
    for name in ("device", "device.queue"):
        assert_free(tmp_path / name)
    fit(Classifier(), turns)
    assert_free(tmp_path / "device")


@pytest.mark.parametrize("path", [None, 3, "."])
def test_a_path_that_is_no_file_is_named(path):
    with pytest.raises(ArgumentError, match="path must be that of a file"):
        DeviceTurns(path)
