"""Branches in a fit: run A, run B, and A again is A."""

from typing import ClassVar

import lightning as L
import pytest
import torch
from models import Classifier, equal, fit, images, loader

from lightning_egeria.distributed.ranks import Ranks
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.tuning.feed import Feed
from lightning_egeria.tuning.rounds import Order
from lightning_egeria.tuning.spaces import Choice
from lightning_egeria.tuning.trials import Trials
from lightning_egeria.tuning.tunables import Tunables

A, B = {"lr": 0.2}, {"lr": 1e-3}


class Tries(L.Callback):
    """Calls a function with trials before the first batch of an epoch."""

    def __init__(self, do, epoch=1):
        self.do, self.epoch = do, epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            inner = trainer.fit_loop._data_fetcher
            trainer.fit_loop._data_fetcher = self.feed = Feed(inner, lambda: self.once(trainer))

    def once(self, trainer):
        do, self.do = self.do, None
        if do is not None:
            do(Trials(trainer, self.feed, Tunables({"lr": Choice([1])}), Ranks(), None, 2**20))


def test_a_branch_again_is_the_branch():
    results = []

    def do(trials):
        results.extend(trials.run(Order(number, setting, 3)).losses for number, setting in enumerate((A, B, A)))
        trials.leave()

    plain, module = Classifier(), Classifier()
    fit(plain)
    fit(module, Tries(do))
    assert results[0] == results[2] != results[1]
    assert equal(plain, module)


@pytest.mark.parametrize("kept", [(), (0,)])
def test_a_branch_grows_as_if_it_had_run_at_once(kept):
    """Whether its state was kept or not."""
    grown, whole = [], []

    def in_parts(trials):
        trials.run(Order(0, A, 1))
        trials.run(Order(1, B, 2, kept))
        grown.append(trials.run(Order(0, A, 3)).losses)
        trials.adopt(Order(0, A, 3))

    def at_once(trials):
        whole.append(trials.run(Order(0, A, 3)).losses)
        trials.adopt(Order(0, A, 3))

    first, second = Classifier(), Classifier()
    fit(first, Tries(in_parts))
    fit(second, Tries(at_once))
    assert grown == whole
    assert first.losses == second.losses
    assert equal(first, second)


def test_losses_are_relative_to_those_without_learning():
    seen = []
    fit(Classifier(), Tries(lambda trials: (seen.append(trials.run(Order(0, {"lr": 1e-30}, 4))), trials.leave())))
    assert seen[0].losses == pytest.approx([seen[0].losses[0]] * 4, abs=1e-5)
    assert (seen[0].cost, seen[0].failed) == (4.0, None)


class Rates(Classifier):
    """Notes the learning rate of each step, where no branch forgets it; a scheduler halves it after each."""

    seen: ClassVar = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        falls = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falls, "interval": "step"}}


def test_a_branch_is_cooled_and_goes_on_as_if_it_had_not_been():
    seen = []

    def do(cools):
        def run(trials):
            seen.append(trials.run(Order(0, A, 2, cools=cools)))
            seen.append(trials.run(Order(0, A, 4, cools=cools)))
            trials.adopt(Order(0, A, 4, cools=cools))

        return run

    warm, cooled = Rates(), Rates()
    fit(warm, Tries(do(False), epoch=0), data=loader(images(64)))
    Rates.seen.clear()
    fit(cooled, Tries(do(True), epoch=0), data=loader(images(64)))
    assert equal(warm, cooled)
    assert [len(one.cooled) for one in seen] == [0, 0, 1, 2]
    # Two steps and their cooling, a forward pass without learning, two further steps, and the cooling of all four.
    base = [0.2 / 2**step for step in range(6)]
    trained = Rates.seen[:3] + Rates.seen[4:8]
    assert trained == pytest.approx([*base[:2], base[2] / 2, *base[2:4], base[4] * 2 / 3, base[5] / 3])


class SetsRates(Classifier):
    def training_step(self, batch, batch_idx):
        self.trainer.optimizers[0].param_groups[0]["lr"] = 0.01
        return super().training_step(batch, batch_idx)


class Refuses(Classifier):
    def training_step(self, batch, batch_idx):
        if self.trainer.optimizers[0].param_groups[0]["lr"] < 0.15:
            raise ValueError("the rate is too small")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (SetsRates, "the training step sets the learning rate"),
        (Refuses, "small rates end in ValueError: the rate is too small"),
    ],
)
def test_what_cannot_be_cooled_is_judged_as_it_is(module, why):
    """Training is not to end of it."""
    seen = []

    def do(trials):
        seen.extend(trials.run(Order(number, A, 3, cools=True)) for number in range(2))
        seen.append(trials.uncooled)
        trials.adopt(Order(0, A, 3, cools=True))

    fit(module() if module is SetsRates else module(lr=0.2), Tries(do, epoch=0))
    assert [seen[0].cooled, seen[1].cooled, seen[2]] == [[], [], why]
    assert seen[0].losses == seen[1].losses
    assert seen[0].failed is None


class HeldRate(Classifier):
    """Keeps the tensor of its rate, and lowers it by itself."""

    def configure_optimizers(self):
        self.rates = [torch.tensor(0.2)]
        return torch.optim.Adam(self.parameters(), lr=self.rates[0])

    def on_train_batch_start(self, batch, batch_idx):
        self.rates[0].mul_(0.5)


def test_a_rate_that_the_module_holds_stays_the_optimizers():
    def do(trials):
        trials.run(Order(0, {"lr": 0.2}, 3, cools=True))
        trials.adopt(Order(0, {"lr": 0.2}, 3, cools=True))

    plain, tuned = HeldRate(), HeldRate()
    fit(plain)
    trainer = fit(tuned, Tries(do, epoch=0))
    assert trainer.optimizers[0].param_groups[0]["lr"] is tuned.rates[0]
    assert equal(plain, tuned)


class LowersItsRate(Classifier):
    def on_train_batch_end(self, *_):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9


def test_a_rate_that_the_module_lowers_is_not_set_back():
    def do(trials):
        trials.run(Order(0, {"lr": 0.05}, 2, cools=True))
        trials.run(Order(0, {"lr": 0.05}, 3, cools=True))
        trials.adopt(Order(0, {"lr": 0.05}, 3, cools=True))

    plain, tuned = LowersItsRate(), LowersItsRate()
    fit(plain)
    fit(tuned, Tries(do, epoch=0))
    assert equal(plain, tuned)


def test_cooled_losses_are_relative_too():
    seen = []
    order = Order(0, {"lr": 1e-30}, 3, cools=True)
    fit(Classifier(), Tries(lambda trials: (seen.append(trials.run(order)), trials.leave())))
    assert seen[0].cooled == pytest.approx([seen[0].start], abs=1e-5)


class Silent(Classifier):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def test_without_a_loss_it_says_what_to_return():
    module = Silent()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="the training step returned no loss in a trial"):
        fit(module, Tries(lambda trials: trials.run(Order(0, A, 2)), epoch=0))
