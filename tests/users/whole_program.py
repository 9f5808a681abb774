"""A program as a user writes one: classes, functions and globals in the script itself, trained with every method.

Run as a script, with ``python -c`` and as a notebook by `test_programs.py`. It prints a line for each way to train.
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_egeria import (
    AdaptiveBatchSize,
    BranchTuner,
    FreezingPolicy,
    FrozenPrefixCache,
    KnowledgeGuidedFreezing,
    LogUniform,
    ScriptedPolicy,
    SelectiveBackprop,
    SlopePolicy,
    StructuredPartialBackprop,
)
from support.surroundings import watched

CALLS, FORWARDS, TEMPERATURE = [], 0, 1.0
CACHE: dict[int, float] = {}


class Scale:
    """An object of the script that forward counts in."""

    used = 0

    def __call__(self, x):
        Scale.used += 1
        return x / TEMPERATURE


SCALE = Scale()


def activation(x):
    CACHE[len(CACHE) % 3] = TEMPERATURE
    return torch.relu(x)


class Block(nn.Module):
    passed = 0

    def __init__(self, width):
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), activation

    def forward(self, x):
        type(self).passed += 1
        return self.activation(self.linear(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block(8) for _ in range(4)))
        self.head = nn.Linear(8, 3)
        last = self.blocks[-1]
        self.skip = lambda x: x + last.linear.bias.mean()

    def forward(self, x):
        global FORWARDS, TEMPERATURE
        FORWARDS += 1
        TEMPERATURE = 1.0 + FORWARDS / 1000
        return SCALE(self.head(self.skip(self.blocks(x))))


class Mine(L.LightningModule):
    def __init__(self, fails_at=None):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.fails_at, self.losses = Network(), fails_at, []

    def training_step(self, batch, index):
        CALLS.append(index)
        if len(CALLS) == self.fails_at:
            raise ZeroDivisionError
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(float(loss))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Looks(L.Callback):
    """Sees the same objects in the middle of training, and every call in the globals of the script."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        assert {name: globals()[name] for name in OBJECTS} == OBJECTS
        assert [vars(kind)[name] for kind, name in METHODS] == list(METHODS.values())


OBJECTS = {
    name: value for name, value in globals().items() if isinstance(value, type) or name in ("activation", "SCALE")
}
KINDS = (Mine, Network, Block, Scale)
METHODS = {(kind, name): value for kind in KINDS for name, value in vars(kind).items() if callable(value)}


def loader():
    generator = torch.Generator().manual_seed(1)
    return DataLoader(TensorDataset(torch.randn(48, 8, generator=generator), torch.arange(48) % 3), batch_size=8)


def guided(policy=None, **arguments):
    options = {"evaluate_every_n_steps": 2, "background": False, "deterministic": True, **arguments}
    return KnowledgeGuidedFreezing(policy or eager(), **options)


def eager():
    return FreezingPolicy(tolerance=1e9, patience=2, pretrained=True, peer_tolerance=0, trial=False)


def never():
    return FreezingPolicy(tolerance=1e-12, pretrained=True, peer_tolerance=0, trial=False)


WAYS = {
    "nothing": lambda: ([], None),
    "idle, in the thread": lambda: ([guided(never())], None),
    "idle, in a process": lambda: ([guided(never(), background=True, timeout_s=600.0)], None),
    "in the thread": lambda: ([guided()], None),
    "in a process": lambda: ([guided(background=True, timeout_s=600.0)], None),
    "bf16": lambda: ([guided(reference_precision="bf16")], None),
    "automatic precision": lambda: ([guided(reference_precision="auto", deterministic=False)], None),
    "slopes": lambda: ([guided(SlopePolicy(tolerance=0.99, window_evaluations=2, patience=1, bootstrap=False))], None),
    "trial of depths": lambda: ([guided(FreezingPolicy(pretrained=True))], None),
    "schedule": lambda: ([guided(ScriptedPolicy({3: 1, 8: 2}))], None),
    "cache": lambda: ([guided(ScriptedPolicy({3: 1, 8: 2}))], lambda: FrozenPrefixCache(loader(), min_free_bytes=0)),
    "cache alone": lambda: ([], lambda: FrozenPrefixCache(loader(), min_free_bytes=0)),
    "partial": lambda: ([StructuredPartialBackprop()], None),
    "selecting": lambda: ([], lambda: SelectiveBackprop(loader(), beta=1)),
    "goodput": lambda: ([], lambda: AdaptiveBatchSize(loader(), 16, batch_sizes={8: 16})),
    "tuning": lambda: (
        [BranchTuner({"lr": LogUniform(1e-2, 0.2)}, at_epochs=(1,), first_steps=2, max_trials=4, max_share=100)],
        None,
    ),
}


def train(way, fails_at=None):
    global FORWARDS, TEMPERATURE
    CALLS.clear()
    CACHE.clear()
    FORWARDS, TEMPERATURE, Block.passed, Scale.used = 0, 1.0, 0, 0
    callbacks, make = WAYS[way]()
    module, plain = Mine(fails_at), loader()
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        max_epochs=4, callbacks=[*callbacks, Looks()], enable_model_summary=False, num_sanity_val_steps=0, **quiet
    )
    L.seed_everything(3, verbose=False)
    data = {"train_dataloaders": plain} if make is None else {"datamodule": make()}
    with watched(module, plain):
        trainer.fit(module, **data)
    return module, (len(CALLS), FORWARDS, TEMPERATURE, Block.passed, Scale.used, dict(CACHE))


def fails_at(way):
    """Steps of which an error must arrive; a process takes seconds to start, and the idle ones are like the others."""
    if way.startswith("idle"):
        return ()
    return (10,) if way == "in a process" else (1, 10)


def main():
    plain, counted = train("nothing")
    assert counted[:2] == (24, 24)
    for way in WAYS:
        found, counts = train(way)
        if way.startswith("idle"):
            assert (found.losses, counts) == (plain.losses, counted), (way, counts, counted)
        for step in fails_at(way):
            try:
                train(way, fails_at=step)
            except ZeroDivisionError:
                continue
            raise AssertionError(f"{way}: the error of step {step} did not arrive")
        print(f"{way}: {counts[:2]}", flush=True)


if __name__ == "__main__":
    main()
