"""Training with changing batch sizes, and what was trained on."""

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_egeria import AdaptiveBatchSize
from support.models import Classifier, ConvNet, fit


class Numbered(Dataset):
    """Images with their numbers."""

    def __init__(self, samples=80):
        self.images = torch.randn(samples, 1, 8, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], index % 3, index


class Seeing(Classifier):
    """Keeps the numbers and the learning rate of each batch."""

    def __init__(self, optimizer="sgd", lr=0.05):
        torch.manual_seed(0)
        super().__init__(ConvNet(dropout=0), lr=lr, optimizer=optimizer)
        self.seen, self.rates = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch[2].tolist())
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch[:2], batch_idx)

    @property
    def sizes(self):
        return [len(batch) for batch in self.seen]


def numbered(samples=80, batch_size=8, **options):
    return DataLoader(Numbered(samples), batch_size, **options)


def own_generator():
    """Shuffles by numbers of its own, so that a resumed run has the same epochs."""
    return {"shuffle": True, "generator": torch.Generator().manual_seed(7)}


def adaptive(data=None, largest=64, **arguments):
    return AdaptiveBatchSize(numbered() if data is None else data, largest, **arguments)


def trained(data, *callbacks, module=None, **arguments):
    module = Seeing() if module is None else module
    trainer = fit(module, *callbacks, data=data, **{"epochs": 2, **arguments})
    return module, trainer


class SavesAfter(L.Callback):
    """Writes a checkpoint after a batch, counted from the start."""

    def __init__(self, path, batches):
        self.path, self.left = path, batches

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint(self.path)
