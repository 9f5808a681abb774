"""Is the backward that a freeze saves really saved? Step time at each depth, over the same step frozen by hand.

Two equal networks train under a Trainer each, in turn: one with the callback and a scripted policy, one with the same
front frozen by hand. Printed are, for each depth, the median time of a step of both, the median of the ratio of
neighbours, and what is left of a step with nothing frozen.

    python -m benchmarks.step_time [--depth 56] [--batch-size 32] [--pairs 3] [--every 9]
"""

import argparse
import contextlib
import io
import itertools
import platform
import statistics
import time
from dataclasses import dataclass, field

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.proof.run import quiet
from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.demos.resnet import CifarResNet

BATCHES = 16
EPOCHS_BEFORE = 3  # one finds the chain and freezes, one records, one reads everything once
EPOCHS = 4  # that are timed


class Model(lightning.LightningModule):
    """Trains a network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


def new_net(name: str) -> CifarResNet:
    """Equal at each call."""
    torch.manual_seed(0)
    return CifarResNet(int(name.removeprefix("resnet")))


class Pool(nn.Module):
    """The mean over the image."""

    def forward(self, features):
        return features.mean(dim=(2, 3))


def parts_of(net: CifarResNet) -> list[nn.Module]:
    """What a careful user cuts it into: the parts that run one behind the other, the head among the last."""
    stem = nn.Sequential(net.conv1, net.bn1, nn.ReLU())
    return [stem, *net.layer1, *net.layer2, *net.layer3, nn.Sequential(Pool(), net.linear)]


@dataclass
class Times(Callback):
    """Notes when steps and epochs begin."""

    device: torch.device
    steps: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append(self._now())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.current_epoch >= EPOCHS_BEFORE:
            self.steps.append(self._now())

    def medians(self) -> tuple[float, float]:
        """Seconds from a step to the next one of its epoch, and from an epoch to the next one."""
        epochs = [later - one for one, later in itertools.pairwise(self.epochs[EPOCHS_BEFORE:])]
        steps = [later - one for one, later in itertools.pairwise(self.steps)]
        del steps[BATCHES - 1 :: BATCHES]
        return statistics.median(steps), statistics.median(epochs)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def train(net: nn.Module, data: object, device: torch.device, *callbacks: Callback) -> tuple[float, float]:
    """Train, and return the seconds of a step and of an epoch."""
    times = Times(device)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS_BEFORE + EPOCHS + 1,
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times, *callbacks],
    )
    named = {"datamodule" if isinstance(data, lightning.LightningDataModule) else "train_dataloaders": data}
    with quiet(), contextlib.redirect_stdout(io.StringIO()):  # the callback prints a table
        trainer.fit(Model(net), **named)
    return times.medians()


def frozen_by_hand(name: str, frozen: int) -> nn.Module:
    """What a careful user writes: the first parts without gradients, in evaluation mode."""
    net = new_net(name)
    for part in parts_of(net)[:frozen]:
        part.requires_grad_(False).eval()
    return net


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=56, help="of the ResNet")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--every", type=int, default=9, help="measure every n-th depth")
    options = parser.parse_args()
    name, device = f"resnet{options.depth}", torch.device("cpu")
    rows = BATCHES * options.batch_size
    data = TensorDataset(torch.randn(rows, 3, 32, 32), torch.randint(10, (rows,)))
    loader = DataLoader(data, options.batch_size, shuffle=True)
    print(
        f"ResNet-{options.depth}, batch {options.batch_size}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, lightning {lightning.__version__}, {platform.machine()}"
    )
    print("frozen   callback    by hand   callback/by hand   of a full step")
    full, ratios = None, []
    for frozen in range(0, len(parts_of(new_net(name))) - 1, options.every):
        pairs = []
        for _ in range(options.pairs):
            freezing = KnowledgeGuidedFreezing(ScriptedPolicy({1: frozen}))
            ours, _ = train(new_net(name), loader, device, freezing)
            assert freezing.frozen_depth == frozen
            pairs.append((ours, train(frozen_by_hand(name, frozen), loader, device)[0]))
        ours, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios.append(statistics.median(a / b for a, b in pairs))
        full = full or hand
        print(
            f"{frozen:6d} {ours * 1000:8.1f} ms {hand * 1000:7.1f} ms {ratios[-1]:18.3f} {ours / full:16.3f}",
            flush=True,
        )
    print(f"callback/by hand: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
