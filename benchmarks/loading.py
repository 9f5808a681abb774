"""What is left of the time for loading data? An epoch of JPEGs with random augmentation, without and with the cache.

A small network is trained on JPEGs that are decoded, cropped at random, resized and mirrored in the training process;
from the first step on its front is frozen, and one view of each sample is cached. Printed is, for each epoch, the time
that training waits for its batches, reading of entries included, and its share of the same in the uncached run.

    python benchmarks/loading.py [--samples 50000] [--batch-size 128] [--workers 0]
"""

import argparse
import io
import platform
import tempfile
import time

import lightning
import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy

FILES = 500  # different JPEGs; sample i is made of file i % FILES
SIZE = 160


class Jpegs(Dataset):
    """Decoded and augmented when they are asked for, as in a folder of images."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        random = np.random.default_rng(0)
        self.files = []
        for _ in range(FILES):
            small = Image.fromarray(random.integers(0, 256, (10, 10, 3), np.uint8))
            buffer = io.BytesIO()
            small.resize((SIZE, SIZE), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
            self.files.append(buffer.getvalue())
        self.augment = v2.Compose(
            [
                v2.PILToTensor(),
                v2.RandomResizedCrop(64, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize((0.5,) * 3, (0.25,) * 3),
            ]
        )

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int):
        with Image.open(io.BytesIO(self.files[index % FILES])) as image:
            return self.augment(image.convert("RGB")), index % 10


class Small(lightning.LightningModule):
    """Its front gives 4 kB a sample."""

    def __init__(self) -> None:
        super().__init__()
        front = [nn.Conv2d(3, 8, 4, stride=4), nn.ReLU(), nn.Conv2d(8, 16, 2, stride=2), nn.ReLU()]
        self.net = nn.Sequential(*front, nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(576, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Waits(lightning.Callback):
    """Adds up, for each epoch, what training waits between the end of a batch and the beginning of the next."""

    def __init__(self) -> None:
        self.epochs = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.epochs.append(0.0)
        self.ended = time.perf_counter()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.epochs[-1] += time.perf_counter() - self.ended

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.ended = time.perf_counter()


def fit(data: Jpegs, options: argparse.Namespace, epochs: int, cache_dir: str | None) -> list[float]:
    """Seconds that each epoch waits."""
    lightning.seed_everything(0, verbose=False)
    waits = Waits()
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        # The one that measures is the first to hear of a batch's beginning and the last to hear of its end.
        callbacks=[waits, KnowledgeGuidedFreezing(ScriptedPolicy({1: 2}))],
    )
    loader = DataLoader(
        data,
        options.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    if cache_dir is None:
        trainer.fit(Small(), loader)
    else:
        trainer.fit(Small(), datamodule=FrozenPrefixCache(loader, cache_dir=cache_dir, augmentation_views=1))
    return waits.epochs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    print(
        f"{options.samples} samples, batch {options.batch_size}, {options.workers} workers, torch {torch.__version__}, "
        f"lightning {lightning.__version__}, {torch.get_num_threads()} threads, {platform.machine()}"
    )
    data = Jpegs(options.samples)
    (uncached,) = fit(data, options, 1, None)
    print(f"uncached: {uncached:.1f} s", flush=True)
    with tempfile.TemporaryDirectory() as cache_dir:
        for epoch, seconds in enumerate(fit(data, options, 3, cache_dir)):
            doing = "records" if epoch == 0 else "cached"
            print(f"epoch {epoch}, {doing}: {seconds:.1f} s, {seconds / uncached:.1%} of the uncached one")


if __name__ == "__main__":
    main()
