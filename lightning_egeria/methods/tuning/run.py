"""A search within a fit, on all ranks: rank 0 searches, and every rank trains."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.training.isolation import saving_later
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.resumable import is_to_stop, stop
from lightning_egeria.methods.tuning.record import SearchRecord, describe
from lightning_egeria.methods.tuning.rounds import WINDOWS_IN_RACE, Limits, Outcome, Result, TrialRequest, search
from lightning_egeria.methods.tuning.searchers import Searcher
from lightning_egeria.methods.tuning.spaces import Setting, Space
from lightning_egeria.methods.tuning.summary import window_means
from lightning_egeria.methods.tuning.trials import Trials


class SearchRun:
    """One search, from the present state of training.

    Args:
        trainer: the Trainer, between two optimizer steps.
        trials: train the branches.
        ranks: the processes of the job.
        notices: takes log lines.
        finished: trials that a search from this state has finished before, by setting (its ``repr``) and steps. Each
            further one is added.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        trials: Trials,
        ranks: Ranks,
        notices: Notices,
        finished: dict[tuple[str, int], Result],
    ) -> None:
        self._trainer = trainer
        self._ranks = ranks
        self._notices = notices
        self._finished = finished
        self._step = trainer.global_step
        self._trying: Setting | None = None
        self._trials = trials

    def search(
        self,
        new_searcher: Callable[[Mapping[str, Space]], Searcher],
        limits: Limits,
        reason: str,
        show: Callable[[str], None],
    ) -> SearchRecord:
        """Search, and continue training from the fastest branch.

        Args:
            new_searcher: makes the searcher from the spaces; on rank 0 only.
            limits: what the search may spend.
            reason: why it begins.
            show: called with the setting of each trial.

        Raises:
            SIGTERMException: if training is to stop; it is where it was, and ``finished`` has the trials.
        """
        started, trials = time.perf_counter(), self._trials
        self._notices.inform(f"step {self._step}: a search begins, because {reason}")
        run = search(new_searcher(trials.tunables.spaces), trials.present, limits) if self._ranks.leads else None
        result: Result | None = None
        with self._stopping(), saving_later(self._trainer) as waiting, self._back_after_an_error():
            while True:
                message = self._ranks.share(_next_message(run, result))
                if "request" not in message:
                    break
                request = TrialRequest(**message["request"])
                show(describe(request.setting))
                self._trying = request.setting
                result = self._trial(request)
                self._save(waiting)
            self._trying = None
            winner: int | None = message["winner"]
            branches: list[dict[str, Any]] = message["branches"]
            setting: Setting = trials.present
            if winner is None:
                trials.leave()
            else:
                setting = branches[winner]["setting"]
                trials.adopt(TrialRequest(winner, setting, branches[winner]["steps"]))
        length = trials.converted(message["trial_steps"] if winner is None else branches[winner]["steps"])
        seconds = time.perf_counter() - started
        control_steps = trials.control_steps
        record = SearchRecord(
            self._step, reason, message["reason"], branches, winner, length, seconds, setting, control_steps
        )
        self._notices.inform(
            f"step {self._step}: the search ends after {len(branches)} trials and {record.steps} steps, because "
            f"{record.ended}. "
            + ("No setting made progress" if winner is None else f"Training continues with {describe(setting)}")
        )
        return record

    @contextlib.contextmanager
    def _stopping(self) -> Iterator[None]:
        """Save where the search began, if training is to stop."""
        try:
            yield
        except SIGTERMException:
            stop(self._trainer)
            raise

    @contextlib.contextmanager
    def _back_after_an_error(self) -> Iterator[None]:
        """Let no error, and no signal, leave training within a branch."""
        try:
            yield
        except BaseException as error:  # a signal too; it is raised again
            self._trials.leave()
            if self._trying is not None and isinstance(error, Exception):
                error.add_note(f"tuning: this was in a trial of {describe(self._trying)}")
            raise
        finally:
            self._trials.close()

    def _trial(self, request: TrialRequest) -> Result:
        key = (repr(request.setting), request.steps)
        if key not in self._finished:
            self._finished[key] = self._trials.run(request)
            result = self._finished[key]
            last = window_means(result.losses, WINDOWS_IN_RACE)[-1] if result.losses else float("nan")
            first = result.start if result.start is not None else result.losses[0] if result.losses else last
            told = result.failed or f"loss {first:.4g} to {last:.4g} in its last fifth"
            self._notices.inform(f"{describe(request.setting)}: {request.steps} steps, {told}")
            numbers = {name: value for name, value in request.setting.items() if isinstance(value, int | float)}
            metrics = {"branch": request.branch, "steps": request.steps, "loss": last, **numbers}
            for logger in self._trainer.loggers:
                logger.log_metrics({f"tuning/{name}": float(one) for name, one in metrics.items()}, step=self._step)
        return self._finished[key]

    def _save(self, waiting: list[tuple[str, bool]]) -> None:
        """Write the checkpoints that were asked for in a trial: of the state before the search."""
        for path, weights_only in self._ranks.share(waiting):
            self._trials.leave()
            type(self._trainer).save_checkpoint(self._trainer, path, weights_only)
        waiting.clear()
        if self._ranks.largest(is_to_stop(self._trainer)):
            raise SIGTERMException


def _next_message(run: Generator[TrialRequest, Result, Outcome] | None, result: Result | None) -> dict[str, Any]:
    """Return rank 0's next request, or the outcome, in plain types."""
    if run is None:
        return {}
    try:
        request = next(run) if result is None else run.send(result)
        return {"request": dataclasses.asdict(request)}
    except StopIteration as end:
        outcome: Outcome = end.value
        return {**vars(outcome), "branches": [branch.state() for branch in outcome.branches]}
