"""A classifier that notes which samples it trains on, and what selects them."""

import lightning as L
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

from lightning_egeria import SelectiveBackprop
from support.models import Classifier as Plain
from support.models import ConvNet, fit, images, loader


class Indexed(Dataset):
    """Each sample has its index."""

    def __init__(self, data=None):
        self.data = images(40) if data is None else data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return (*self.data[index], index)


class Noting(Plain):
    """Notes the samples of each training batch; scoring leaves no trace in the list."""

    def __init__(self, dropout=0.2, **arguments):
        torch.manual_seed(0)
        super().__init__(ConvNet(dropout=dropout), **arguments)
        self.ids = []

    def training_step(self, batch, batch_idx):
        x, labels, ids = batch
        self.ids.append(ids.tolist())
        loss = nn.functional.cross_entropy(self.net(x), labels)
        self.losses.append(loss.item())
        return loss


class Checkpoints(L.Callback):
    """Writes one behind each step."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, *_):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}")


def trained(data=None, *callbacks, module=None, batches=None, ckpt_path=None, **options):
    """Train, by default on 40 samples in batches of 8 for 3 epochs; returns module, Trainer and data module."""
    run = {name: options.pop(name) for name in ("epochs", "accumulate_grad_batches", "max_steps") if name in options}
    run |= {name: options.pop(name) for name in ("val", "precision", "devices", "strategy") if name in options}
    val = run.pop("val", None)
    source = loader(Indexed(data)) if batches is None else batches
    wrapped = SelectiveBackprop(source, val_dataloaders=val, **options)
    module = Noting() if module is None else module
    trainer = fit(module, *callbacks, data=wrapped, ckpt_path=ckpt_path, **run)
    return module, trainer, wrapped


def percentiles(losses, history, size):
    """From the formula: the share of the last losses that are smaller, after those of the batch are among them.

    Equal losses have the mean of their places.
    """
    history = [*history, *losses][-size:]
    places = [sum(other < loss for other in history) + (history.count(loss) - 1) / 2 for loss in losses]
    return [place / len(history) for place in places], history


def kept(losses, beta, history, size, numbers):
    """A plain loop over the samples of a batch: which are kept."""
    shares, history = percentiles(losses, history, size)
    return [at for at, share in enumerate(shares) if numbers[at] < share**beta], history


def numbers_of(seed, rank, epoch, batch, samples):
    return np.random.default_rng([seed, rank, epoch, batch]).random(samples).tolist()


def kept_by_a_loop(batches, numbers, beta, history):
    """What the formulas say: which samples of all batches are kept."""
    last, kept, numbers = [], [], iter(numbers)
    for losses in batches:
        for loss in losses:
            last.append(loss)
            if len(last) > history:
                del last[0]
        for loss in losses:
            percentile = (sum(1 for other in last if other < loss) + (last.count(loss) - 1) / 2) / len(last)
            kept.append(next(numbers) < percentile**beta)
    return kept
