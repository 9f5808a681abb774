"""A small training run with and without the cache, and what it ended with."""

import sys
from unittest import mock

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import FrozenPrefixCache, KnowledgeGuidedFreezing, ScriptedPolicy
from lightning_egeria.caching import stats
from lightning_egeria.training.observers import Observer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.a = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.b = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.c = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.b(self.a(self.stem(x)))
        return self.head(self.c(x).mean((2, 3)))


class Classifier(L.LightningModule):
    def __init__(self, net=None):
        super().__init__()
        self.net = net if net is not None else Net()
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(x), y))


def images(count=40, size=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, size, size, generator=generator)
    return TensorDataset(x, torch.randint(0, 4, (count,), generator=generator))


def loader_of(dataset, batch_size=8, **options):
    return DataLoader(dataset, batch_size=batch_size, shuffle=True, **options)


class EvalAll(Observer):
    """Without a cache, has the frozen front give the same each time, as a cache does: the slow way to the same."""

    def __init__(self, freezing):
        self.freezing = freezing

    def batch_start(self, batch, step):
        if self.freezing.frozen_depth:
            self.freezing.freezer.prefix.eval_all()


def fit(
    module,
    data,
    schedule,
    cache=None,
    epochs=4,
    callbacks=(),
    trainer_options=None,
    compared_steps=sys.maxsize,
    **callback_options,
):
    """Train with a scripted freeze, or another policy; ``cache``: arguments of FrozenPrefixCache, or None.

    Networks in tests are so small that no cache pays for them: whether it does is judged
    only where ``compared_steps`` says after how many.
    """
    L.seed_everything(0, verbose=False)
    policy = schedule if isinstance(schedule, ScriptedPolicy) else ScriptedPolicy(schedule)
    options = {"background": False, "evaluate_every_n_steps": 10**6, "deterministic": True, **callback_options}
    freezing = KnowledgeGuidedFreezing(policy, **options)
    trainer = L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[freezing, *callbacks],
        **{"enable_progress_bar": False, **(trainer_options or {})},
    )
    wrapped = FrozenPrefixCache(data, **cache) if cache is not None else None
    if wrapped is None:
        freezing.observers.add(EvalAll(freezing))
    with mock.patch.object(stats, "COMPARED_STEPS", compared_steps):
        if wrapped is not None:
            trainer.fit(module, datamodule=wrapped)
        elif isinstance(data, L.LightningDataModule):
            trainer.fit(module, datamodule=data)
        else:
            trainer.fit(module, data)
    return wrapped
