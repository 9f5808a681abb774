"""Are the frozen layers really left out? Time of a step from the cache, over that of a network cut off by hand.

Two equal models take training steps in turn: one under the callback and the cache, all of whose entries are there, on
disk in the page cache; the other is cut by hand at the same place and is given the activations from memory. Printed
are, for each depth, both medians and the median of the ratio of neighbours; the same ratio with the fetch, all that the
training thread does between two steps to get its batch in one process, where the other has nothing to do; and what is
left, fetch included, of a step with nothing frozen.

With ``--epochs`` whole epochs are timed in turn instead, everything between two epochs included; the network cut by
hand then reads its activations by a DataLoader of its own.

    python benchmarks/cached_step.py [--model resnet56|resnet18|vit] [--batch-size 32] [--pairs 15]
        [--depths 1 14 27] [--host-bytes N] [--epochs] [--device cuda]
"""

import argparse
import itertools
import platform
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Iterator

import lightning
import torch
from lightning.pytorch.loops.fetchers import _DataFetcher
from timm.models import ResNet, VisionTransformer, create_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.caching import stats
from lightning_egeria.demos.resnet import CifarResNet

BATCHES = 12
EPOCHS_BEFORE = 3  # one finds the chain and freezes, one records, one reads everything once


class Model(lightning.LightningModule):
    """The network under test."""

    def __init__(self, name: str) -> None:
        super().__init__()
        vit = {"img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 12, "num_heads": 3, "num_classes": 10}
        if name == "vit":
            self.net = VisionTransformer(**vit)
        elif name == "resnet18":
            self.net = create_model("resnet18", num_classes=10)
        else:
            self.net = CifarResNet(int(name.removeprefix("resnet")))


def new_model(name: str, device: torch.device) -> Model:
    """Equal at each call."""
    torch.manual_seed(0)
    return Model(name).to(device)


def now(device: torch.device) -> float:
    """The time at which the device has done its work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def parts_of(net: nn.Module) -> tuple[list[nn.Module], nn.Module]:
    """What a careful user cuts it into: the parts that run one behind the other, and the head."""
    if isinstance(net, CifarResNet):
        stem = nn.Sequential(net.conv1, net.bn1, nn.ReLU())
        head = nn.Sequential(Pool(), net.linear)
        return [stem, *net.layer1, *net.layer2, *net.layer3], head
    if isinstance(net, ResNet):
        stem = nn.Sequential(net.conv1, net.bn1, net.act1, net.maxpool)
        return [stem, *net.layer1, *net.layer2, *net.layer3, *net.layer4], nn.Sequential(net.global_pool, net.fc)
    return [*net.blocks], nn.Sequential(net.norm, Token(), net.fc_norm, net.head_drop, net.head)


class Pool(nn.Module):
    """The mean over the image."""

    def forward(self, features):
        return features.mean(dim=(2, 3))


class Token(nn.Module):
    """The one that the head of a vision transformer looks at."""

    def forward(self, tokens):
        return tokens[:, 0]


class Fetcher(_DataFetcher):
    """Asks for the loader and its batches as Lightning's training loop does: all others get ordinary ones."""

    def loader(self, data: FrozenPrefixCache) -> DataLoader:
        return data.train_dataloader()

    def batches(self, loader: DataLoader) -> Iterator:
        return iter(loader)


class Loop:
    """Training with the callback and the cache, hook by hook as Lightning does it; one call is one step."""

    def __init__(
        self,
        name: str,
        frozen: int,
        data: TensorDataset,
        batch_size: int,
        cache_dir: str,
        host_bytes: int,
        device: torch.device,
    ):
        self.model, self.device = new_model(name, device), device
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.callback = KnowledgeGuidedFreezing(ScriptedPolicy({1: frozen} if frozen else {}))
        loader = DataLoader(data, batch_size, shuffle=True)
        self.cache = FrozenPrefixCache(loader, cache_dir=cache_dir, min_free_bytes=0, host_bytes=host_bytes)
        steps = 10**6
        self.trainer = types.SimpleNamespace(
            callbacks=[self.callback],
            current_epoch=0,
            global_step=0,
            optimizers=[self.optimizer],
            fast_dev_run=False,
            overfit_batches=0,
            estimated_stepping_batches=steps,
            num_training_batches=steps,
            limit_train_batches=1.0,
            accumulate_grad_batches=1,
            progress_bar_callback=None,
            loggers=[],
            _data_connector=types.SimpleNamespace(
                _datahook_selector=None, _prepare_dataloader=lambda loader, *_: loader
            ),
            fit_loop=types.SimpleNamespace(),
            strategy=types.SimpleNamespace(model=None, root_device=device),
        )
        self.cache.trainer = self.trainer
        self.cache.setup("fit")
        self.fetcher = Fetcher()
        self.loader = self.fetcher.loader(self.cache)
        self.callback.on_fit_start(self.trainer, self.model)
        self.callback.on_train_start(self.trainer, self.model)
        self.batches = iter(())

    def step(self) -> tuple[float, float]:
        """Seconds of one step without the fetch of its batch, and with it. What begins an epoch is not counted."""
        started = now(self.device)
        batch = next(self.batches, None)
        if batch is None:
            self.batches = self.fetcher.batches(self.loader)
            started = now(self.device)
            batch = next(self.batches)
        fetched = time.perf_counter()
        batch = [part.to(self.device, non_blocking=True) for part in batch]
        hooks, trainer, model = self.callback, self.trainer, self.model
        hooks.on_train_batch_start(trainer, model, batch, trainer.global_step)
        images, labels = batch
        loss = nn.functional.cross_entropy(model.net(images), labels)
        self.optimizer.zero_grad()
        hooks.on_before_backward(trainer, model, loss)
        loss.backward()
        hooks.on_after_backward(trainer, model)
        self.optimizer.step()
        trainer.global_step += 1
        hooks.on_train_batch_end(trainer, model, None, batch, trainer.global_step - 1)
        ended = now(self.device)
        return ended - fetched, ended - started

    def epoch(self) -> float:
        """Seconds of an epoch, with what begins it."""
        started = time.perf_counter()
        for _ in range(BATCHES):
            self.step()
        return time.perf_counter() - started

    def close(self) -> None:
        self.batches = iter(())
        self.cache.teardown("fit")
        self.callback.teardown(self.trainer, self.model, "fit")


class CutByHand:
    """The back of the network, from activations in memory."""

    def __init__(self, name: str, front: int, data: TensorDataset, batch_size: int, device: torch.device) -> None:
        net, self.device = new_model(name, device).net, device
        parts, head = parts_of(net)
        self.batches = []
        for images, labels in DataLoader(data, batch_size):
            with torch.no_grad():
                images = images.to(device)
                if isinstance(net, VisionTransformer):
                    images = net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(images))))
                activations = nn.Sequential(*parts[:front]).eval()(images).cpu()
                self.batches.append((activations, labels))
        self.order = itertools.cycle(range(len(self.batches)))
        rows = TensorDataset(*(torch.cat(column) for column in zip(*self.batches, strict=True)))
        self.loader = DataLoader(rows, batch_size, shuffle=True)
        if device.type == "cuda":
            self.batches = [tuple(part.pin_memory() for part in batch) for batch in self.batches]
        self.back = nn.Sequential(*parts[front:], head).train()
        self.optimizer = torch.optim.SGD(self.back.parameters(), lr=0.01, momentum=0.9)

    def epoch(self) -> float:
        """Seconds of an epoch, fed by a DataLoader."""
        started = time.perf_counter()
        for activation, labels in self.loader:
            self.step(activation, labels)
        return time.perf_counter() - started

    def next_step(self) -> float:
        """Seconds of a step on the next batch in memory."""
        return self.step(*self.batches[next(self.order)])

    def step(self, activation: torch.Tensor, labels: torch.Tensor) -> float:
        """Seconds of one step."""
        started = now(self.device)
        activation, labels = (part.to(self.device, non_blocking=True) for part in (activation, labels))
        loss = nn.functional.cross_entropy(self.back(activation), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return now(self.device) - started


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet56")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--depths", type=int, nargs="+", help="frozen depths to measure; all by default")
    parser.add_argument("--host-bytes", type=int, default=10**9)
    parser.add_argument("--size", type=int, default=32, help="of the images, in pixels")
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--epochs", action="store_true", help="time whole epochs, of which --pairs are compared")
    options = parser.parse_args()
    stats.COMPARED_STEPS = sys.maxsize  # or it would stop where it does not pay
    images = torch.randn(BATCHES * options.batch_size, 3, options.size, options.size)
    data = TensorDataset(images, torch.randint(10, (len(images),)))
    device = options.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    print(
        f"{options.model}, batch {options.batch_size}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, {hardware}, host_bytes={options.host_bytes}"
    )
    net = new_model(options.model, device).net
    parts, _ = parts_of(net)
    is_vit = isinstance(net, VisionTransformer)
    print("frozen     cached    by hand   cached/by hand   with the fetch   of a full step")
    uncut = CutByHand(options.model, 0, data, options.batch_size, device)
    ratios_of_depths = []
    # Depth 1 of the transformer is the embedding, which is no part.
    for frozen in options.depths or range(1, len(parts) + is_vit):
        with tempfile.TemporaryDirectory() as cache_dir:
            loop = Loop(options.model, frozen, data, options.batch_size, cache_dir, options.host_bytes, device)
            by_hand = CutByHand(options.model, frozen - is_vit, data, options.batch_size, device)
            for _ in range(EPOCHS_BEFORE * BATCHES):
                loop.step()
                by_hand.next_step()
            if options.epochs:
                pairs = [(loop.epoch(), by_hand.epoch()) for _ in range(options.pairs)]
                misses = loop.cache.stats.misses
                loop.close()
                ratio = statistics.median(ours / hand for ours, hand in pairs)
                ours, hand = (statistics.median(column) for column in zip(*pairs, strict=True))
                ratios_of_depths.append(ratio)
                print(f"{frozen:6d} {ours * 1e3:7.0f} ms {hand * 1e3:7.0f} ms {ratio:16.3f}  epochs, {misses} misses")
                continue
            triples, fulls = [], []
            before = loop.cache.stats.misses
            for index in range(options.pairs):
                if index % 2:  # who goes first changes, or a drift of the machine would favour one
                    hand = by_hand.next_step()
                    triples.append((*loop.step(), hand))
                else:
                    triples.append((*loop.step(), by_hand.next_step()))
                fulls.append(uncut.next_step())
            misses = loop.cache.stats.misses - before
            assert loop.callback.frozen_depth == loop.cache.stats.depth == frozen, loop.cache.stats
            loop.close()
        ours, with_fetch, hand = (statistics.median(column) for column in zip(*triples, strict=True))
        ratio, fetch_ratio = (statistics.median(triple[i] / triple[2] for triple in triples) for i in (0, 1))
        ratios_of_depths.append(ratio)
        full = statistics.median(fulls)
        # A spot check takes a whole step, and reads the input.
        note = f"  {misses} samples ran the frozen layers, for a spot check" if misses else ""
        times = f"{ours * 1e3:7.2f} ms {hand * 1e3:7.2f} ms"
        print(f"{frozen:6d} {times} {ratio:16.3f} {fetch_ratio:16.3f} {with_fetch / full:16.3f}{note}", flush=True)
    print(f"cached/by hand: median {statistics.median(ratios_of_depths):.3f}, largest {max(ratios_of_depths):.3f}")


if __name__ == "__main__":
    main()
