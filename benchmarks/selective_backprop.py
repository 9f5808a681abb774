"""What an epoch with Selective-Backprop costs, beside its formula, on a ResNet-20 and images of noise.

    python -m benchmarks.selective_backprop [--batches 20] [--batch-size 64] [--rounds 3]

The cost of an epoch is a share of a plain one. It should be the measured time of its scoring forwards plus the share of
the samples that it trained: what is over is selection itself. Variants alternate; medians over the rounds are shown.
"""

import argparse
import functools
import logging
import statistics
import time
import warnings

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import SelectiveBackprop
from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.selecting.scoring import Scorer

EPOCHS = 3  # the first is whole


class Epochs(L.Callback):
    """Seconds of each epoch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, *_: object) -> None:
        self._began = time.perf_counter()

    def on_train_epoch_end(self, *_: object) -> None:
        self.seconds.append(time.perf_counter() - self._began)


def fit(batches: int, batch_size: int, **options: object) -> tuple[float, float, list[tuple[int, int, int, int]]]:
    """Seconds of the epochs in which samples are selected, those of scoring forwards in them, and samples."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(batches * batch_size, 3, 32, 32), torch.randint(0, 10, (batches * batch_size,)))
    model = ImageClassifier(CifarResNet(20), 10, functools.partial(torch.optim.SGD, lr=0.01))
    wrapped, epochs, scoring = SelectiveBackprop(DataLoader(data, batch_size), **options), Epochs(), [0.0]
    losses = Scorer.losses

    def timed(*arguments: object) -> object:
        began = time.perf_counter()
        try:
            return losses(*arguments)
        finally:
            scoring[0] += time.perf_counter() - began

    Scorer.losses = timed
    try:
        trainer = L.Trainer(
            max_epochs=EPOCHS,
            callbacks=[epochs],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        trainer.fit(model, datamodule=wrapped)
    finally:
        Scorer.losses = losses
    return sum(epochs.seconds[1:]), scoring[0], wrapped.selection.epochs[1:]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    variants = {f"beta={beta}, staleness={n}": {"beta": beta, "staleness": n} for beta in (1, 2) for n in (0, 2)}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, arguments in variants.items():
            plain, _, _ = fit(options.batches, options.batch_size, beta=0)
            seconds, scoring, counts = fit(options.batches, options.batch_size, **arguments)
            samples = (EPOCHS - 1) * options.batches * options.batch_size
            trained = sum(count for _, _, _, count in counts) / samples
            found[name].append((seconds / plain, scoring / plain + trained, scoring / plain))
    print("variant | cost | scoring + trained share | scoring")
    for name, rows in found.items():
        cost, formula, scoring = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name} | {cost:.3f} | {formula:.3f} | {scoring:.3f}")


if __name__ == "__main__":
    main()
