"""What does the callback cost while nothing is frozen? Step time with it over step time without, in one run.

Blocks of training steps under the callback, its worker running, alternate with blocks without; within a block as many
evaluations are made as in that many steps of any run. Printed are the ratio of the mean step times, as the median over
neighbouring blocks with its range, and how much of it is spent in the training thread, which is what remains where the
worker has a core to itself. ``--threads 1`` on two cores leaves the worker one.

    python benchmarks/overhead.py [--model resnet20] [--batch 32] [--threads 2] [--every 10,50] [--pairs 10]
"""

import argparse
import contextlib
import io
import os
import platform
import statistics
import sys
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.demos.resnet import CifarResNet

WARM_UP_STEPS = 20


class Alternating(KnowledgeGuidedFreezing):
    """The callback in every second block; in the others it is not there."""

    def __init__(self, every: int, block: int, warm_up: int) -> None:
        # It compares at any rate, and never freezes.
        watching = FreezingPolicy(1e-30, pretrained=True, trial=False, peer_tolerance=0)
        super().__init__(watching, evaluate_every_n_steps=every, background=True)
        self.block, self.warm_up = block, warm_up
        self.means: dict[bool, list[float]] = {True: [], False: []}
        self.own_seconds: list[float] = []
        self._block_began = 0.0

    @property
    def on(self) -> bool:
        """Whether this is a step under the callback; the warm-up is."""
        return self._steps < 0 or self._steps // self.block % 2 == 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._steps = trainer.global_step - self.warm_up
        if self._steps >= 0 and self._steps % self.block == 0:
            if not self._steps:  # the process has started and measured its precisions before anything is timed
                while not self.comparison.runner.worker.idle:
                    time.sleep(0.01)
            now = time.perf_counter()
            if self._steps:
                self.means[not self.on].append((now - self._block_began) / self.block)
            self._block_began = now
            # The first step of a block is an evaluation step, so that the worker is done when the block is.
            self.comparison.next_evaluation = trainer.global_step + 1
            self._spent = self.comparison.costs.evaluation_seconds
        if self.on:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)

    def on_before_backward(self, trainer, pl_module, loss):
        if self.on:
            super().on_before_backward(trainer, pl_module, loss)

    def on_after_backward(self, trainer, pl_module):
        if self.on:
            super().on_after_backward(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.on:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
            if self._steps >= 0 and (self._steps + 1) % self.block == 0:
                self.own_seconds.append(self.comparison.costs.evaluation_seconds - self._spent)


def measure(model: str, batch: int, every: int, pairs: int) -> None:
    """One run at one interval."""
    L.seed_everything(0, verbose=False)
    block = every * max(1, 50 // every)
    freezing = Alternating(every, block, WARM_UP_STEPS + every)
    steps = freezing.warm_up + (2 * pairs + 1) * block + 1
    data = DataLoader(TensorDataset(torch.randn(batch * 256, 3, 32, 32), torch.randint(10, (batch * 256,))), batch)
    net = ImageClassifier(
        CifarResNet(int(model.removeprefix("resnet")), 10),
        num_classes=10,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        scheduler=lambda optimizer, total_iters: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, total_iters),
        scheduler_interval="step",
        scheduler_length_name="total_iters",
    )
    trainer = L.Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        callbacks=[freezing],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # the table of what was saved: nothing
        trainer.fit(net, data)
    with_callback, without = freezing.means[True][:pairs], freezing.means[False][:pairs]
    ratios = [a / b for a, b in zip(with_callback, without, strict=True)]
    own = statistics.median(freezing.own_seconds) / block / statistics.median(without)
    savings = freezing.savings()
    if not savings.evaluations_done:
        sys.exit(f"no evaluation of {savings.evaluations_late + savings.evaluations_dropped} was done: no core is idle")
    counts = f"{savings.evaluations_done:5d} {savings.evaluations_late:5d} {savings.evaluations_dropped:7d}"
    print(
        f"{model:9s} {every:6d} {statistics.median(without) * 1000:9.1f} ms {statistics.median(ratios):9.3f} "
        f"{min(ratios):7.3f}..{max(ratios):.3f} {own:12.2%} {counts}  "
        f"{savings.reference_precision}",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--every", default="10,50")
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = f"{options.threads} training threads on {os.cpu_count()} cores, {platform.machine()}"
    print(f"batch {options.batch}, {machine}, torch {torch.__version__}, lightning {L.__version__}")
    print("model      every      without   with/without    range  in the thread  done  late dropped  reference")
    for every in options.every.split(","):
        measure(options.model, options.batch, int(every), options.pairs)


if __name__ == "__main__":
    main()
