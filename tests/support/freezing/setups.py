"""Ordinary ways to train: each a LightningModule and arguments of the Trainer."""

import functools
import random
import threading

import lightning as L
import numpy as np
import torch
import torchmetrics
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_egeria import FreezingPolicy, KnowledgeGuidedFreezing
from support import models
from support.models import ConvNet, ManualSteps, fit


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = ConvNet()
        self.lr = 0.05
        self.batch_size = 8
        self.resting = []  # what `ByHand` froze

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def train_dataloader(self):
        return loader(batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)


class Watching(FreezingPolicy):
    """Has everything measured, at any learning rate, and decides nothing."""

    wants_reference = True

    def __init__(self):
        super().__init__()

    def observe(self, step, plasticity, learning_rate, loss, layer_shares=None):
        return None


def rest(part):
    """Freeze by hand: without gradients, in evaluation mode."""
    part.requires_grad_(False).eval()


class ByHand(L.Callback):
    """What a careful user would write to freeze stem and middle after step 4."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step >= 4:
            pl_module.resting = [pl_module.net.stem, pl_module.net.middle]
            for part in pl_module.resting:
                rest(part)
                part.zero_grad(set_to_none=True)


def freezing(policy, **arguments):
    return KnowledgeGuidedFreezing(policy, evaluate_every_n_steps=2, **{"background": False, **arguments})


def loader(samples=40, batch_size=8):
    return models.loader(models.images(samples), batch_size)


def new(kind=Module, **arguments):
    torch.manual_seed(0)
    return kind(**arguments)


class Checkpointed(Module):
    """Recomputes its activations in the backward."""

    reentrant = False

    def training_step(self, batch, batch_idx):
        images, labels = batch
        hidden = images.requires_grad_() if self.reentrant else images
        for part in (self.net.stem, self.net.middle, self.net.deep):
            hidden = checkpoint(part, hidden, use_reentrant=self.reentrant)
        return nn.functional.cross_entropy(self.net.head(hidden.flatten(1)), labels)


class ChannelsLast(Module):
    def __init__(self):
        super().__init__()
        self.to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        return super().training_step((batch[0].to(memory_format=torch.channels_last), batch[1]), batch_idx)


class Manual(ManualSteps, Module):
    pass


class Groups(Module):
    def configure_optimizers(self):
        groups = [{"params": self.net.head.parameters(), "lr": 0.1}, {"params": self.net.stem.parameters()}]
        rest = [*self.net.middle.parameters(), *self.net.deep.parameters()]
        return torch.optim.AdamW([*groups, {"params": rest, "weight_decay": 0.0}], lr=0.01)


class Dictionary(Module):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "kept": batch[1]}


class Skipping(Module):
    """The first step of all among them, and one whose forward was done already."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 0:
            return None
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 2 else loss


class Trains(Module):
    def on_train_batch_start(self, batch, batch_idx):
        self.train()
        for part in self.resting:
            rest(part)


class LabelsItself(Module):
    """Switches modes inside the training step."""

    def training_step(self, batch, batch_idx):
        self.net.eval()
        with torch.no_grad():
            labels = self.net(batch[0]).argmax(1)
        self.net.train()
        for part in self.resting:
            rest(part)
        return super().training_step((batch[0], (labels + batch[1]) % 3), batch_idx)


class ThroughForward(Module):
    """The network is the LightningModule itself, which holds what cannot be copied."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class ManualAccumulation(Manual):
    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model():
            self.manual_backward(Module.training_step(self, batch, batch_idx) / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)


class TwoBackwards(Manual):
    """The second loss sees less of the network than the first."""

    def __init__(self):
        super().__init__()
        self.aside = nn.Linear(4 * 6 * 6, 3)

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Module.training_step(self, batch, batch_idx))
        self.manual_backward(nn.functional.cross_entropy(self.aside(self.net.stem(batch[0]).flatten(1)), batch[1]))
        optimizer.step()


class ZeroGradients(Module):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)


class Fused(Module):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1, fused=True)


class RandomInForward(Module):
    """Draws from every generator, in evaluation mode too."""

    class Net(ConvNet):
        def forward(self, images):
            shift = torch.rand_like(images) + random.random() + float(np.random.rand())
            return super().forward(images + 0.1 * shift)

    def __init__(self):
        super().__init__()
        self.net = self.Net()


class Hooked(Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.net.stem.register_forward_hook(self.count)

    def count(self, module, arguments, output):
        self.calls += 1
        return 1.1 * output


class CompiledForward(Module):
    """Of one part only, as an attribute that hides the method."""

    def __init__(self):
        super().__init__()
        self.net.deep.forward = torch.compile(self.net.deep.forward, backend="aot_eager")


class Parametrized(Module):
    """Spectral normalisation goes on by one iteration with each forward in training mode."""

    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.net.stem[0])
        nn.utils.parametrizations.weight_norm(self.net.middle[0])


class Metrics(Module):
    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        self.accuracy(self.net(batch[0]).detach(), batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, prog_bar=True)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class TakesTheIterator(Module):
    def training_step(self, dataloader_iter):
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step([one.to(self.device) for one in batch], batch_idx)


class EndsEarly(Module):
    """Leaves the rest of each epoch out, of the first one everything."""

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 3 or self.current_epoch == 0 else None


SETUPS = {
    "plain": (Module, {}),
    "gradient accumulation": (Module, {"accumulate_grad_batches": 2, "epochs": 5}),
    "gradient clipping by norm": (Module, {"gradient_clip_val": 0.1}),
    "gradient clipping by value": (Module, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": (Module, {"precision": "bf16-mixed"}),
    "bf16-true": (Module, {"precision": "bf16-true"}),
    "64-true": (Module, {"precision": "64-true"}),
    "channels last": (ChannelsLast, {}),
    "activation checkpointing": (Checkpointed, {}),
    "manual optimization": (Manual, {}),
    "parameter groups": (Groups, {}),
    "a dictionary with the loss": (Dictionary, {}),
    "skipped steps": (Skipping, {"epochs": 4}),
    "self.train() in a hook": (Trains, {}),
    "self.net.train() in the step": (LabelsItself, {}),
    "self(batch) in the step": (ThroughForward, {}),
    "manual accumulation and clipping": (ManualAccumulation, {"epochs": 6}),
    "two backward passes": (TwoBackwards, {}),
    "gradients set to zero": (ZeroGradients, {}),
    "a fused optimizer": (Fused, {}),
    "random numbers in the forward": (RandomInForward, {}),
    "forward hooks of the user": (Hooked, {}),
    "a compiled forward": (CompiledForward, {}),
    "parametrizations": (Parametrized, {}),
    "metrics": (Metrics, {}),
    "dataloader_iter": (TakesTheIterator, {}),
    "epochs that end early": (EndsEarly, {"epochs": 6}),
    "a profiler": (Module, {"profiler": "simple"}),
    "data loaders made anew": (Module, {"reload_dataloaders_every_n_epochs": 1}),
    "overfit_batches": (Module, {"overfit_batches": 2, "epochs": 6}),
    "validation inside an epoch": (Module, {"val_check_interval": 2}),
    "detect_anomaly": (Module, {"detect_anomaly": True}),
}
# Each of these is to the callback what another is; `make test-slow` runs them too.
MUCH_ALIKE = {
    "gradient clipping by value",
    "64-true",
    "channels last",
    "a dictionary with the loss",
    "a fused optimizer",
    "metrics",
    "a profiler",
    "data loaders made anew",
    "overfit_batches",
    "detect_anomaly",
}
assert SETUPS.keys() >= MUCH_ALIKE


def validated(kind):
    """Switches modes in the middle of an epoch, as any validation does."""

    class WithValidation(kind):
        def validation_step(self, batch, batch_idx):
            self.net(batch[0])

    return WithValidation


def trained(setup, *callbacks):
    kind, arguments = SETUPS[setup]
    val = loader(8) if "val_check_interval" in arguments else None
    module = new(validated(kind) if val else kind)
    fit(module, *callbacks, val=val, **arguments)
    return module


trained_plainly = functools.cache(trained)


class Filtering(Module):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr, momentum=0.9)
