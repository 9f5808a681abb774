"""Learning rates and validation by the samples seen."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_egeria import SelectiveBackprop
from support.models import After, fit, images, loader
from support.selecting import Indexed, Noting, trained


class Decaying(Noting):
    """Its learning rate falls with each step, as in a plain run; it notes where validation begins."""

    def __init__(self, interval="step", frequency=1):
        super().__init__()
        self.config = {"interval": interval, "frequency": frequency}
        self.rates, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.config}}


class Validating(Decaying):
    def validation_step(self, batch, batch_idx):
        if batch_idx == 0:
            self.validated.append(self.global_step)
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def steps_of(module):
    return module.trainer.lr_scheduler_configs[0].scheduler.last_epoch


@pytest.mark.parametrize(
    ("frequency", "accumulated", "steps"), [(1, 1, 39), (2, 1, 18), (1, 2, 21), (1, 4, 12)], ids=str
)
def test_schedule_of_the_run_ends_with_it(frequency, accumulated, steps):
    """As many scheduler steps as in a plain run, which has 13 batches an epoch."""
    plain = Decaying(frequency=frequency)
    trained(images(100), module=plain, beta=0, epochs=3, accumulate_grad_batches=accumulated)
    module = Decaying(frequency=frequency)
    _, trainer, _ = trained(images(100), module=module, epochs=3, accumulate_grad_batches=accumulated)
    assert steps_of(module) == steps_of(plain) == steps
    assert len(module.ids) < len(plain.ids) == 39
    assert trainer.lr_scheduler_configs[0].frequency == frequency
    assert module.rates == sorted(module.rates, reverse=True)


def test_schedule_by_the_samples_used():
    module, trainer, _ = trained(images(100), module=Decaying(), epochs=3, schedule="used")
    assert steps_of(module) == trainer.global_step < 39


def test_schedule_of_epochs_stays_with_lightning():
    module, _, _ = trained(images(100), module=Decaying(interval="epoch"), epochs=3)
    assert steps_of(module) == 3


@pytest.mark.parametrize(
    ("every", "times"), [({}, 3), ({"val_check_interval": 0.25}, 12), ({"val_check_interval": 5}, 6)]
)
def test_validation_begins_as_often_as_in_a_plain_run(every, times):
    plain, module = Validating(), Validating()
    counted = [trained_run(one, beta, every) for one, beta in ((plain, 0), (module, 1))]
    assert [len(one.validated) for one in (plain, module)] == [times, times]
    assert counted[0] == counted[1]
    if not every:
        assert module.validated[-1] == module.global_step  # behind the last batch


@pytest.mark.parametrize(("every", "times"), [({}, 6), ({"check_val_every_n_epoch": 2}, 3)])
def test_by_the_samples_used_each_epoch_ends_with_validation(every, times):
    module = Validating()
    data = SelectiveBackprop(loader(Indexed(images(100))), schedule="used", val_dataloaders=loader(Indexed()))
    trainer = fit(module, data=data, epochs=6, **every)
    assert len(module.validated) == times
    assert module.validated[-1] == module.global_step
    assert trainer.val_check_batch == 13


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Indexed()[index] for index in range(36))


@pytest.mark.parametrize("accumulated", [1, 2])
def test_schedule_of_a_stream_is_that_of_a_plain_run(accumulated):
    plain, module = Decaying(), Decaying()
    for one, beta in ((plain, 0), (module, 1)):
        trained(module=one, batches=DataLoader(Stream(), 8), beta=beta, accumulate_grad_batches=accumulated)
    assert steps_of(plain) == steps_of(module) == 3 * -(-5 // accumulated)


def trained_run(module, beta, every):
    data = SelectiveBackprop(loader(Indexed(images(100))), beta=beta, val_dataloaders=loader(Indexed()))
    trainer = fit(module, data=data, epochs=3, **every)
    return trainer.val_check_batch


def test_last_batch_of_an_epoch_ends_its_accumulation():
    steps = []
    look = After(lambda trainer, _: steps.append((trainer.current_epoch, trainer.global_step)))
    _, trainer, _ = trained(images(100), look, epochs=3, accumulate_grad_batches=4)
    for epoch in range(3):
        batches = [step for number, step in steps if number == epoch]
        before = max([step for number, step in steps if number < epoch], default=0)
        assert batches[-1] - before == -(-len(batches) // 4)
    assert trainer.current_epoch == 3
