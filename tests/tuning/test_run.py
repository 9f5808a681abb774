"""A search in a fit: what it says, and what it takes from trials that were finished before."""

import logging

import lightning as L
from models import Classifier, fit

from lightning_egeria.distributed.ranks import Ranks
from lightning_egeria.training.notices import Notices
from lightning_egeria.tuning.feed import Feed
from lightning_egeria.tuning.rounds import Limits, Result
from lightning_egeria.tuning.run import SearchRun
from lightning_egeria.tuning.searchers import GridSearcher
from lightning_egeria.tuning.spaces import Choice
from lightning_egeria.tuning.trials import Trials
from lightning_egeria.tuning.tunables import Tunables


class Searches(L.Callback):
    def __init__(self, finished):
        self.finished, self.shown, self.record = finished, [], None

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 2:
            trainer.fit_loop._data_fetcher = self.feed = Feed(
                trainer.fit_loop._data_fetcher, lambda: self.once(trainer)
            )

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
    assert "ends after 3 trials and 6 steps, because nothing was left to try. Training goes on with lr=" in lines[-1]
    assert (searches.record.step, searches.record.steps) == (10, 6)


def test_finished_trials_are_not_repeated():
    claimed = {(repr({"lr": 0.8}), 2): Result([9.0, 0.0], 2)}
    searches, module = Searches(dict(claimed)), Classifier()
    fit(module, searches)
    branch = searches.record.branches[searches.record.winner]
    assert branch["setting"] == {"lr": 0.8}
    assert (branch["speed"], branch["label"]) == (4.5, "converging")
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.8  # the winner was trained after all
    assert len(module.losses) == 15
