"""What a cached step costs beside one whose features were stored by hand: CPU time of whole fits, in turns.

A backbone that the user has frozen stands behind a head of one or three layers. One run has `FrozenPrefixCache` and
nothing else, with entries on disk from a run before; of the other only the head is there, and a DataLoader feeds it the
features from memory. Both train equally, which is checked. Printed are, for each network and head, the CPU milliseconds
of a step in each run (all threads of the process, the loader and Lightning included; the first epoch left out), the
difference, and how long a step without either takes. The median of the steps counts, and the mean, which has the
batches in which entries are compared with what the backbone computes.

    python -m benchmarks.cached_step [--networks resnet18 vit_small minilm] [--batch-size 32] [--pairs 3]
"""

import argparse
import contextlib
import io
import itertools
import platform
import statistics
import tempfile
import time
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback
from timm.models import create_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.proof.run import quiet
from lightning_egeria import FrozenPrefixCache

BATCHES, EPOCHS = 16, 30


class Encoder(nn.Module):
    """As large as MiniLM (six layers of 384), with the mean over the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30_000, 384)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(384, 12, 1536, dropout=0, batch_first=True) for _ in range(6)
        )

    def forward(self, ids):
        states = self.embedding(ids)
        for layer in self.layers:
            states = layer(states)
        return states.mean(1)


def backbone_of(name: str) -> tuple[nn.Module, int, torch.Tensor]:
    """A network without a head, equal at each call, its width, and one sample."""
    torch.manual_seed(0)
    if name == "minilm":
        return Encoder(), 384, torch.randint(30_000, (16,))
    if name == "vit_small":
        return create_model("vit_small_patch16_224", img_size=64, num_classes=0), 384, torch.randn(3, 64, 64)
    return create_model(name, num_classes=0), 512, torch.randn(3, 64, 64)


def head_of(width: int, layers: int) -> nn.Module:
    """A linear layer, or a perceptron."""
    torch.manual_seed(1)
    hidden = [part for _ in range(layers - 1) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


class Model(lightning.LightningModule):
    """Trains a head behind a frozen backbone, or by itself."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone.requires_grad_(False).eval(), head

    def on_train_epoch_start(self) -> None:
        self.backbone.eval()

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0])), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.01)


class Times(Callback):
    """CPU time at the beginning of each epoch and step."""

    def __init__(self) -> None:
        self.epochs: list[float] = []
        self.steps: list[float] = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append(time.process_time())

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.steps.append(time.process_time())

    def on_train_end(self, trainer, pl_module):
        self.epochs.append(time.process_time())

    def milliseconds(self) -> tuple[float, float]:
        """Of a step from the second epoch on: the median, and the mean with everything between epochs."""
        steps = [later - one for one, later in itertools.pairwise(self.steps)]
        inside = [one for at, one in enumerate(steps) if at >= BATCHES and (at + 1) % BATCHES]
        mean = (self.epochs[-1] - self.epochs[1]) / (len(self.epochs) - 2) / BATCHES
        return 1e3 * statistics.median(inside), 1e3 * mean


def fitted(model: Model, data: Any) -> tuple[tuple[float, float], torch.Tensor]:
    """Milliseconds of a step, and the trained weights."""
    times = Times()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[times],
    )
    torch.manual_seed(2)
    with quiet(), contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(model, data)
    return times.milliseconds(), nn.utils.parameters_to_vector(model.head.parameters()).detach()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["resnet18", "vit_small", "minilm"])
    parser.add_argument("--heads", type=int, nargs="+", default=[1, 3], help="numbers of layers")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"batch {options.batch_size}, one thread, torch {torch.__version__}, lightning {lightning.__version__}, "
        f"{platform.machine()}\n"
    )
    print("| network | head | plain, ms | cached, ms (mean) | by hand, ms (mean) | difference, ms |")
    print("|---|---|---|---|---|---|")
    for name in options.networks:
        _, width, sample = backbone_of(name)
        draw = torch.Generator().manual_seed(0)
        count = BATCHES * options.batch_size
        if sample.is_floating_point():
            samples = torch.randn(count, *sample.shape, generator=draw)
        else:
            samples = torch.randint(30_000, (count, *sample.shape), generator=draw)
        labels = torch.randint(10, (count,), generator=draw)
        with torch.no_grad():
            backbone = backbone_of(name)[0].eval()
            started = time.process_time()
            features = torch.cat([backbone(batch) for batch in samples.split(options.batch_size)])
            forward = 1e3 * (time.process_time() - started) / BATCHES

        def loader(rows: torch.Tensor, labels: torch.Tensor = labels) -> DataLoader:
            return DataLoader(TensorDataset(rows, labels), options.batch_size, shuffle=True)

        for layers in options.heads:
            pairs = []
            with tempfile.TemporaryDirectory() as folder:
                for _ in range(options.pairs + 1):
                    cache = FrozenPrefixCache(loader(samples), cache_dir=folder, min_free_bytes=0)
                    ours, found = fitted(Model(backbone_of(name)[0], head_of(width, layers)), cache)
                    assert cache.stats.off is None, cache.stats.off
                    hand, wanted = fitted(Model(nn.Identity(), head_of(width, layers)), loader(features))
                    assert torch.equal(found, wanted)
                    pairs.append((ours, hand))
            del pairs[0]  # it writes the entries
            columns = [
                [statistics.median(one[at] for one in runs) for at in (0, 1)] for runs in zip(*pairs, strict=True)
            ]
            (ours, ours_mean), (hand, hand_mean) = columns
            more = statistics.median(one[0] - other[0] for one, other in pairs)
            times = f"{hand + forward:.0f} | {ours:.2f} ({ours_mean:.2f}) | {hand:.2f} ({hand_mean:.2f}) | {more:.2f}"
            print(f"| {name} | {layers} | {times} |", flush=True)


if __name__ == "__main__":
    main()
