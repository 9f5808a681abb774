"""Does the precision of the reference model drive decisions? One training run, measured by three references at once.

A ResNet-20 trains on CIFAR-10 without freezing. At every evaluation the same batch is compared with the same snapshot
in float32, bfloat16 and int8. Then each of the three series is given to a policy of its own. Printed is, per layer
module, the median of how far a low-precision plasticity is from that in float32, in percent, and when each of the
policies would have frozen what; drawn are the series of some layer modules.

    python benchmarks/precision_noise.py --root DATA [--epochs 4] [--figure precision_noise.png]
"""

import argparse
import functools
import statistics
import unittest.mock
from typing import ClassVar

import lightning as L
import matplotlib as mpl
import torch
from matplotlib import pyplot as plt

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from lightning_egeria.core.network.calls import crop_calls
from lightning_egeria.demos.classifier import ImageClassifier
from lightning_egeria.demos.data import Cifar10Data
from lightning_egeria.demos.resnet import CifarResNet
from lightning_egeria.freezing import callback as callback_module
from lightning_egeria.freezing.precision import SnapshotNetwork
from lightning_egeria.freezing.reference import EvaluationResult, plasticity_between

PRECISIONS = ("float32", "bf16", "int8")


class Threefold:
    """A reference model in every precision; answers with float32 and keeps all."""

    seen: ClassVar[list[dict[str, tuple[float, ...]]]] = []

    def __init__(self, chain, samples, precision, crops) -> None:
        self.chain, self.samples = chain, samples

    def __call__(self, evaluation, snapshot) -> EvaluationResult:
        if snapshot is not None:
            self.networks = self.in_all_precisions(snapshot)
        calls = crop_calls(evaluation.calls, self.samples)
        moved = self.in_all_precisions(evaluation.network)
        by_batch = moved["float32"].batch_norms
        found = {
            name: plasticity_between(network, moved[name], calls, 0, by_batch)
            for name, network in self.networks.items()
        }
        plasticity, samples = found["float32"]
        if samples == self.samples:
            self.seen.append({name: values for name, (values, _) in found.items()})
        return EvaluationResult(plasticity, samples, True, "float32", "of the benchmark", 0.0)

    def in_all_precisions(self, modules) -> dict[str, SnapshotNetwork]:
        full = SnapshotNetwork(modules, self.chain, self.samples)
        return {"float32": full, "bf16": full.lowered("bf16"), "int8": full.lowered("int8")}


class Watching(FreezingPolicy):
    """Sees everything, at any learning rate, and decides nothing."""

    wants_reference = True
    told: ClassVar[list[tuple]] = []

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        self.told.append((step, plasticity, learning_rate, loss))


def train(root: str, epochs: int) -> list[str]:
    """One run; returns the names of the layer modules."""
    L.seed_everything(0, verbose=False)
    freezing = KnowledgeGuidedFreezing(Watching(), background=False)
    schedule = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR)
    model = ImageClassifier(
        CifarResNet(20, 10),
        num_classes=10,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=1e-4),
        scheduler=schedule,
        scheduler_interval="step",
        scheduler_length_name="T_max",
    )
    with unittest.mock.patch.object(callback_module, "ReferenceModel", Threefold):
        trainer = L.Trainer(
            max_epochs=epochs, accelerator="cpu", callbacks=[freezing], logger=False, enable_checkpointing=False
        )
        trainer.fit(model, datamodule=Cifar10Data(root))
    return freezing.layer_modules


def decisions(precision: str, depth: int) -> list[tuple[int, int]]:
    """Steps and depths at which a policy freezes, if it is given the series of one precision."""
    policy, made = FreezingPolicy(), []
    policy.start(depth)
    series = iter(Threefold.seen)
    for step, plasticity, learning_rate, loss in Watching.told:
        given = next(series)[precision] if plasticity is not None else None
        decision = policy.observe(step, given, learning_rate, loss)
        if decision is not None:
            made.append((step, decision.depth))
    return made


def draw(names: list[str], path: str) -> None:
    """The series of some layer modules, in each precision."""
    mpl.use("Agg")
    steps = [step for step, plasticity, *_ in Watching.told if plasticity is not None]
    shown = [0, len(names) // 3, 2 * len(names) // 3, len(names) - 1]
    figure, axes = plt.subplots(1, len(shown), figsize=(13, 3.2), sharex=True, layout="constrained")
    for axis, index in zip(axes, shown, strict=True):
        for name, style in zip(PRECISIONS, ("-", "--", ":"), strict=True):
            values = [entry[name][index] for entry in Threefold.seen[: len(steps)]]
            axis.plot(steps, values, style, label=name, linewidth=1.2)
        axis.set(title=names[index], yscale="log", xlabel="optimizer step")
    axes[0].set_ylabel("plasticity")
    axes[-1].legend()
    figure.savefig(path, dpi=110)
    print(f"figure: {path}")


def main() -> None:
    """Train, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", help="folder of CIFAR-10")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--figure", default="precision_noise.png")
    options = parser.parse_args()
    if options.root is None:
        print("skipped: needs --root")
        return
    names = train(options.root, options.epochs)
    print(f"ResNet-20, CIFAR-10, {options.epochs} epochs, {len(Threefold.seen)} evaluations, torch {torch.__version__}")
    print("layer module          bf16 off by   int8 off by")
    for index, name in enumerate(names):
        off = [
            statistics.median(abs(entry[low][index] / entry["float32"][index] - 1) for entry in Threefold.seen)
            for low in PRECISIONS[1:]
        ]
        print(f"{name:20s} {off[0]:12.2%} {off[1]:13.2%}")
    for precision in PRECISIONS:
        frozen = ", ".join(f"{depth} at step {step}" for step, depth in decisions(precision, len(names) - 1))
        print(f"{precision:8s} freezes {frozen or 'nothing'}")
    draw(names, options.figure)


if __name__ == "__main__":
    main()
