"""Does it stand a load? Many processes on one store, ten million samples in its index, a thousand layer modules.

Printed are entries read and written per second by 1, 8 and 64 processes at the same time, each half reading and half
writing in random places of one store, every entry compared with what was written; what a store of that many samples
costs to make, to open and to look through; and what the first step under the callback, which finds the layer chain, and
the steps after it take longer than the same steps without, for chains of 10, 100 and 1,000 layer modules: medians over
rounds in which each length has its turn.

    python benchmarks/load.py [--processes 1 8 64] [--samples 10000000] [--layers 10 100 1000] [--rounds 5]
"""

import argparse
import contextlib
import gc
import io
import logging
import multiprocessing
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from lightning_egeria.caching.store.manifest import Manifest
from lightning_egeria.caching.store.store import ActivationStore

ENTRIES, ENTRY_BYTES, FIELD_BYTES = 20_000, 16 << 10, 64
STEPS = 20
SECONDS = 5.0


def manifest(folder: Path, entries: int, entry_bytes: int) -> Manifest:
    return Manifest(folder.name, entries, entry_bytes, FIELD_BYTES, "torch.float32", (0, 1), {})


def content(number: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What is cached of a sample: every writer writes the same."""
    return np.full(ENTRY_BYTES, number % 251, np.uint8)


def use(folder: Path, seed: int, together: Any, results: Any) -> None:
    """Read and write one store, in turn, as fast as it goes."""
    chance, store, into = random.Random(seed), ActivationStore(folder), np.empty(ENTRY_BYTES, np.uint8)
    counts = {"read": 0, "missed": 0, "written": 0, "wrong": 0}
    together.wait()
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        number = chance.randrange(ENTRIES)
        store.write(number, content(number), (ENTRY_BYTES // 4,), b"%d" % number)
        counts["written"] += 1
        number = chance.randrange(ENTRIES)
        if store.read(number, into) is None:
            counts["missed"] += 1
        else:
            counts["read"] += 1
            counts["wrong"] += not (into == content(number)).all() or store.read_fields(number) != b"%d" % number
    store.close()
    results.put(counts)


def concurrent(processes: list[int]) -> None:
    """Several processes at the same time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lightning", "lightning_egeria.caching.store.store"])
    print(f"| processes | entries of {ENTRY_BYTES >> 10} kB written and read /s | misses | wrong |")
    print("| --- | --- | --- | --- |")
    for count in processes:
        with tempfile.TemporaryDirectory() as parent:
            folder = Path(parent) / "store"
            ActivationStore.create(folder, manifest(folder, ENTRIES, ENTRY_BYTES)).close()
            together, results = context.Barrier(count), context.SimpleQueue()
            users = [context.Process(target=use, args=(folder, seed, together, results)) for seed in range(count)]
            for user in users:
                user.start()
            found = [results.get() for _ in users]
            for user in users:
                user.join()
        total = {name: sum(counts[name] for counts in found) for name in found[0]}
        rate = (total["written"] + total["read"]) / SECONDS
        print(f"| {count} | {rate:,.0f} | {total['missed']:,} | {total['wrong']} |", flush=True)


def index(samples: int) -> None:
    """A store for a number of small entries, of which a few thousand are there."""
    with tempfile.TemporaryDirectory() as parent:
        folder, began = Path(parent) / "store", time.perf_counter()
        store = ActivationStore.create(folder, manifest(folder, samples, 1024))
        made = time.perf_counter() - began
        chance, data = random.Random(0), np.ones(1024, np.uint8)
        numbers = [chance.randrange(samples) for _ in range(5000)]
        for number in numbers:
            store.write(number, data, (256,), b"")
        store.close()
        began = time.perf_counter()
        store = ActivationStore(folder)
        opened, began = time.perf_counter() - began, time.perf_counter()
        store.refresh()
        refreshed, began = time.perf_counter() - began, time.perf_counter()
        into = np.empty(1024, np.uint8)
        assert all(store.read(number, into) == (256,) for number in numbers)
        read = (time.perf_counter() - began) / len(numbers)
        print(f"{samples:,} samples: made in {made:.2f} s, opened in {opened:.2f} s, index read in {refreshed:.2f} s")
        print(f"{store.index.nbytes / 1e6:.0f} MB of memory, an entry read in {read * 1e6:.0f} us")
        print(f"{store.disk_bytes / 1e6:.0f} MB on disk for {len(numbers):,} entries")
        store.close()


class Chain(L.LightningModule):
    """So many small layers."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(layers)), nn.Linear(16, 2)
        )

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


class Starts(L.Callback):
    """Starts the clock, in front of all other callbacks."""

    def __init__(self, marks: list[float]) -> None:
        self.marks = marks

    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append(-time.perf_counter())


class Stops(L.Callback):
    """Stops it, behind them."""

    def __init__(self, marks: list[float]) -> None:
        self.marks = marks

    def on_train_batch_end(self, *_: Any) -> None:
        self.marks[-1] += time.perf_counter()


def steps_of(layers: int, with_callback: bool) -> tuple[float, float]:
    """Seconds of the first step, and the median of those after it in which nothing is compared."""
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(STEPS * 8, 16), torch.randint(2, (STEPS * 8,))), 8)
    marks: list[float] = []

    freezing = KnowledgeGuidedFreezing(
        FreezingPolicy(pretrained=True, trial=False), evaluate_every_n_steps=10**6, background=False
    )
    callbacks = [Starts(marks), *([freezing] if with_callback else []), Stops(marks)]
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    gc.collect()
    gc.disable()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(Chain(layers), data)
    gc.enable()
    return marks[0], statistics.median(marks[3:])


def chains(lengths: list[int], rounds: int) -> None:
    """Cost by length."""
    first: dict[int, list[float]] = {length: [] for length in lengths}
    later: dict[int, list[float]] = {length: [] for length in lengths}
    for _ in range(rounds):
        for length in lengths:
            (own_first, own), (plain_first, plain) = steps_of(length, True), steps_of(length, False)
            first[length].append(own_first - plain_first)
            later[length].append(own / plain)
    print("| layer modules | first step longer by | per layer module | later steps, over the same without |")
    print("| --- | --- | --- | --- |")
    for length in lengths:
        seconds = statistics.median(first[length])
        ratio = f"{statistics.median(later[length]):.2f} ({min(later[length]):.2f}-{max(later[length]):.2f})"
        print(f"| {length:,} | {seconds * 1e3:,.1f} ms | {seconds / length * 1e6:,.0f} us | {ratio} |")
    began = time.perf_counter()
    gc.collect()
    print(f"the garbage collector goes through all objects in {(time.perf_counter() - began) * 1e3:,.0f} ms")


def main() -> None:
    """All three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--layers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores\n")
    concurrent(options.processes)
    print()
    index(options.samples)
    print()
    chains(options.layers, options.rounds)


if __name__ == "__main__":
    main()
