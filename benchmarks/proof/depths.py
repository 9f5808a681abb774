"""What a step at each frozen depth is worth, as trials of several lengths would see it.

    python -m benchmarks.proof.depths WORKLOAD --data FOLDER [--size small] [--seed 0] [--steps 32] --depths 7 5 3 0

Each depth trains the same number of steps from the state after the first step. The losses of each depth are compared
with those of the last one.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
import lightning

from benchmarks.proof.run import configured, quiet, trainer_of
from benchmarks.proof.workloads import WORKLOADS
from lightning_egeria import PrefixFreezing
from lightning_egeria.core.training.branches import Branches
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.freezing.trial import worth

LENGTHS = (8, 12, 16, 24, 32, 48, 64)  # of trials, as far as the steps go


class Branching(PrefixFreezing):
    """Trains some steps behind the first one at several depths, and ends the training.

    Args:
        depths: deepest first.
        steps: optimizer steps of each.

    Attributes:
        losses: of each batch, by depth.
    """

    def __init__(self, depths: Sequence[int], steps: int) -> None:
        super().__init__()
        self.depths, self.steps = depths, steps
        self.losses: dict[int, list[float]] = {}

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        feed = Feed.install(trainer, self, lambda: self.compare(trainer, feed))

    def compare(self, trainer: lightning.Trainer, feed: Feed) -> None:
        if trainer.global_step != 1 or self.losses:
            return
        branches = Branches(trainer, self.freezer, feed)
        for depth in self.depths:
            losses = branches.at(depth, self.steps * trainer.accumulate_grad_batches)
            if losses is None:
                raise ValueError(f"an epoch has fewer than {self.steps} steps")
            self.losses[depth] = losses
        branches.leave()
        trainer.should_stop = True


def table(losses: Mapping[int, Sequence[float]]) -> str:
    """Worth of a step at each depth beside one at the last depth, by the length of the trial, as Markdown.

    >>> print(table({1: [4.0, 3.5, 3.0, 2.5] * 2, 0: [4.0, 3.0, 2.0, 1.0] * 2}))
    | frozen | 8 steps |
    |---|---|
    | 1 | 0.50 |
    | 0 | 1.00 |
    """
    *_, last = losses
    lengths = [length for length in LENGTHS if length <= len(losses[last])]
    rows = [f"| frozen | {' | '.join(f'{length} steps' for length in lengths)} |", "|---" * (len(lengths) + 1) + "|"]
    for depth, own in losses.items():
        shares = [f"{worth(own[:length], losses[last][:length]):.2f}" for length in lengths]
        rows.append(f"| {depth} | {' | '.join(shares)} |")
    return "\n".join(rows)


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--size", default="small")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--depths", type=int, nargs="+", required=True, help="deepest first")
    options = parser.parse_args()
    config = configured(options.workload, options.size, options.data)
    lightning.seed_everything(options.seed, workers=True, verbose=False)
    datamodule, model = hydra.utils.instantiate(config.data), hydra.utils.instantiate(config.model)
    branching = Branching(options.depths, options.steps)
    with quiet():
        trainer_of(config, [branching], limit_val_batches=0, num_sanity_val_steps=0).fit(model, datamodule=datamodule)
    print(table(branching.losses))


if __name__ == "__main__":
    main()
