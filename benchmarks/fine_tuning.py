"""What freezing is worth in one fine-tuning run: accuracy beside wall time, and beside a plain run of the same time.

A ResNet-20 with given weights is fine-tuned on images without augmentation four times with one seed: plain; frozen by
`FreezingPolicy(pretrained=True)`; the same with the cache; and plain with so few epochs, its learning rate fully
decayed, that it takes no longer than the cached run. Printed are the accuracy on the validation images after the last
epoch, the seconds of the fit with its validations, and what froze. Each run leaves its record for ``egeria report``.

    python benchmarks/fine_tuning.py --data FOLDER --weights FILE --out FOLDER [--epochs 10] [--size 48] [--seed 0]

--data and --weights as for augmentation_views.py.
"""

import argparse
import tempfile
import time
from pathlib import Path

import lightning
import torch
from augmentation_views import Classifier, Images
from torch.utils.data import DataLoader

from lightning_egeria import FreezingPolicy, FrozenPrefixCache, KnowledgeGuidedFreezing, RunRecorder


class Validated(Classifier):
    """Tells its accuracy after each epoch."""

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/acc", (self.net(images).argmax(1) == labels).float().mean())


class Data(lightning.LightningDataModule):
    """Training and validation images."""

    def __init__(self, train: Images, val: Images) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self):
        return DataLoader(self.train, 64, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 200)


def run(name: str, data: Data, options: argparse.Namespace, epochs: int, freezes: bool, cached: bool) -> float:
    """Fit once; seconds that it took."""
    lightning.seed_everything(options.seed, verbose=False)
    freezing = KnowledgeGuidedFreezing(FreezingPolicy(pretrained=True)) if freezes else None
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*([freezing] if freezing else []), RunRecorder(options.out / name / "egeria.json", name)],
    )
    model = Validated(options.weights, epochs * (len(data.train) // 64))
    with tempfile.TemporaryDirectory() as cache_dir:
        started = time.perf_counter()
        trainer.fit(model, datamodule=FrozenPrefixCache(data, cache_dir=cache_dir) if cached else data)
        seconds = time.perf_counter() - started
    accuracy = float(trainer.callback_metrics["val/acc"])
    events = ", ".join(f"{event.depth} at step {event.step}" for event in freezing.events) if freezing else ""
    print(f"{name:10s} {epochs:2d} epochs  accuracy {accuracy:.3f}  {seconds:6.1f} s  {events}", flush=True)
    return seconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights")
    parser.add_argument("--out", type=Path, default=Path("runs/fine_tuning"))
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--size", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.data is None or options.weights is None:
        print("skipped: needs --data and --weights")
        return
    data = Data(Images(options.data / "train", options.size, False), Images(options.data / "val", options.size, False))
    sizes = f"{len(data.train)} images to train on, {len(data.val)} to validate"
    print(f"{sizes}, torch {torch.__version__}, seed {options.seed}")
    plain = run("plain", data, options, options.epochs, False, False)
    run("freezing", data, options, options.epochs, True, False)
    cached = run("cached", data, options, options.epochs, True, True)
    run("shortened", data, options, max(1, int(options.epochs * cached / plain)), False, False)


if __name__ == "__main__":
    main()
