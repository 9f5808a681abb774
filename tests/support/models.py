"""Small networks, a LightningModule, random data and one `fit` for all tests."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def slow(*values):
    """Parameters of a test that only `make test-slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


class ConvNet(nn.Module):
    """For images of 1x8x8. Batch normalisation and dropout in front, so that modes and random state matter.

    Its layer modules are "stem", "middle" and "deep".
    """

    def __init__(self, widths=(4, 4, 4), dropout=0.2):
        super().__init__()
        first, second, third = widths
        self.stem = nn.Sequential(nn.Conv2d(1, first, 3), nn.BatchNorm2d(first), nn.ReLU())
        self.middle = nn.Sequential(nn.Conv2d(first, second, 3), nn.BatchNorm2d(second), nn.ReLU(inplace=True))
        if dropout:
            self.middle.append(nn.Dropout(dropout))
        self.deep = nn.Sequential(nn.Conv2d(second, third, 3), nn.BatchNorm2d(third), nn.ReLU())
        self.head = nn.Linear(third * 2 * 2, 3)

    def forward(self, images):
        return self.head(self.deep(self.middle(self.stem(images))).flatten(1))


def mlp(width=6, blocks=4, classes=3):
    """Linear layers of one width, without statistics and dropout; its layer modules are all but the last."""
    layers = [part for _ in range(blocks) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, classes))


class Transformer(nn.Module):
    """For tokens; 0 is padding. Its layer modules are the embedding and each encoder layer."""

    def __init__(self, tokens=20, width=8, layers=3, classes=3, dropout=0.1):
        super().__init__()
        self.embedding = nn.Embedding(tokens, width, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=dropout, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, ids):
        padding = ids == 0
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        kept = (~padding).unsqueeze(-1)
        return self.head((x * kept).sum(1) / kept.sum(1))


class Classifier(L.LightningModule):
    """Cross-entropy of a network, by default `ConvNet` from the seed 0."""

    def __init__(self, net=None, lr=0.05, optimizer="sgd"):
        super().__init__()
        if net is None:
            torch.manual_seed(0)
            net = ConvNet()
        self.net, self.lr, self.optimizer = net, lr, optimizer
        self.losses = []

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=0.1)
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)


class Validated(Classifier):
    def validation_step(self, batch, batch_idx):
        inputs, labels = batch
        self.log("val/loss", nn.functional.cross_entropy(self.net(inputs), labels))


class ManualSteps:
    """Mixin of modules: the training step takes the optimizer step itself."""

    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def images(samples=40, size=8, seed=1):
    """Noise with labels."""
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, 1, size, size, generator=generator), torch.arange(samples) % 3)


def bright(samples=80):
    """Noise as bright as its labels, which a network learns in a few steps."""
    noise, labels = images(samples).tensors
    return TensorDataset(noise / 4 + labels.view(-1, 1, 1, 1), labels)


def vectors(samples=40, width=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(samples, width, generator=generator), torch.arange(samples) % 3)


def tokens(samples=40, length=6, seed=1):
    """Sequences of several lengths, padded with 0."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 20, (samples, length), generator=generator)
    lengths = torch.randint(2, length + 1, (samples, 1), generator=generator)
    return TensorDataset(ids * (torch.arange(length) < lengths), torch.arange(samples) % 3)


def loader(dataset=None, batch_size=8, **options):
    return DataLoader(images() if dataset is None else dataset, batch_size=batch_size, **options)


def trainer_of(*callbacks, epochs=3, **arguments):
    """A Trainer on the CPU that prints and writes nothing."""
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    quiet |= {"enable_model_summary": False, "num_sanity_val_steps": 0, "max_epochs": epochs}
    return L.Trainer(callbacks=list(callbacks), **{**quiet, **arguments})


def fit(module, *callbacks, data=None, val=None, ckpt_path=None, seed=3, **arguments):
    """Train; returns the Trainer. ``arguments``: of `trainer_of`."""
    trainer = trainer_of(*callbacks, **arguments)
    L.seed_everything(seed, verbose=False)
    if isinstance(data, L.LightningDataModule):
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    else:
        trainer.fit(module, loader() if data is None else data, val, ckpt_path=ckpt_path)
    return trainer


class After(L.Callback):
    """Calls `look(trainer, module)` after each batch, or only after the optimizer steps `steps`."""

    def __init__(self, look, *steps):
        self.look, self.steps = look, steps

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if not self.steps or trainer.global_step in self.steps:
            self.look(trainer, pl_module)


def equal(first, second):
    """Whether two modules have the same parameters and buffers, bit for bit."""
    first, second = first.state_dict(), second.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def left_behind(module):
    """What freezing, observing or caching has left on a module: replaced methods, and parameters that are frozen."""
    return [path for path, part in module.named_modules() if vars(part).keys() & {"forward", "train"}] + [
        name for name, parameter in module.named_parameters() if not parameter.requires_grad
    ]
