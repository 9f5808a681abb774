"""How much of random augmentation do a few cached views keep? Fine-tuning with 7 of 10 layer modules frozen.

A ResNet-20 with given weights is fine-tuned on images that are cropped and mirrored at random, with its front frozen
after the first step: once with fresh augmentation in every epoch and no cache, and with 1, 2 and 4 cached views of each
sample. Printed are, for each, the accuracy on the validation images after the last epoch, by seed, the time of the fit
as a share of the fresh one's, and what the cache took on disk.

    python benchmarks/augmentation_views.py --data FOLDER --weights FILE [--epochs 12] [--seeds 2] [--size 48]

FOLDER holds train/CLASS/*.JPEG and val/CLASS/*.JPEG, as Imagenette does; FILE is a ResNet-20 in safetensors' format
with the names of parameters of `lightning_egeria.demos.resnet.CifarResNet`.
"""

import argparse
import tempfile
import time
from pathlib import Path

import lightning
import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.demos.resnet import CifarResNet

FROZEN = 7
MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


class Images(Dataset):
    """Read once, a little larger than they are used."""

    def __init__(self, folder: Path, size: int, augment: bool) -> None:
        self.size, self.augment = size, augment
        large = size + size // 6
        pixels, self.labels = [], []
        for label, path in enumerate(sorted(p for p in folder.iterdir() if p.is_dir())):
            for file in sorted(path.iterdir()):
                with Image.open(file) as image:
                    pixels.append(np.asarray(image.convert("RGB").resize((large, large), Image.Resampling.BOX)))
                self.labels.append(label)
        self.pixels = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int):
        image, room = self.pixels[index], self.pixels.shape[-1] - self.size
        top, left = torch.randint(room + 1, (2,)).tolist() if self.augment else (room // 2, room // 2)
        image = image[:, top : top + self.size, left : left + self.size]
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(-1)
        return (image / 255 - MEAN) / STD, self.labels[index]


class Classifier(lightning.LightningModule):
    """Fine-tunes; the head is new."""

    def __init__(self, weights: str, steps: int) -> None:
        super().__init__()
        self.net = CifarResNet(20)
        state = {name: value for name, value in load_file(weights).items() if not name.startswith("linear.")}
        self.net.load_state_dict(state, strict=False)
        self.steps = steps

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def accuracy(model: Classifier, val: Images) -> float:
    """Share of the validation images that are right."""
    model.eval()
    with torch.no_grad():
        right = sum((model.net(x).argmax(1) == y).sum().item() for x, y in DataLoader(val, 200))
    return right / len(val)


def run(train: Images, val: Images, options: argparse.Namespace, views: int, seed: int) -> tuple[float, float, int]:
    """Accuracy, seconds and bytes on disk. No views: no cache."""
    lightning.seed_everything(seed, verbose=False)
    loader = DataLoader(train, 64, shuffle=True, drop_last=True)
    model = Classifier(options.weights, options.epochs * len(loader))
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[KnowledgeGuidedFreezing(ScriptedPolicy({1: FROZEN}))],
    )
    size = 0
    started = time.perf_counter()
    if views:
        with tempfile.TemporaryDirectory() as cache_dir:
            cache = FrozenPrefixCache(loader, cache_dir=cache_dir, augmentation_views=views, seed=seed)
            trainer.fit(model, datamodule=cache)
            size = cache.stats.bytes_on_disk
    else:
        trainer.fit(model, loader)
    return accuracy(model, val), time.perf_counter() - started, size


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--size", type=int, default=48)
    options = parser.parse_args()
    if options.data is None or options.weights is None:
        print("skipped: needs --data and --weights")
        return
    train, val = Images(options.data / "train", options.size, True), Images(options.data / "val", options.size, False)
    print(f"{len(train)} images to train on, {len(val)} to validate, {options.epochs} epochs, {torch.__version__}")
    fresh_s = {}
    for views in (0, 1, 2, 4):
        results = [run(train, val, options, views, seed) for seed in range(options.seeds)]
        if not views:
            fresh_s = {seed: seconds for seed, (_, seconds, _) in enumerate(results)}
        name = f"{views} views" if views else "fresh"
        right = " / ".join(f"{share:.1%}" for share, _, _ in results)
        times = " / ".join(f"{seconds / fresh_s[seed]:.2f}" for seed, (_, seconds, _) in enumerate(results))
        print(f"{name}: {right}; time {times} of the fresh one's; {results[0][2] / 1e6:.0f} MB on disk", flush=True)


if __name__ == "__main__":
    main()
