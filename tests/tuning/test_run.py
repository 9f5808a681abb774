"""A search in a fit: what it says, and what it takes from trials that were finished before."""

import logging

import lightning as L
import pytest

from lightning_egeria import BranchTuner, PrefixFreezing
from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.errors import ArgumentError
from lightning_egeria.methods.tuning.rounds import Limits, Result
from lightning_egeria.methods.tuning.run import SearchRun
from lightning_egeria.methods.tuning.searchers import GridSearcher
from lightning_egeria.methods.tuning.spaces import Choice
from lightning_egeria.methods.tuning.trials import Trials
from lightning_egeria.methods.tuning.tunables import Tunables
from support.models import Classifier, fit


class Searches(L.Callback):
    def __init__(self, finished):
        self.finished, self.shown, self.record = finished, [], None

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            self.feed = Feed.install(trainer, self, lambda: self.once(trainer))

    def once(self, trainer):
        if self.record is None:
            tunables = Tunables({"lr": Choice([0.05, 0.2, 0.8])})
            trials = Trials(trainer, self.feed, tunables, Ranks(), None, 0)  # states are in files
            run = SearchRun(trainer, trials, Ranks(), Notices("tuning"), self.finished)
            self.record = run.search(GridSearcher, Limits(2, 2, 9, halving=False), "of the test", self.shown.append)
            assert "save_checkpoint" not in vars(trainer)


def test_it_says_what_it_does(caplog):
    searches = Searches({})
    with caplog.at_level(logging.INFO):
        fit(Classifier(), searches)
    assert sorted(searches.shown) == ["lr=0.05", "lr=0.2", "lr=0.8"]
    assert len(searches.finished) == 3
    lines = [line for line in caplog.messages if line.startswith("tuning: ")]
    assert lines[0] == "tuning: step 10: a search begins, because of the test"
    assert sum("2 steps, loss" in line for line in lines) == 3
    assert "ends after 3 trials and 8 steps, because nothing was left to try. Training continues with lr=" in lines[-1]
    assert (searches.record.step, searches.record.steps) == (10, 8)  # two of them without learning


def test_finished_trials_are_not_repeated():
    claimed = {(repr({"lr": 0.8}), 2): Result([9.0, 0.0], 2)}
    searches, module = Searches(dict(claimed)), Classifier()
    fit(module, searches)
    branch = searches.record.branches[searches.record.winner]
    assert branch["setting"] == {"lr": 0.8}
    assert (branch["speed"], branch["label"]) == (4.5, "converging")
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.8  # the winner was trained after all
    assert len(module.losses) == 15


class WarmingUp(Classifier):
    """Sets its own learning rate in each step, as the hook's documentation shows."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1, (self.trainer.global_step + 1) / 50)


def test_a_value_that_something_else_sets_is_no_setting(caplog):
    searches = Searches({})
    with caplog.at_level(logging.INFO):
        fit(WarmingUp(), searches)
    assert [branch["failed"] is None for branch in searches.record.branches] == [True, False, False, False]
    assert "other code sets 'lr': lr=0.012 after this trial, and after the trial of lr=0.01" in caplog.text


def test_a_scheduler_that_comes_later_forbids_searches(caplog):
    averaging = L.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)
    tuner = BranchTuner({"lr": Choice([0.01, 0.1])}, at_epochs=(2,), first_steps=1)
    with pytest.warns(UserWarning, match="step 10: no search, because the scheduler SWALR is not a scheduler of torch"):
        fit(Classifier(), averaging, tuner)
    assert tuner.setting is None
    assert not tuner.searches


@pytest.mark.parametrize(("depths", "found"), [([0, 99], "99"), ([98, 1], "98")])
def test_depths_beyond_the_chain_are_named(depths, found):
    tuner = BranchTuner({"frozen_depth": Choice(depths)}, first_steps=1)
    with pytest.warns(UserWarning, match=f"cannot be {found}: it is 0 now, and takes .* whole numbers from 0 to 2"):
        fit(Classifier(), PrefixFreezing(), tuner)
    assert not tuner.searches


def test_what_is_no_searcher_is_named():
    tuner = BranchTuner({"lr": Choice([0.01, 0.1])}, searcher=lambda spaces, seed: 3, first_steps=1)
    with pytest.raises(ArgumentError, match="an object with ask and tell, got 3"):
        fit(Classifier(), tuner)
