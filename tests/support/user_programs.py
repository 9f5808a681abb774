"""Small programs as users write them, and one `run` for all: what was said, which weights came out."""

import warnings

import lightning as L
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import KnowledgeGuidedFreezing, ScriptedPolicy
from support.models import trainer_of


class Blocks(L.LightningModule):
    """Classifies vectors of 8 numbers with a stack of blocks, of which the last is the head."""

    def __init__(self, blocks=5, norm=nn.LayerNorm):
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), norm(8), nn.GELU()) for _ in range(blocks)), nn.Linear(8, 3)
        )

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


class ByStep:
    """The batch follows from the number of the step: a run that resumes within an epoch has the same batches."""

    def training_step(self, batch, batch_idx):
        generator = torch.Generator().manual_seed(self.trainer.global_step)
        inputs = torch.randn(batch[0].shape, generator=generator)
        return super().training_step((inputs, torch.randint(3, (len(inputs),), generator=generator)), batch_idx)


class Finetuned(Blocks):
    """A backbone for `BackboneFinetuning`, and a head of two linear layers."""

    def __init__(self, layers=2, norm=nn.BatchNorm1d):
        super().__init__(0)
        self.backbone = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), norm(8), nn.ReLU()) for _ in range(4)))
        head = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(layers - 1)]
        self.net = nn.Sequential(*head, nn.Linear(8, 3))

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.net(self.backbone(batch[0])), batch[1])


def vectors(samples=64, batch_size=8, size=8):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(samples, size, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(3, (samples,), generator=generator)), batch_size)


def releasing(epoch):
    return BackboneFinetuning(epoch, initial_denom_lr=2, verbose=False)


def scripted(schedule, **arguments):
    return KnowledgeGuidedFreezing(ScriptedPolicy(schedule), deterministic=True, background=False, **arguments)


def run(module, *callbacks, data=None, epochs=4, ckpt_path=None, validation=None, **arguments):
    """Train; returns what was said about freezing."""
    trainer = trainer_of(*callbacks, epochs=epochs, **{"devices": 1, **arguments})
    L.seed_everything(1, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, vectors() if data is None else data, validation, ckpt_path=ckpt_path)
    return [str(one.message) for one in caught if "freezing: " in str(one.message)]


def same(one, other):
    """Whether two modules have the same weights, bit for bit."""
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == as_name and torch.equal(a, b) for (name, a), (as_name, b) in pairs)


class SavesAt(L.Callback):
    """Saves a checkpoint after some optimizer steps."""

    def __init__(self, folder, *steps, weights_only=False):
        self.folder, self.steps, self.weights_only = folder, steps, weights_only

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt", self.weights_only)


class Notes(L.Callback):
    """Calls ``look(module)`` after each optimizer step, and keeps what it returns."""

    def __init__(self, look):
        self.look, self.seen = look, []

    def on_train_batch_end(self, trainer, module, *_):
        self.seen.append(self.look(module))


def weights_of(*path):
    """Returns a copy of all weights of a part of the module."""

    def look(module):
        return torch.cat([p.detach().flatten() for p in module.get_submodule(".".join(path)).parameters()])

    return look
