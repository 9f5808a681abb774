"""A classifier with validation, trained with and without the callback."""

import lightning as L
import torch
from torch import nn

from lightning_egeria import KnowledgeGuidedFreezing, SlopePolicy
from support.models import ConvNet, images, loader, trainer_of


class Module(L.LightningModule):
    def __init__(self, net=None, optimizer="sgd"):
        super().__init__()
        self.some_name = net or ConvNet()
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.some_name(images), labels)

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val/loss", nn.functional.cross_entropy(self.some_name(images), labels))

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)]


def fit(module, *callbacks, epochs=4, data=None, ckpt_path=None, **arguments):
    trainer = trainer_of(*callbacks, epochs=epochs, **arguments)
    L.seed_everything(3, verbose=False)
    trainer.fit(module, loader() if data is None else data, loader(images(16)), ckpt_path=ckpt_path)
    return trainer


def module(**arguments):
    torch.manual_seed(0)
    return Module(**arguments)


class HandWritten(L.Callback):
    """What a careful user would write to freeze stem and middle of `Net` after one step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= self.step:
            for part in (pl_module.some_name.stem, pl_module.some_name.middle):
                part.requires_grad_(False).eval().zero_grad(set_to_none=True)


def freezing(policy=None, background=False, **arguments):
    return KnowledgeGuidedFreezing(policy, background=background, **arguments)


class Observing(SlopePolicy):
    """Sees everything and decides nothing."""

    seen = ()

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        super().observe(step, plasticity, learning_rate, loss, layer_shares)
        if plasticity is not None:
            self.seen = (*self.seen, tuple(plasticity))
