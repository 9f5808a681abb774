"""Branches in a fit: run A, run B, and A again is A."""

import lightning as L
import pytest
import torch
from torch import nn

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.tuning.rounds import TrialRequest
from lightning_egeria.methods.tuning.spaces import Choice
from lightning_egeria.methods.tuning.trials import Trials
from lightning_egeria.methods.tuning.tunables import Tunables
from support.models import Classifier, equal, fit

A, B = {"lr": 0.2}, {"lr": 1e-3}


class Tries(L.Callback):
    """Calls a function with trials before the first batch of an epoch."""

    def __init__(self, do, epoch=1):
        self.do, self.epoch = do, epoch

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.epoch:
            self.feed = Feed.install(trainer, self, lambda: self.once(trainer))

    def once(self, trainer):
        do, self.do = self.do, None
        if do is not None:
            do(Trials(trainer, self.feed, Tunables({"lr": Choice([1])}), Ranks(), None, 2**20))


def test_a_branch_again_is_the_branch():
    results = []

    def do(trials):
        results.extend(trials.run(TrialRequest(number, setting, 3)).losses for number, setting in enumerate((A, B, A)))
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
        trials.run(TrialRequest(0, A, 1))
        trials.run(TrialRequest(1, B, 2, kept))
        grown.append(trials.run(TrialRequest(0, A, 3)).losses)
        trials.adopt(TrialRequest(0, A, 3))

    def at_once(trials):
        whole.append(trials.run(TrialRequest(0, A, 3)).losses)
        trials.adopt(TrialRequest(0, A, 3))

    first, second = Classifier(), Classifier()
    fit(first, Tries(in_parts))
    fit(second, Tries(at_once))
    assert grown == whole
    assert first.losses == second.losses
    assert equal(first, second)


def test_losses_are_relative_to_those_without_learning():
    seen = []
    fit(
        Classifier(), Tries(lambda trials: (seen.append(trials.run(TrialRequest(0, {"lr": 1e-30}, 4))), trials.leave()))
    )
    assert seen[0].losses == pytest.approx([seen[0].losses[0]] * 4, abs=1e-5)
    assert (seen[0].cost, seen[0].failed) == (4.0, None)


def test_hooks_of_batches_run_before_steps_without_learning():
    class Sets(Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            self.weight = 1.0 + batch_idx

        def training_step(self, batch, batch_idx):
            assert self.weight == 1 + batch_idx
            return super().training_step(batch, batch_idx)

        def on_train_batch_end(self, *_):
            del self.weight

    seen = []
    fit(Sets(), Tries(lambda trials: (seen.append(trials.run(TrialRequest(0, A, 3))), trials.leave()), epoch=0))
    assert seen[0].failed is None


class LowersItsRate(Classifier):
    def on_train_batch_end(self, *_):
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.9


class HoldsItsRate(Classifier):
    """Keeps the tensor of its rate, and lowers it by itself."""

    def configure_optimizers(self):
        self.rates = [torch.tensor(0.2)]
        weights, biases = ([p for p in self.parameters() if (p.ndim > 1) is many] for many in (True, False))
        return torch.optim.Adam([{"params": weights}, {"params": biases}], lr=self.rates[0])

    def on_train_batch_start(self, batch, batch_idx):
        self.rates[0].mul_(0.5)


@pytest.mark.parametrize(("kind", "rate"), [(LowersItsRate, 0.05), (HoldsItsRate, 0.2)])
def test_a_rate_that_the_module_lowers_is_not_set_back(kind, rate):
    def do(trials):
        trials.run(TrialRequest(0, {"lr": rate}, 2))
        trials.run(TrialRequest(0, {"lr": rate}, 3))
        trials.adopt(TrialRequest(0, {"lr": rate}, 3))

    plain, tuned = kind(), kind()
    fit(plain)
    trainer = fit(tuned, Tries(do, epoch=0))
    if kind is HoldsItsRate:
        assert all(group["lr"] is tuned.rates[0] for group in trainer.optimizers[0].param_groups)
    assert equal(plain, tuned)


class Silent(Classifier):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def test_without_a_loss_it_says_what_to_return():
    module = Silent()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match="the training step returned no loss in a trial"):
        fit(module, Tries(lambda trials: trials.run(TrialRequest(0, A, 2)), epoch=0))


class Demanding(Classifier):
    """Needs in each step what a step of training has."""

    def training_step(self, batch, batch_idx):
        inputs, labels = batch
        scores = self.net(inputs.requires_grad_())
        (slope,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
        return nn.functional.cross_entropy(scores, labels) + 0.01 * slope.square().mean() + 100.0 * self.global_step

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert outputs["loss"] > 0
        assert any(one.grad is not None for one in self.parameters())


def test_steps_without_learning_are_whole_steps():
    """A part of the loss that rises by itself is no lack of progress."""
    results = []

    def do(trials):
        results.append(trials.run(TrialRequest(0, A, 3)))
        assert trials.control_steps == 3
        trials.leave()

    fit(Demanding(), Tries(do))
    (result,) = results
    assert result.failed is None
    assert max(result.losses) - min(result.losses) < 50  # the ramp is not part of it


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")  # on purpose, here
def test_without_a_loss_a_branch_has_failed():
    class Waits(Classifier):
        def training_step(self, batch, batch_idx):
            return None if self.trainer.current_epoch == 1 else super().training_step(batch, batch_idx)

    results = []

    def do(trials):
        results.append(trials.run(TrialRequest(0, A, 3)))
        trials.leave()

    fit(Waits(), Tries(do))
    assert results[0].failed == "the training step returned no loss"
