"""Are the frozen layers really left out? Epochs from the cache, over those of a network that is cut by hand.

Two equal models train under a Trainer each, in turn: one with the callback and the cache, whose entries are on disk
from the first run on; of the other only the back is there, cut at the same place, and a DataLoader feeds it the
activations from memory. Printed are, for each depth, the median times of a step, with everything between two steps,
and the median ratios of neighbours of a step and of an epoch, with everything between two epochs.

    python -m benchmarks.cached_step [--model resnet56|resnet18|vit] [--batch-size 32] [--pairs 5]
        [--depths 1 14 27] [--host-bytes N] [--device cuda]
"""

import argparse
import contextlib
import io
import itertools
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from timm.models import ResNet, VisionTransformer, create_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.proof.run import quiet
from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.caching import stats
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


def new_net(name: str) -> nn.Module:
    """Equal at each call."""
    torch.manual_seed(0)
    if name == "vit":
        return VisionTransformer(img_size=32, patch_size=4, embed_dim=192, depth=12, num_heads=3, num_classes=10)
    if name == "resnet18":
        return create_model("resnet18", num_classes=10)
    return CifarResNet(int(name.removeprefix("resnet")))


class Pool(nn.Module):
    """The mean over the image."""

    def forward(self, features):
        return features.mean(dim=(2, 3))


class Token(nn.Module):
    """The one that the head of a vision transformer looks at."""

    def forward(self, tokens):
        return tokens[:, 0]


class Embedding(nn.Module):
    """The tokens that the first block of a vision transformer is given."""

    def __init__(self, net: VisionTransformer) -> None:
        super().__init__()
        self.net = net

    def forward(self, images):
        return self.net.norm_pre(self.net.patch_drop(self.net._pos_embed(self.net.patch_embed(images))))


def parts_of(net: nn.Module) -> list[nn.Module]:
    """What a careful user cuts it into: the parts that run one behind the other, the head among the last."""
    if isinstance(net, CifarResNet):
        stem = nn.Sequential(net.conv1, net.bn1, nn.ReLU())
        return [stem, *net.layer1, *net.layer2, *net.layer3, nn.Sequential(Pool(), net.linear)]
    if isinstance(net, ResNet):
        stem = nn.Sequential(net.conv1, net.bn1, net.act1, net.maxpool)
        layers = [*net.layer1, *net.layer2, *net.layer3, *net.layer4]
        return [stem, *layers, nn.Sequential(net.global_pool, net.fc)]
    return [Embedding(net), *net.blocks, nn.Sequential(net.norm, Token(), net.fc_norm, net.head_drop, net.head)]


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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--depths", type=int, nargs="+", help="frozen depths to measure; all by default")
    parser.add_argument("--host-bytes", type=int, default=10**9)
    parser.add_argument("--size", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    options = parser.parse_args()
    stats.COMPARED_STEPS = sys.maxsize  # or it would stop where it does not pay
    device = options.device
    images = torch.randn(BATCHES * options.batch_size, 3, options.size, options.size)
    labels = torch.randint(10, (len(images),))
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{options.model}, batch {options.batch_size}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, {hardware}, host_bytes={options.host_bytes}"
    )
    print("frozen     cached    by hand   cached/by hand   epochs")

    def loader(rows: torch.Tensor) -> DataLoader:
        return DataLoader(TensorDataset(rows, labels), options.batch_size, shuffle=True)

    ratios = []
    for frozen in options.depths or range(1, len(parts_of(new_net(options.model)))):
        cut = parts_of(new_net(options.model))
        with torch.no_grad():
            front = nn.Sequential(*cut[:frozen]).eval()
            activations = torch.cat([front(batch) for batch in images.split(options.batch_size)])
        pairs = []
        with tempfile.TemporaryDirectory() as cache_dir:
            for _ in range(options.pairs + 1):
                freezing = KnowledgeGuidedFreezing(ScriptedPolicy({1: frozen}))
                cache = FrozenPrefixCache(
                    loader(images), cache_dir=cache_dir, min_free_bytes=0, host_bytes=options.host_bytes
                )
                ours = train(new_net(options.model), cache, device, freezing)
                assert freezing.frozen_depth == frozen
                assert cache.stats.values, cache.stats
                by_hand = nn.Sequential(*parts_of(new_net(options.model))[frozen:])
                pairs.append((ours, train(by_hand, loader(activations), device)))
        del pairs[0]  # it records
        step, epoch = (statistics.median(ours[i] / hand[i] for ours, hand in pairs) for i in (0, 1))
        ours, hand = (statistics.median(one[0] for one in column) for column in zip(*pairs, strict=True))
        ratios.append(step)
        times = f"{ours * 1e3:7.2f} ms {hand * 1e3:7.2f} ms"
        print(f"{frozen:6d} {times} {step:16.3f} {epoch:8.3f}", flush=True)
    print(f"cached/by hand: median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
