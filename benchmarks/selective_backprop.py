"""What an epoch with Selective-Backprop costs, beside its formula, on a ResNet-20 and images of noise.

    python -m benchmarks.selective_backprop [--batches 20] [--batch-size 64] [--rounds 3] [--frozen 0]

The cost of an epoch is a share of a plain one. It should be the measured time of its scoring forwards plus the share of
the samples that it trained: what is over is selection itself. Variants alternate; medians over the rounds are shown.
With ``--frozen N``, N layer modules are frozen and cached in all runs, also in the plain ones. Then a batch is read
from the cache to score it, which the last column counts as well.
"""

import argparse
import functools
import logging
import statistics
import time
import warnings
from collections.abc import Iterator

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy, SelectiveBackprop
from lightning_egeria.core.batches.reading import BatchSource
from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.methods.selecting.scoring import Scorer

EPOCHS = 2  # that are measured
BEFORE, BEFORE_CACHED = 1, 3  # epochs before them: the first is whole, and a cache fills and sees whether it pays


class Epochs(L.Callback):
    """Seconds of each epoch, and those of scoring and of reading what is scored in it."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.scoring: list[float] = []
        self.reading: list[float] = []

    def on_train_epoch_start(self, *_: object) -> None:
        self.scoring.append(0.0)
        self.reading.append(0.0)
        self._began = time.perf_counter()

    def on_train_epoch_end(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def fit(
    batches: int, batch_size: int, frozen: int, **options: object
) -> tuple[float, float, float, list[tuple[int, int, int, int]]]:
    """Seconds of the epochs in which samples are selected, of scoring forwards, of reading for them; and samples."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batches * batch_size, 3, 32, 32), torch.randint(0, 10, (batches * batch_size,)))
    model = ImageClassifier(CifarResNet(20), 10, functools.partial(torch.optim.SGD, lr=0.01))
    before = BEFORE_CACHED if frozen else BEFORE
    loader, callbacks = DataLoader(data, batch_size), []
    if frozen:
        loader, callbacks = FrozenPrefixCache(loader), [KnowledgeGuidedFreezing(ScriptedPolicy({1: frozen}))]
    wrapped, epochs = SelectiveBackprop(loader, **options), Epochs()
    losses, read = Scorer.losses, BatchSource.__iter__

    def timed(*arguments: object) -> object:
        began = time.perf_counter()
        try:
            return losses(*arguments)
        finally:
            epochs.scoring[-1] += time.perf_counter() - began

    def timed_reading(source: BatchSource) -> Iterator[object]:
        batches = read(source)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if epochs.reading:
                epochs.reading[-1] += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    Scorer.losses, BatchSource.__iter__ = timed, timed_reading
    try:
        trainer = L.Trainer(
            max_epochs=before + EPOCHS,
            callbacks=[*callbacks, epochs],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        trainer.fit(model, datamodule=wrapped)
    finally:
        Scorer.losses, BatchSource.__iter__ = losses, read
    spent = (sum(seconds[before:]) for seconds in (epochs.seconds, epochs.scoring, epochs.reading))
    return *spent, wrapped.selection.epochs[before:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frozen", type=int, default=0)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    variants = {f"beta={beta}, staleness={n}": {"beta": beta, "staleness": n} for beta in (1, 2) for n in (0, 2)}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, arguments in variants.items():
            size = options.batches, options.batch_size, options.frozen
            plain, _, _, _ = fit(*size, beta=0)
            seconds, scoring, reading, counts = fit(*size, **arguments)
            samples = EPOCHS * options.batches * options.batch_size
            trained = sum(count for _, _, _, count in counts) / samples
            formula = scoring / plain + trained
            found[name].append((seconds / plain, scoring / plain, formula, formula + reading / plain))
    print("variant | cost | scoring | scoring + trained share | with reading")
    for name, rows in found.items():
        print(name, *(f"{statistics.median(column):.3f}" for column in zip(*rows, strict=True)), sep=" | ")


if __name__ == "__main__":
    main()
