"""What a step at each frozen depth is worth, as trials of several lengths would see it.

    python -m benchmarks.proof.depths WORKLOAD --data FOLDER [--size small] [--seed 0] [--steps 32] --depths 7 5 3 0

The run freezes to the first depth after its first step. After so many steps more, these are repeated at the other
depths, and the losses of each are compared with those of the last one.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
import lightning
from torch import Tensor

from benchmarks.proof.run import configured, quiet, trainer_of
from benchmarks.proof.workloads import WORKLOADS
from lightning_egeria import Decision, Freezer, Observer, PrefixFreezing
from lightning_egeria.freezing.trial import worth
from lightning_egeria.training.branches import Branches

LENGTHS = (8, 12, 16, 24, 32, 48, 64)  # of trials, as far as the steps go


class Branching(PrefixFreezing):
    """Repeats the first steps at other depths, and ends the training.

    Args:
        depths: the first is that of the run.
        steps: optimizer steps to repeat.

    Attributes:
        losses: of each batch, by depth.
    """

    def __init__(self, depths: Sequence[int], steps: int) -> None:
        super().__init__()
        self.depths, self.steps = depths, steps
        self.losses: dict[int, list[float]] = {}
        self.branches: Branches | None = None

    def start_method(
        self, trainer: lightning.Trainer, freezer: Freezer, gathered: Mapping[str, Tensor] | None, state: Any
    ) -> Sequence[Observer]:
        self.trainer = trainer
        return []

    def on_train_batch_start(self, trainer: lightning.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if self.branches is not None:
            self.branches.batch_start(batch, trainer.global_step)

    def on_before_backward(self, trainer: lightning.Trainer, pl_module: Any, loss: Tensor) -> None:
        super().on_before_backward(trainer, pl_module, loss)
        if self.branches is not None:
            self.branches.forward_end(loss)

    def choose_depth(self, step: int) -> Decision | None:
        if step == 1:
            self.branches = Branches(self.trainer, self.freezer)
            return Decision(self.depths[0], "the first of the depths")
        if self.branches is None:
            return None
        self.branches.stepped()
        if self.branches.steps < self.steps:
            return None
        branches, self.branches = self.branches, None
        self.losses[self.depths[0]] = branches.losses
        with branches.repeating() as repeats:
            for depth in self.depths[1:]:
                self.losses[depth] = repeats.at(depth)
        self.trainer.should_stop = True
        return None


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
