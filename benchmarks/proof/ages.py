"""Shaken or learning? How far the last layer module's output is from what it was some intervals ago.

    python -m benchmarks.proof.ages WORKLOAD --data FOLDER --depth DEPTH [--size small] [--interval 16] [--rate 0.01]

One run at a constant learning rate: twelve intervals with nothing frozen, twelve with the front frozen. What is only
shaken by the batches is as far from its past after eight intervals as after one; what learns goes on and on.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hydra
import lightning
from torch import Tensor, nn

from benchmarks.proof.controls import StaticFreezing
from benchmarks.proof.inside import boundary_grams
from benchmarks.proof.run import configured, quiet, trainer_of
from benchmarks.proof.workloads import WORKLOADS
from lightning_egeria import PrefixFreezing
from lightning_egeria.freezing.similarity import gram_distance, gram_matrix

HALF = 12  # intervals
AGES = (1, 2, 4, 8)  # intervals


@contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """In evaluation mode, but for batch normalisation: that takes the statistics of the batch, and keeps its own."""
    modes = [(part, part.training) for part in module.modules()]
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    module.eval()
    for norm in norms:
        norm.training, norm.momentum = True, 0.0
    try:
        yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for part, mode in modes:
            part.training = mode


class Past(lightning.Callback):
    """Keeps what the last layer module says of the first batch, once in an interval.

    Args:
        freezing: knows the layer modules.
        interval: optimizer steps.
    """

    def __init__(self, freezing: PrefixFreezing, interval: int) -> None:
        self.freezing, self.interval = freezing, interval
        self.images: Tensor | None = None
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.images = batch[0] if self.images is None else self.images
        if trainer.global_step % self.interval == 0:
            with measuring(pl_module):
                self.seen.append(boundary_grams(self.freezing, pl_module, self.images, gram_matrix)[-1])

    def distance(self, age: int, first: int, last: int) -> float:
        """Median plasticity at an age, of the looks with these numbers that have one so old among them."""
        pairs = [(self.seen[number], self.seen[number - age]) for number in range(first + age, last)]
        return statistics.median(float(gram_distance(now, then)) * len(now) for now, then in pairs)


def main() -> None:
    """Train, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--size", default="small")
    parser.add_argument("--interval", type=int, default=16)
    parser.add_argument("--rate", type=float, default=0.01)
    options = parser.parse_args()
    overrides = ["scheduler=none", f"model.optimizer.lr={options.rate}"]
    config = configured(options.workload, options.size, options.data, overrides)
    lightning.seed_everything(0, workers=True, verbose=False)
    datamodule, model = hydra.utils.instantiate(config.data), hydra.utils.instantiate(config.model)
    half = HALF * options.interval
    freezing = StaticFreezing(half, options.depth)
    past = Past(freezing, options.interval)
    with quiet():
        trainer = trainer_of(config, [freezing, past], limit_val_batches=0, max_epochs=-1, max_steps=2 * half)
        trainer.fit(model, datamodule=datamodule)
    count = len(freezing.layer_modules)
    print(f"{options.workload}, learning rate {options.rate}: plasticity of {freezing.layer_modules[-1]} at an age of")
    print(f"{'':24}" + "".join(f"{age * options.interval:>4} steps" for age in AGES))
    for text, first in (("nothing frozen", 0), (f"{options.depth} of {count} frozen", HALF - 1)):
        row = "".join(f"{past.distance(age, first, first + HALF):>10.1e}" for age in AGES)
        print(f"{text:24}{row}")


if __name__ == "__main__":
    main()
