"""What does AdaptiveBatchSize cost while the batch size stays, and does it choose as well as a grid of fixed sizes?

Without ``--data``: ResNet-20 on random images; blocks of steps that are measured alternate with blocks that are not, in
one run. Printed is the ratio of their mean step times: the median over neighbouring blocks, with its range.

With ``--data``, a folder with CIFAR-10: a run for each fixed batch size with the same rule for the learning rate, and
one that adapts. Printed are the seconds of training to the accuracy that the initial batch size ends with.

    python benchmarks/goodput.py [--batch 32] [--pairs 10] [--block 20]
    python benchmarks/goodput.py --data FOLDER [--batch 32] [--sizes 32,64,128,256] [--epochs 10] [--seed 0]
"""

import argparse
import statistics
import time

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import AdaptiveBatchSize
from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.demos.data import Cifar10Data
from lightning_egeria.demos.resnet import CifarResNet

QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


def model(lr: float) -> ImageClassifier:
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9, weight_decay=1e-4)

    return ImageClassifier(CifarResNet(20), num_classes=10, optimizer=optimizer)


class Blocks(L.Callback):
    """Mean seconds of a step by block."""

    def __init__(self, steps: int) -> None:
        self.steps, self.means, self._began = steps, [], 0.0

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % self.steps == 0:
            now = time.perf_counter()
            if self._began:
                self.means.append((now - self._began) / self.steps)
            self._began = now


def seconds_of(data, steps: int) -> float:
    blocks = Blocks(steps)
    trainer = L.Trainer(accelerator="cpu", max_steps=2 * steps, max_epochs=-1, callbacks=[blocks], **QUIET)
    trainer.fit(model(0.1), data)
    return blocks.means[0]


def overhead(options) -> None:
    images = torch.randn(options.batch * 50, 3, 32, 32)
    data = TensorDataset(images, torch.arange(len(images)) % 10)
    ratios = []
    for _ in range(options.pairs):
        plain = seconds_of(DataLoader(data, options.batch), options.block)
        measured = AdaptiveBatchSize(DataLoader(data, options.batch), options.batch)
        ratios.append(seconds_of(measured, options.block) / plain)
        print(f"{plain * 1e3:.1f} ms a step, {ratios[-1]:.4f} of it with AdaptiveBatchSize", flush=True)
    print(f"ratio {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


class Curve(L.Callback):
    """Accuracy after each epoch, by seconds of training without validation."""

    def __init__(self) -> None:
        self.points, self._spent, self._began = [], 0.0, 0.0

    def on_train_epoch_start(self, trainer, pl_module):
        self._began = time.perf_counter()

    def on_validation_start(self, trainer, pl_module):
        self._spent += time.perf_counter() - self._began if self._began else 0.0

    def on_validation_end(self, trainer, pl_module):
        self.points.append((self._spent, float(trainer.callback_metrics["val/acc"])))


def grid(options) -> None:
    sizes = [int(size) for size in options.sizes.split(",")]
    curves = {}
    for size in [*sizes, None]:
        L.seed_everything(options.seed, verbose=False)
        inner = Cifar10Data(options.data, batch_size=options.batch)
        data = AdaptiveBatchSize(inner, max(sizes), batch_sizes={0: size} if size else None)
        curve = Curve()
        trainer = L.Trainer(
            accelerator="auto", max_epochs=options.epochs, num_sanity_val_steps=0, callbacks=[curve], **QUIET
        )
        trainer.fit(model(0.1), data)
        curves[size] = curve.points
        print(f"{size or 'adaptive'}: {curve.points[-1]} {[(c.step, c.batch_size) for c in data.changes]}", flush=True)
    target = curves[sizes[0]][-1][1]
    for size, points in curves.items():
        reached = next((f"{seconds:.1f} s" for seconds, accuracy in points if accuracy >= target), "not reached")
        print(f"{size or 'adaptive'}: {reached} to {target:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--sizes", default="32,64,128,256")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    grid(chosen) if chosen.data else overhead(chosen)
