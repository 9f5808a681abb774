"""What do two jobs gain from sharing a device step by step?

Two processes train the same network, each with one thread, on data that take ``--loading`` milliseconds a batch to
load. Printed is the time of one job after the other over the time of both at once, in turns by `DeviceTurns`, for data
that are there at once and for data that take as long as a step: 1 means nothing lost, 2 that the gaps are filled.

    python benchmarks/turns.py [--batches 60] [--loading 0 30] [--pairs 3]
"""

import argparse
import logging
import multiprocessing
import statistics
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_egeria import DeviceTurns
from lightning_egeria.demos.resnet import CifarResNet

BATCH = 32


class Slow(Dataset):
    """Images that take some time to load."""

    def __init__(self, batches: int, milliseconds: float) -> None:
        self.samples, self.seconds = batches * BATCH, milliseconds / 1e3 / BATCH

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        time.sleep(self.seconds)
        return torch.zeros(3, 32, 32), index % 10


class Model(L.LightningModule):
    """ResNet-20."""

    def __init__(self):
        super().__init__()
        self.net = CifarResNet(20)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(L.Callback):
    """Waits for the others after the first batch, and takes the time of the rest."""

    def __init__(self, ready):
        self.ready = ready

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 1:
            self.ready.wait()
            self.began = time.perf_counter()

    def on_train_end(self, trainer, pl_module):
        self.seconds = time.perf_counter() - self.began


def job(device: Path, batches: int, loading: float, ready, results) -> None:
    """Train, and put the seconds into the queue."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = Clock(ready)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[clock, DeviceTurns(device)],
    )
    trainer.fit(Model(), DataLoader(Slow(batches, loading), BATCH))
    results.put(clock.seconds)


def run(jobs: int, batches: int, loading: float) -> float:
    """Seconds until all of some jobs at once have ended."""
    context = multiprocessing.get_context("spawn")
    ready, results = context.Barrier(jobs), context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (Path(folder) / "device", batches, loading, ready, results)
        processes = [context.Process(target=job, args=arguments) for _ in range(jobs)]
        for process in processes:
            process.start()
        seconds = [results.get() for _ in processes]
        for process in processes:
            process.join()
    return max(seconds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=60)
    parser.add_argument("--loading", type=float, nargs="+", default=[0, 30], help="milliseconds a batch")
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    print("loading    one alone    both in turns    one after the other / both")
    for loading in options.loading:
        pairs = [(run(1, options.batches, loading), run(2, options.batches, loading)) for _ in range(options.pairs)]
        alone, both = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(2 * one / two for one, two in pairs)
        print(f"{loading:4.0f} ms {alone:10.2f} s {both:14.2f} s {ratio:28.2f}", flush=True)


if __name__ == "__main__":
    main()
