"""Directories: shared by two runs, damaged, read-only, full, or none given."""

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
import textwrap

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

from support.caching.parts import SAMPLES, Classifier, Stepping, Validated, at, data_of, grid, loader, on, vectors


class SameFront(Classifier):
    """The first two steps have a learning rate of 0, so all runs from one seed freeze the same front."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step > 1))
        return [optimizer], [{"scheduler": warm_up, "interval": "step"}]


class Labelled(Dataset):
    """The same inputs, and labels by ``shift``; some samples may differ."""

    def __init__(self, shift=0, changed=(), same=()):
        self.x, self.y = (part.clone() for part in vectors().tensors)
        self.y = torch.where(torch.isin(torch.arange(SAMPLES), torch.tensor(same)), self.y, (self.y + shift) % 3)
        self.x[list(changed)] *= -3

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return self.x[index], self.y[index]


# What the second run has that the first had not. Samples 0, 12 and 23 are the same.
SAME = (0, 12, 23)
OTHERS = {
    "labels": lambda: Labelled(shift=1),
    "most labels": lambda: Labelled(shift=1, same=SAME),
    "one input": lambda: Labelled(changed=(7,)),
    "most inputs": lambda: Labelled(changed=range(1, 12)),
    "order": lambda: torch.utils.data.Subset(Labelled(), list(range(SAMPLES))[::-1]),
    "fold": lambda: torch.utils.data.Subset(Labelled(), [0, *range(3, 24)]),
    "more samples": lambda: TensorDataset(*vectors(40).tensors),
    "another type": lambda: TensorDataset(vectors().tensors[0] * 2, vectors().tensors[1]),
    "nothing": Labelled,
}


def _note_batches(run):
    return on(on_train_batch_end=lambda *args: run.note(args[-2][1]))


@pytest.mark.parametrize(("other", "reads", "host_bytes"), grid(OTHERS, [False, True], [0, 10**9], every=11))
def test_second_run_in_one_directory(compare, other, reads, host_bytes):
    """One run after another, with the same front: the second must not train on what the first one saw."""

    def program(run):
        for data in (Labelled(), other()):
            L.seed_everything(0, verbose=False)
            look = on(on_train_batch_end=lambda *args: run.note(args[-2][0].mean()) if reads else None)
            run.fit(SameFront(), loader(data), look, _note_batches(run), cache={"host_bytes": host_bytes})

    compare(program)


@pytest.mark.parametrize("other", grid(["labels", "most labels", "one input", "nothing"], every=4))
def test_another_run_writes_meanwhile(compare, other):
    """A second run begins, in one directory, in the middle of the first one."""

    def program(run):
        def nested(trainer, module):
            if trainer.current_epoch == 1:
                states = torch.get_rng_state()
                L.seed_everything(0, verbose=False)
                run.fit(SameFront(), loader(OTHERS[other]()), cache={"host_bytes": 0})
                torch.set_rng_state(states)

        L.seed_everything(0, verbose=False)
        run.fit(SameFront(), loader(Labelled()), on(on_train_epoch_end=nested), cache={"host_bytes": 0}, max_epochs=4)

    compare(program)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["labels", "most labels"])
def test_another_process_writes_meanwhile(compare, other):
    def program(run):
        def nested(trainer, module):
            if trainer.current_epoch == 1 and run.cached:
                code = textwrap.dedent(f"""
                    from pathlib import Path
                    from support.caching import harness
                    from tests.caching.programs import test_directories as d
                    import lightning as L
                    run = harness.Run(True, Path({str(run.folder / "process")!r}))
                    run.cache_dir = Path({str(run.cache_dir)!r})
                    L.seed_everything(0, verbose=False)
                    run.fit(d.SameFront(), d.loader(d.OTHERS[{other!r}]()), cache={{"host_bytes": 0}})
                """)
                env = {"PYTHONPATH": ":".join(sys.path)}
                subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=env, capture_output=True)

        L.seed_everything(0, verbose=False)
        run.fit(SameFront(), loader(Labelled()), on(on_train_epoch_end=nested), cache={"host_bytes": 0}, max_epochs=4)

    compare(program)


# Damage, by somebody else, while the run reads.
def _files(run):
    return [path for path in sorted(run.cache_dir.rglob("*")) if path.is_file()] if run.cached else []


def _overwrite(value):
    def damage(run):
        for path in _files(run):
            with contextlib.suppress(OSError):
                content = bytearray(path.read_bytes())
                content[len(content) // 3 : len(content) // 3 + 40] = value * 40
                path.write_bytes(content)

    return damage


def _each(action):
    def damage(run):
        for path in _files(run):
            with contextlib.suppress(OSError):
                action(path)

    return damage


def _remove_all(run):
    if run.cached:
        shutil.rmtree(run.cache_dir, ignore_errors=True)


def _swap_entries(run):
    """Two blocks of each file change places: sound bytes at the wrong place."""
    for path in _files(run):
        content = path.read_bytes()
        half = len(content) // 2
        path.write_bytes(content[half:] + content[:half])


DAMAGE = {
    "zeros": _overwrite(b"\0"),
    "ones": _overwrite(b"\xff"),
    "noise": _overwrite(b"\x5a"),
    "truncated": _each(lambda path: os.truncate(path, path.stat().st_size // 2)),
    "emptied": _each(lambda path: path.write_bytes(b"")),
    "appended": _each(lambda path: path.write_bytes(path.read_bytes() + b"more")),
    "unlinked": _each(lambda path: path.unlink()),
    "replaced by folders": _each(lambda path: (path.unlink(), path.mkdir())),
    "directory removed": _remove_all,
    "swapped": _swap_entries,
}


@pytest.mark.parametrize(("damage", "moment"), grid(DAMAGE, ["in mid-run", "between runs"], every=7))
def test_damaged_directory(compare, damage, moment):
    cache = {"host_bytes": 0}

    def program(run):
        spoil = at(10, lambda *_: damage(run))
        run.fit(SameFront(), loader(), *([spoil] if moment == "in mid-run" else []), cache=cache, max_epochs=5)
        damage(run)
        L.seed_everything(0, verbose=False)
        run.fit(SameFront(), loader(), cache=cache, max_epochs=5)

    compare(program, served=None)


def _unusable(kind):
    def prepare(run):
        if not run.cached:
            return {}
        if kind == "a file":
            run.cache_dir.write_text("no folder")
        if kind == "below a file":
            (run.folder / "file").write_text("no folder")
            return {"cache_dir": run.folder / "file" / "cache"}
        if kind == "writable by all":
            run.cache_dir.mkdir()
            run.cache_dir.chmod(0o777)
        if kind == "a link to nowhere":
            run.cache_dir.symlink_to(run.folder / "nowhere" / "at all")
        if kind == "no proc":
            return {"cache_dir": "/proc/egeria"}
        if kind == "no room":
            return {"max_bytes": 0}
        if kind == "little room":
            return {"max_bytes": 1500}
        if kind == "little memory":
            return {"host_bytes": 100}
        if kind == "nothing may stay free":
            return {"min_free_bytes": 10**18}
        return {}

    return prepare


KINDS = ["a file", "no room", "a link to nowhere", "little room", "no proc", "little memory", "below a file"]
KINDS += ["nothing may stay free"]


@pytest.mark.parametrize("kind", grid(KINDS, every=2))
def test_directory_that_cannot_be_used(compare, kind):
    compare(lambda run: run.fit(Validated(), val=loader(), cache=_unusable(kind)(run)), served=None)


def test_no_directory_is_given(compare, tmp_path, monkeypatch):
    """The default directory holds nothing after the fit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    compare(lambda run: run.fit(Classifier(), cache={"cache_dir": None}))
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []


def test_no_directory_and_data_that_grow(compare, tmp_path, monkeypatch):
    """Each epoch has more samples, and so another store; none is left."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))

    def program(run):
        sizes = itertools.count(12, 6)
        data = data_of(train_dataloader=lambda: loader(vectors(next(sizes))))
        run.fit(Classifier(), data, cache={"cache_dir": None}, reload_dataloaders_every_n_epochs=1, max_epochs=4)

    compare(program, served=None)
    assert [path for path in (tmp_path / "home").rglob("*") if path.is_file()] == []


def test_directory_stays_usable_after_an_error(compare):
    def program(run):
        def step(module, x, y):
            if run.batches == 10:
                raise ValueError("in the middle")
            return F.cross_entropy(module.net(x), y)

        with contextlib.suppress(ValueError):
            run.fit(Stepping(step))
        run.fit(Classifier())

    compare(program)


def test_two_caches_in_one_process(compare):
    """Two Trainers in turn: the second fit runs inside a callback of the first one, in another directory."""

    def program(run):
        def nested(trainer, module):
            run.fit(Classifier(), loader(vectors(seed=3)), cache={"cache_dir": run.folder / "inner"})

        run.fit(Classifier(), None, at(10, nested), max_epochs=4)

    compare(program)
