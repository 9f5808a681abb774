"""Options of optimizers; `test_tunables.py` has each of them in a fit."""

from types import SimpleNamespace

import torch
from torch import nn

from lightning_egeria.methods.tuning.options import Momentum, OptimizerOption


def trainer_of(optimizer=torch.optim.AdamW):
    made = optimizer([nn.Parameter(torch.ones(1))], lr=0.1)
    return SimpleNamespace(optimizers=[made], lr_scheduler_configs=[])


def test_momentum_of_adam_is_its_first_beta():
    trainer, momentum = trainer_of(), Momentum()
    momentum.check(trainer)
    momentum.set(trainer, 0.5)
    assert momentum.get(trainer) == 0.5
    assert trainer.optimizers[0].param_groups[0]["betas"] == (0.5, 0.999)


def test_an_option_is_set_in_the_groups_that_have_it():
    trainer = trainer_of(torch.optim.SGD)
    group = {"params": [nn.Parameter(torch.ones(1))], "lr": 0.3}
    trainer.optimizers[0].add_param_group(group)
    for path, after in (("lr", [0.7, 0.7]), ("groups.1.lr", [0.7, 0.9])):
        OptimizerOption(path).set(trainer, after[1])
        assert [one["lr"] for one in trainer.optimizers[0].param_groups] == after
