"""Runs a program twice, with and without the cache, and compares everything that came of it.

A program is a function of a `Run`. It builds its own data and modules, and trains with `Run.fit`. It may `note` what it
reads on its way.
"""

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pickle
import random
import re
import sys
import time
import traceback
import warnings
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger

from lightning_egeria import Decision, FrozenPrefixCache, PrefixFreezing
from support import untimed
from support.caching.parts import data_of, loader

SCHEDULE = {2: 2}
EPOCHS = 3
_OF_THE_CACHE = re.compile(r"^(the )?cache\b")


class FreezesAt(PrefixFreezing):
    """Freezes to the depth ``schedule[step]`` after each such step."""

    def __init__(self, schedule, **options):
        super().__init__(**options)
        self.schedule = dict(schedule)

    def choose_depth(self, step):
        depth = self.schedule.get(step)
        return None if depth is None else Decision(depth, f"step {step}")


class _MemoryLogger(Logger):
    name, version = "memory", 0

    def __init__(self):
        super().__init__()
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, dict(metrics)))

    def log_hyperparams(self, params, *args, **kwargs):
        self.logged.append(("hyperparameters", dict(params)))


def draws():
    """A digest of the states of all random generators."""
    numpy = np.random.get_state()
    states = pickle.dumps((random.getstate(), numpy, torch.get_rng_state().numpy().tobytes()))
    return hashlib.sha1(states).hexdigest()


class _Recorder(L.Callback):
    """Notes the outputs of each training step, and the random states around it, without a look at the batch."""

    def __init__(self, run):
        self.run = run

    def on_train_batch_start(self, trainer, pl_module, *_):
        self.run.record(f"draws before batch {self.run.batches}", draws())

    def on_train_batch_end(self, trainer, pl_module, outputs, *_):
        self.run.record(f"outputs of batch {self.run.batches}", plain(outputs))
        self.run.batches += 1


class Run:
    """One run of a program, with or without the cache.

    Attributes:
        cached: whether the data go through a `FrozenPrefixCache`.
        folder: an empty folder for the program's own files.
        recorded: what the two runs of a program must have in common, in order.
        warnings: all others.
        caches: every `FrozenPrefixCache` of the run.
        messages: what the caches told, as texts; warnings only.
    """

    def __init__(self, cached, folder):
        self.cached, self.folder = cached, folder
        self.cache_dir = folder / "cache"
        self.recorded, self.caches, self.messages, self.depths = [], [], [], []
        self.warnings = set()
        self.batches, self.error = 0, None
        folder.mkdir()

    def __deepcopy__(self, memo):
        return self  # a copy of a module that holds it, which would reach the Trainer otherwise

    def record(self, name, value):
        self.recorded.append((name, value))

    def note(self, value, name="noted"):
        """Keep what the program read, as plain values of this moment."""
        self.record(name, plain(value))

    def data(self, data, val=None, **cache):
        """The data module to fit with: the user's own, or the cache around it."""
        if self.cached:
            options = {"cache_dir": self.cache_dir, "min_free_bytes": 0, **cache}
            self.caches.append(FrozenPrefixCache(data, val_dataloaders=val, **options))
            return self.caches[-1]
        if isinstance(data, L.LightningDataModule):
            return data
        return data_of(train_dataloader=lambda: data, **({} if val is None else {"val_dataloader": lambda: val}))

    def trainer(self, *callbacks, schedule=None, freezing=None, **options):
        """A silent Trainer on the CPU that freezes by ``schedule``, with the recorder as its last callback."""
        freezing = FreezesAt(SCHEDULE if schedule is None else schedule, **(freezing or {}))
        silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        silent |= {"accelerator": "cpu", "num_sanity_val_steps": 0, "log_every_n_steps": 1, "max_epochs": EPOCHS}
        silent |= {"logger": _MemoryLogger(), "callbacks": [freezing, *callbacks, _Recorder(self)]}
        return L.Trainer(**silent | options)

    def fit(
        self,
        module,
        data=None,
        *callbacks,
        val=None,
        cache=None,
        ckpt_path=None,
        schedule=None,
        freezing=None,
        **options,
    ):
        """Train, and record how it ended. ``data``: a DataLoader or a data module; ``options``: of the Trainer."""
        trainer = self.trainer(*callbacks, schedule=schedule, freezing=freezing, **options)
        wrapped = self.data(loader() if data is None else data, val, **(cache or {}))
        try:
            trainer.fit(module, datamodule=wrapped, ckpt_path=ckpt_path)
        finally:
            self.ended(trainer, module)
        return trainer

    def ended(self, trainer, module):
        """Record the state of a training that has ended."""
        freezing = next(callback for callback in trainer.callbacks if isinstance(callback, FreezesAt))
        self.depths.append([event.depth for event in freezing.events])
        self.note([(event.step, event.depth) for event in freezing.events], "freezing")
        self.note((trainer.global_step, trainer.current_epoch, trainer.state.status), "progress")
        self.note(dict(module.state_dict()), "weights")
        self.note({name: (p.requires_grad, p.grad is None) for name, p in module.named_parameters()}, "parameters")
        self.note({path: (part.training, hooks_of(part)) for path, part in module.named_modules()}, "modules")
        self.note([optimizer.state_dict() for optimizer in trainer.optimizers], "optimizers")
        self.note(dict(trainer.callback_metrics), "metrics")
        for logger in trainer.loggers:
            self.note(logger.logged if isinstance(logger, _MemoryLogger) else None, "logged")
        self.record("draws at the end", draws())


def hooks_of(part):
    """What observing a module may leave on it: replaced methods and hooks."""
    own = vars(part).get("forward")  # a copy made while it was observed calls that of its class
    leaves_own = isinstance(own, functools.partial) and (own.func, own.args) == (type(part).forward, (part,))
    names = sorted({*vars(part)} - ({"forward"} if leaves_own else set()))
    return names, [len(value) for name, value in sorted(vars(part).items()) if name.endswith("_hooks")]


def plain(value):
    """Tensors and arrays as texts that tell every bit, containers as lists, for a comparison at any later time."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), str(value.detach().flatten().tolist())
    if isinstance(value, np.ndarray):
        return "array", str(value.dtype), value.shape, str(value.tolist())
    if isinstance(value, dict):
        return [(str(key), plain(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [plain(item) for item in vars(value).values()]
    return repr(value)


class _Messages(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _slowed(call, seconds):
    def slow(*args):
        time.sleep(seconds)
        return call(*args)

    return slow


def ran(program, cached, folder, seed=0, disk_seconds=0.0):
    """Run a program; an exception of the program is part of its record."""
    run, handler, logger = Run(cached, folder), _Messages(), logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    # Times decide nothing here: all that can be kept is kept.
    values = {"COMPARED_BATCHES": sys.maxsize, "CHEAP_SHARE": 0.0, **untimed.FREE}
    never_judged = mock.patch.multiple("lightning_egeria.caching.policy", **values)
    L.seed_everything(seed, verbose=False)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else only the first run of a process warns
    try:
        with warnings.catch_warnings(record=True) as caught, never_judged, contextlib.ExitStack() as disk:
            warnings.simplefilter("always")
            for name in ("pread", "pwrite", "preadv", "pwritev") if disk_seconds else ():
                disk.enter_context(mock.patch.object(os, name, _slowed(getattr(os, name), disk_seconds)))
            try:
                program(run)
            except (Exception, SystemExit) as error:
                run.record("exception", f"{type(error).__name__}: {error}")
                run.error = error
    finally:
        logger.removeHandler(handler)
        torch.set_warn_always(always)
    texts = [*(str(warning.message) for warning in caught), *handler.texts]
    run.messages = [text for text in texts if _OF_THE_CACHE.match(text)]
    run.warnings = set(texts) - set(run.messages)
    return run


def compare(program, folder, served=True, freezes=True, raises=None, seed=0, disk_seconds=0.0):
    """Run a program without and with the cache, and assert that the cache changed nothing.

    Args:
        program: a function of a `Run`.
        folder: an empty folder.
        served: True: training must use the cache. False: the cache must be off and say so once. None: either.
        freezes: whether every `fit` must have frozen something.
        raises: the exception that ends the program in both runs.
        seed: of both runs.
        disk_seconds: by which each access to the disk takes longer, so that the cache's threads are late.

    Returns:
        The run with the cache.
    """
    first = ran(program, False, folder / "plain", seed)
    if first.error is not None and (raises is None or not isinstance(first.error, raises)):
        raise first.error
    assert raises is None or first.error is not None, f"the program does not raise {raises.__name__}"
    second = ran(program, True, folder / "cached", seed, disk_seconds)
    assert_same(first, second)
    assert second.warnings <= first.warnings, f"further warnings: {second.warnings - first.warnings}"
    if freezes:
        assert first.depths
        assert all(any(depths) for depths in first.depths), f"a fit did not freeze: {first.depths}"
    statistics = [cached.stats for cached in second.caches]
    told = "\n".join(second.messages)
    if served:
        assert sum(one.hits + one.advanced for one in statistics) > 0, f"nothing came from the cache: {told}"
    if served is False:
        assert statistics[-1].off is not None
    if (
        freezes
        and statistics[-1].off not in (None, "nothing is frozen", "running statistics still settle")
        and second.depths[-1][-1]
    ):
        assert second.messages, f"the cache is off without a message: {statistics[-1].off}"
    assert len(set(second.messages)) == len(second.messages), f"a message comes twice: {told}"
    # One for what was dropped and is cached anew, one for why the cache is off.
    assert len(second.messages) <= 2 * len(second.caches), f"too many messages: {told}"
    return second


def assert_same(first, second):
    """Assert that two runs have the same record; name the first difference."""
    for (name, one), (other_name, other) in zip(first.recorded, second.recorded, strict=False):
        assert name == other_name, f"{name} without the cache, {other_name}: {other} with it" + _told(second)
        assert one == other, f"{name} differs:\n  without {difference(one, other)}" + _told(second)
    assert len(first.recorded) == len(second.recorded), _told(second)


def _told(run):
    where = "".join(traceback.format_exception(run.error)[-8:]) if run.error is not None else ""
    return f"\nmessages: {run.messages}\nstatistics: {[cached.stats for cached in run.caches]}\n{where}"


def difference(one, other, path=""):
    """The first place where two plain values differ, with both values."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for place, (a, b) in enumerate(zip(one, other, strict=True)):
            if a != b:
                label = a[0] if isinstance(a, tuple) and a and isinstance(a[0], str) and a[0] == b[0] else place
                return difference(a, b, f"{path}/{label}")
    one, other = str(one), str(other)
    first = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, first - 40)
    return f"{path} [{begin}:] {one[begin : begin + 200]}\n  with    {path} [{begin}:] {other[begin : begin + 200]}"
