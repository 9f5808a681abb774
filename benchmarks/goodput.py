"""What does AdaptiveBatchSize cost while the batch size stays, and does it choose as well as a grid of fixed sizes?

Without ``--data``: ResNet-20 on random images; runs that measure alternate with plain ones. Printed is the ratio of
their mean step times: the median over pairs of runs, with its range.

With ``--data``, a folder with CIFAR-10: a run for each fixed batch size with the same rule for the learning rate, and
two that adapt: by the times of this machine, and by those of a device that takes ``--device A,B``, ``A + B m`` seconds
for a batch of ``m`` samples. The first size trains for ``--epochs``; the mean accuracy of its last three is the target
of all, which have three times as many. Printed are the seconds of training to the target: by the clock, and as the
sum of each batch's seconds, fitted to the times of all runs or those of the device. The sums do not depend on what else
the machine does. With several ``--ranks`` they count each rank's own samples, without the exchange of gradients.

    python benchmarks/goodput.py [--batch 32] [--pairs 10] [--block 20]
    python benchmarks/goodput.py --data FOLDER [--images 2000] [--sizes 32,128,256] [--epochs 10] [--seeds 0,1,2]
"""

import argparse
import statistics
import time
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import AdaptiveBatchSize
from lightning_egeria.cluster.throughput import ThroughputModel
from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.demos.data import Cifar10Data
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.methods.goodput.profile import Profile

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
    """Accuracy after each epoch, by seconds of training without validation, and the samples of each batch."""

    def __init__(self, target: float | None) -> None:
        self.target = target
        self.points, self.batches, self.times, self._spent, self._began = [], [], {}, 0.0, 0.0

    def on_train_epoch_start(self, trainer, pl_module):
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.batches.append(len(batch[0]))

    def on_validation_start(self, trainer, pl_module):
        self._spent += time.perf_counter() - self._began if self._began else 0.0

    def on_validation_end(self, trainer, pl_module):
        self.points.append((self._spent, len(self.batches), float(trainer.callback_metrics["val/acc"])))
        trainer.should_stop |= self.target is not None and self.points[-1][2] >= self.target


def curve_of(
    options, seed: int, target: float | None, size: int | None = None, device: tuple[float, float] | None = None
) -> Curve:
    """Train with a fixed batch size, or with one that adapts to this machine or to a device, until a target."""
    L.seed_everything(seed, verbose=False)
    inner = Cifar10Data(options.data, batch_size=options.batch, train_size=options.images, val_size=options.validation)
    data = AdaptiveBatchSize(
        inner,
        max(options.sizes),
        batch_sizes={0: size} if size else None,
        learning_rate="adascale",
        change_every_n_steps=options.every,
    )
    curve = Curve(target)
    epochs = options.epochs * (1 if target is None else 3)
    where = {"strategy": "ddp", "accelerator": "cpu", "devices": options.ranks} if options.ranks > 1 else {}
    trainer = L.Trainer(max_epochs=epochs, num_sanity_val_steps=0, callbacks=[curve], **where, **QUIET)
    add = Profile.add

    def on_device(profile, where, seconds, *others, **more):
        add(profile, where, device[0] + device[1] * where.local if device else seconds, *others, **more)

    with mock.patch.object(Profile, "add", on_device):
        trainer.fit(model(options.lr), data)
    changes = [(change.step, change.batch_size) for change in data.changes]
    curve.times = data.control.profile.measured(0)
    tell(f"seed {seed}, {size or device or 'adaptive'}: {curve.points[-1][2]:.4f} after {curve.points[-1][0]:.1f} s")
    tell(f"  {data.control.noise.scale * options.batch:.0f} samples of noise; {changes}")
    return curve


def reached(curve: Curve, target: float, seconds_of_batch: ThroughputModel | None = None) -> float:
    """Return the seconds to an accuracy: by the clock, or by those of each batch; infinite if it was not reached."""
    for seconds, batches, accuracy in curve.points:
        if accuracy >= target:
            if seconds_of_batch is None:
                return seconds
            return float(seconds_of_batch.gradient_seconds(curve.batches[:batches]).sum())
    return float("inf")


def grid(options) -> None:
    free = 1e-8  # one device exchanges nothing
    device = ThroughputModel(options.device, (free, free), (free, free), 1.0)
    rows = {}
    for seed in options.seeds:
        first = curve_of(options, seed, None, options.sizes[0])
        target = statistics.fmean(accuracy for *_, accuracy in first.points[-3:])
        curves = {options.sizes[0]: first}
        curves |= {size: curve_of(options, seed, target, size) for size in options.sizes[1:]}
        curves["adaptive"] = curve_of(options, seed, target)
        pooled = Profile()
        for curve in curves.values():
            for where, (seconds, _) in curve.times.items():
                pooled.add(where, seconds, False)
        here = pooled.fit(0)
        tell(f"  seconds of a batch: {here.compute[0]:.4f} + {here.compute[1]:.5f} m")
        curves["adaptive, on the device"] = curve_of(options, seed, target, device=options.device)
        for name, curve in curves.items():
            found = [curve.points[-1][2]] + [reached(curve, target, model) for model in (None, here, device)]
            rows.setdefault(name, []).append(found)
        print_table(rows)


def print_table(rows) -> None:
    tell("\n| batch size | accuracy | s by the clock | s by the fit | s on the device |\n|---|---|---|---|---|")
    for name, found in rows.items():
        accuracies, *seconds = zip(*found, strict=True)
        cells = [" ".join(f"{value:.3f}" for value in accuracies)]
        cells += [" ".join(f"{value:.1f}" for value in values) for values in seconds]
        tell(f"| {name} | {' | '.join(cells)} |")


def tell(line: str) -> None:
    """Print on the first rank."""
    if rank_zero_only.rank == 0:
        print(line, flush=True)


def numbers(kind):
    return lambda text: tuple(kind(part) for part in text.split(","))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--ranks", type=int, default=1, help="processes, of which each has --batch samples at first")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--block", type=int, default=20)
    parser.add_argument("--images", type=int, help="training images; all without it")
    parser.add_argument("--validation", type=int, default=1000, help="validation images")
    parser.add_argument("--sizes", type=numbers(int), default=(32, 64, 128, 256), help="the first is the initial one")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--every", type=int, default=20, help="steps between two decisions")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seeds", type=numbers(int), default=(0,))
    parser.add_argument("--device", type=numbers(float), default=(0.02, 0.00005), help="seconds, seconds a sample")
    chosen = parser.parse_args()
    grid(chosen) if chosen.data else overhead(chosen)
