"""Branch tuning as a Lightning callback. It only puts the parts together."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
from torch.nn.parameter import is_lazy

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.checkpoints import check_version, checkpoint_read
from lightning_egeria.core.training.feed import Feed
from lightning_egeria.core.training.loops import resumes_at_an_end
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.panels import Panel
from lightning_egeria.core.training.progress import BarEntry
from lightning_egeria.errors import ArgumentError, CheckpointError, UnsupportedError, check_integers
from lightning_egeria.methods.tuning import METHOD
from lightning_egeria.methods.tuning.display import closing_lines, panels_of_searches
from lightning_egeria.methods.tuning.plateau import Advice, Plateau
from lightning_egeria.methods.tuning.record import SearchRecord
from lightning_egeria.methods.tuning.rounds import Limits, Result
from lightning_egeria.methods.tuning.run import SearchRun
from lightning_egeria.methods.tuning.searchers import SEARCHERS, Searcher, SearcherFactory
from lightning_egeria.methods.tuning.setups import TOO_SHORT, check_schedulers, check_trainer, most_steps
from lightning_egeria.methods.tuning.spaces import Setting, Space
from lightning_egeria.methods.tuning.trials import Trials
from lightning_egeria.methods.tuning.tunables import CustomTunable, Tunables, freezer_of

STATE_VERSION = 2


class BranchTuner(pl.Callback):
    """Finds settings within one fit: tries each from the same state of training, and continues from the best branch.

    Args:
        tunables: the values of each tunable, by name: ``"lr"``, ``"momentum"``, ``"batch_size"``, ``"dropout"``,
            ``"gradient_clip_val"``, ``"frozen_depth"``, or any option of the optimizer. A `CustomTunable` has its own
            setter.
        searcher: ``"compass"`` (first a few settings over the whole space, then settings around the fastest),
            ``"random"``, ``"grid"``; with Optuna ``"tpe"`` or ``"cmaes"``; or a function from spaces and a seed to a
            searcher.
        max_trials: largest number of settings in a search.
        max_share: largest number of steps of all trials together, as a share of the steps of the run. The first search
            may use all of them.
        first_steps: optimizer steps of the first trials.
        monitor: validation metric that starts a search when it no longer improves; None starts no such search.
        mode: ``"min"`` if a lower metric is better, or ``"max"``.
        patience: number of validations without improvement before a search.
        stop_patience: number of validations without improvement that end training; None never ends it.
        at_epochs: epochs that begin with a search.
        seed: equal seeds try equal settings.
        most_state_bytes: host memory for the states of branches, in bytes; more goes to temporary files.

    Attributes:
        searches: a record of each search so far.
        setting: the setting in use; None before the first search.

    Raises:
        ArgumentError: if an argument is out of range.
    """

    egeria_method = METHOD

    def __init__(
        self,
        tunables: Mapping[str, Space | CustomTunable],
        searcher: str | SearcherFactory = "compass",
        max_trials: int = 20,
        max_share: float = 1.0,
        first_steps: int = 10,
        monitor: str | None = None,
        mode: str = "min",
        patience: int = 4,
        stop_patience: int | None = None,
        at_epochs: Sequence[int] = (0,),
        seed: int = 0,
        most_state_bytes: int = 2**32,
    ) -> None:
        super().__init__()
        if not callable(searcher) and searcher not in [*SEARCHERS]:
            raise ArgumentError(f"searcher must be one of {', '.join(SEARCHERS)} or a function, got {searcher!r}")
        check_integers(1, max_trials=max_trials, first_steps=first_steps)
        if type(seed) is not int:
            raise ArgumentError(f"seed must be an integer, got {seed!r}")
        check_integers(0, most_state_bytes=most_state_bytes)
        epochs = list(at_epochs) if isinstance(at_epochs, list | tuple | range) else [-1]
        if not all(type(one) is int and one >= 0 for one in epochs):
            raise ArgumentError(f"at_epochs must be numbers of epochs, such as (0, 10), got {at_epochs!r}")
        if monitor is not None and not isinstance(monitor, str):
            raise ArgumentError(f"monitor must be the name of a metric of validation, got {monitor!r}")
        share: object = max_share
        if not (isinstance(share, int | float) and share > 0):
            raise ArgumentError(f"max_share must be a positive share of the run's steps, got {max_share!r}")
        if monitor is None and stop_patience is not None:
            raise ArgumentError("stop_patience needs the name of a validation metric as monitor")
        self.tunables = Tunables(tunables)
        self.searcher = searcher
        self.max_trials = max_trials
        self.max_share = max_share
        self.first_steps = first_steps
        self.monitor = monitor
        self.at_epochs = tuple(epochs)
        self.seed = seed
        self.most_state_bytes = most_state_bytes
        self.notices = Notices("tuning")
        self.ranks = Ranks()
        self._plateau_arguments = (mode, patience, stop_patience)
        self._fitting: bool | None = None
        self._started = 0.0
        self._bar_entry: BarEntry | None = None
        self._feed: Feed | None = None
        self._own_clipping: list[float | None] = []  # the Trainer's, before it was tuned
        self._forget()

    def _forget(self) -> None:
        self.searches: list[SearchRecord] = []
        self.setting: Setting | None = None
        self._plateau = Plateau(*self._plateau_arguments)
        self._due: str | None = None  # why a search comes next
        self._searched_epoch = -1  # the last one that `at_epochs` gave a search
        self._finished: dict[tuple[str, int], Result] = {}  # trials of a search that was left
        self._trying: str | None = None
        self._resumed = False

    @property
    def search_steps(self) -> int:
        """Optimizer steps of all trials so far, including the trials that training kept."""
        return sum(record.steps for record in self.searches)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an unsupported Trainer."""
        again, self._fitting = self._fitting is not None, stage == "fit"
        if not self._fitting:
            return
        if again:
            self._forget()
        check_trainer(trainer)
        self.ranks = Ranks(trainer.strategy.root_device)
        if self.tunables.batch_size is not None:
            self.tunables.batch_size.attach(trainer, self.notices.warn)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Apply the part of the setting that checkpoints do not hold.

        Raises:
            UnsupportedError: a scheduler follows what is logged in each step.
        """
        self.tunables.check(trainer)
        check_schedulers(trainer, self.notices.inform)
        if "gradient_clip_val" in self.tunables.spaces:
            self._own_clipping.append(trainer.gradient_clip_val)
        self._started = time.perf_counter()
        if not self._resumed:
            self._forget()
        self._resumed = False
        if self.setting is not None:
            self.tunables.set_outside_checkpoints(trainer, self.setting)
        if (batch_size := self.tunables.batch_size) is not None:
            batch_size.begin_training()
        self._bar_entry = BarEntry(trainer, "tuning", lambda: self._trying)
        if resumes_at_an_end(trainer):  # Lightning begins the next epoch without `on_train_epoch_start`
            self._search_in(trainer.current_epoch)
        self._read_ahead(trainer)  # Lightning skips `on_train_epoch_start` when it resumes within an epoch

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make a search due, if this epoch begins with one."""
        if (batch_size := self.tunables.batch_size) is not None:
            batch_size.begin_epoch()
        self._search_in(trainer.current_epoch)
        self._read_ahead(trainer)

    def _search_in(self, epoch: int) -> None:
        if epoch in self.at_epochs and epoch != self._searched_epoch:
            self._due, self._searched_epoch = f"epoch {epoch} begins with one", epoch

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Keep count of the batches in the epoch."""
        if self.tunables.batch_size is not None:
            self.tunables.batch_size.batch_start()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Make a search due, or end training, if validation has stopped getting better."""
        if self.monitor is None or trainer.sanity_checking or not self._fitting:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            raise ArgumentError(
                f"monitor={self.monitor!r} was not logged in validation; the metrics are "
                f"{', '.join(sorted(trainer.callback_metrics)) or 'none'}"
            )
        advice = self._plateau.update(float(self.ranks.share(float(value))))
        if advice is Advice.TUNE:
            self._due = f"no better {self.monitor} for {self._plateau.waited} validations"
        elif advice is Advice.STOP:
            self.notices.inform(f"no better {self.monitor} for {self._plateau.waited} validations: training ends")
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the Trainer its own data fetcher back."""
        self._release(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log the results and the cost of the searches."""
        for line in closing_lines(self.searches, time.perf_counter() - self._started):
            self.notices.inform(line)

    def panels(self) -> list[Panel]:
        """Return the figures of a report: the tree of branches, their speeds, and the time of each search."""
        return panels_of_searches(self.searches)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Do the same as `teardown`, which Lightning does not call after an error."""
        self._leave(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave nothing on the Trainer."""
        self._leave(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return searches, setting, and the trials of a search that has not ended, in plain types."""
        return {
            "version": STATE_VERSION,
            "searches": [record.state() for record in self.searches],
            "setting": self.setting,
            "due": self._due,
            "searched_epoch": self._searched_epoch,
            "best": self._plateau.best,
            "waited": self._plateau.waited,
            "batch_size": self.tunables.batch_size.state() if self.tunables.batch_size is not None else None,
            "finished": [
                [setting, steps, list(one.losses), one.cost, one.failed, one.start]
                for (setting, steps), one in self._finished.items()
            ],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the state of a checkpoint.

        Raises:
            CheckpointError: if another version of this class wrote the checkpoint, it is of a search for something
                else, or it is damaged.
        """
        if self._fitting is False:
            return
        check_version(state_dict, STATE_VERSION, "tuning")
        setting = state_dict.get("setting")
        if isinstance(setting, Mapping) and set(setting) != set(self.tunables.spaces):
            raise CheckpointError(
                f"the checkpoint holds a search for {', '.join(sorted(setting))}, and this BranchTuner tunes "
                f"{', '.join(sorted(self.tunables.spaces))}. Leave out ckpt_path, or tune the same"
            )
        self._forget()
        with checkpoint_read("tuning"):
            self.searches = [SearchRecord.from_state(record) for record in state_dict["searches"]]
            self.setting = None if state_dict["setting"] is None else dict(state_dict["setting"])
            self._due = state_dict["due"]
            self._searched_epoch = state_dict["searched_epoch"]
            self._plateau.best, self._plateau.waited = state_dict["best"], int(state_dict["waited"])
            self._finished = {
                (setting, int(steps)): Result(list(losses), float(cost), failed, start)
                for setting, steps, losses, cost, failed, start in state_dict["finished"]
            }
        if self.tunables.batch_size is not None:
            self.tunables.batch_size.load(state_dict.get("batch_size"))
        self._resumed = True

    def _read_ahead(self, trainer: pl.Trainer) -> None:
        if self._due is None or self._feed is not None:
            return
        if getattr(trainer, "fast_dev_run", False):
            self.notices.inform("no search, because of fast_dev_run", once="fast_dev_run")
            return
        self._feed = Feed.install(trainer, self, lambda: self._search_if_due(trainer))

    def _release(self, trainer: pl.Trainer) -> None:
        Feed.remove(trainer, self)
        self._feed = None

    def _leave(self, trainer: pl.Trainer) -> None:
        self._release(trainer)
        if self.tunables.batch_size is not None:
            self.tunables.batch_size.detach()
        if self._own_clipping:
            trainer.gradient_clip_val = self._own_clipping.pop()
        if self._bar_entry is not None:
            self._bar_entry.remove()
        self._bar_entry = None

    def _search_if_due(self, trainer: pl.Trainer) -> None:
        accumulated = trainer.fit_loop.epoch_loop.batch_progress.current.ready % trainer.accumulate_grad_batches
        if self._due is None or accumulated or (self.tunables.needs_freezer and freezer_of(trainer) is None):
            return  # the first step of training finds the layer modules
        if any(map(is_lazy, trainer.lightning_module.parameters())):
            return  # the first step makes them
        assert self._feed is not None
        try:
            self.tunables.check(trainer)  # schedulers may be other ones since the start, as with weight averaging
        except UnsupportedError as error:
            self.notices.warn(f"step {trainer.global_step}: no search, because {error}")
            self._due = None
            return
        sizes = len(self.tunables.batch_size.sizes) if self.tunables.batch_size is not None else 0
        most = self.ranks.share(most_steps(trainer, self._feed, 1 + sizes))
        limits = self._limits(trainer, most)
        if most < 1:
            self.notices.warn(TOO_SHORT)
        elif limits.most_total < 2 * limits.lengths[0]:
            self.notices.inform(
                f"step {trainer.global_step}: no search, because two trials of {limits.lengths[0]} steps need more "
                f"steps than are left of max_share={self.max_share}"
            )
        else:
            trials = Trials(trainer, self._feed, self.tunables, self.ranks, freezer_of(trainer), self.most_state_bytes)
            run = SearchRun(trainer, trials, self.ranks, self.notices, self._finished)
            self._trying = "..."
            record = run.search(self._new_searcher, limits, self._due, self._show)
            self.searches.append(record)
            self.setting = record.setting
        self._due = self._trying = None
        self._finished.clear()

    def _new_searcher(self, spaces: Mapping[str, Space]) -> Searcher:
        factory = SEARCHERS[self.searcher] if isinstance(self.searcher, str) else self.searcher
        searcher = factory(spaces, self.seed + len(self.searches))
        if not (hasattr(searcher, "ask") and hasattr(searcher, "tell")):
            raise ArgumentError(f"searcher must return an object with ask and tell, got {searcher!r:.60}")
        return searcher

    def _limits(self, trainer: pl.Trainer, most: int) -> Limits:
        total = self.max_share * trainer.estimated_stepping_batches - self.search_steps
        if not self.searches:
            batch_size = self.tunables.batch_size
            first = self.first_steps if batch_size is None else batch_size.first_steps(self.first_steps, most)
            return Limits(first, most, self.max_trials, total)
        last = self.searches[-1]
        return Limits(min(last.trial_steps, most), most, len(last.branches), total, halving=False)

    def _show(self, text: str) -> None:
        self._trying = text
