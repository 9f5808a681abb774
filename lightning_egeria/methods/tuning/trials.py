"""Training branches within a fit: Lightning's own training loop, from one state, unseen by callbacks and loggers."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.snapshots.tensor_store import TensorStore
from lightning_egeria.core.training.branches import train_hidden
from lightning_egeria.core.training.feed import BranchFeed, Feed, ReadAhead
from lightning_egeria.core.training.fit_state import FitState
from lightning_egeria.core.training.freezer import Freezer, FreezingEvent
from lightning_egeria.core.training.stopping import is_to_stop
from lightning_egeria.errors import EgeriaError, UnsupportedError
from lightning_egeria.methods.tuning.record import describe
from lightning_egeria.methods.tuning.rounds import Result, TrialRequest
from lightning_egeria.methods.tuning.spaces import Setting
from lightning_egeria.methods.tuning.summary import WINDOWS
from lightning_egeria.methods.tuning.tunables import Tunables
from lightning_egeria.upstream.torch import is_out_of_memory


def _nothing() -> None:
    """Do nothing."""


@dataclasses.dataclass
class _Branch:
    """A branch of this process.

    Attributes:
        setting: its setting.
        state: state after ``batches``; None if it is not kept.
        batches: number of batches it has trained on.
        losses: loss of each, the mean of all ranks.
        seconds: time that took.
        ended: the setting that was in use after them.
    """

    setting: Setting
    state: FitState | None = None
    batches: int = 0
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    ended: Setting = dataclasses.field(default_factory=dict)


class Trials:
    """Trains branches of one search, each from the state of training when this was created.

    A branch goes through Lightning's training loop: the user's hooks, precision, accumulation, gradient clipping,
    schedulers and counters work as in training. Callbacks and loggers do not see it, and ``self.log`` does nothing.
    Create it between two optimizer steps. Every rank must make the same calls.

    Args:
        trainer: the Trainer.
        feed: its batches.
        tunables: how to apply a setting.
        ranks: the processes of the job.
        freezer: freezer of the model, if there is one.
        most_bytes: most bytes of host memory for the states of branches; beyond, they are in temporary files.

    Attributes:
        present: the setting at the beginning.
        tunables: as above.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        feed: Feed,
        tunables: Tunables,
        ranks: Ranks,
        freezer: Freezer | None,
        most_bytes: int,
    ) -> None:
        self.present = tunables.get(trainer)
        self._trainer = trainer
        self._feed = feed
        self.tunables = tunables
        self._ranks = ranks
        self._freezer = freezer
        self._store = TensorStore(most_bytes)
        self._parent = FitState(trainer, freezer, self._store)
        self._first = trainer.fit_loop.epoch_loop.batch_progress.current.ready  # number of the first batch
        self._branches: dict[int, _Branch] = {}
        self._is_set = False  # the setting of the branch in training; an error of a setter is no result
        self._batch_size = tunables.batch_size
        self._present_size = self._batch_size.get(trainer) if self._batch_size is not None else None
        self._ahead = {self._present_size: feed.ahead}  # by batch size
        self._control: dict[int | None, _Branch] = {}  # does not learn; by batch size
        if self._batch_size is not None:
            self._batch_size.begin(trainer)

    def run(self, request: TrialRequest) -> Result:
        """Train a branch. Out of memory is a result, and in one process any error that comes with another setting.

        After an error with the present setting, `leave` returns to the beginning.

        Raises:
            UnsupportedError: if the training step returns no loss, with manual optimization.
            SIGTERMException: if training is to stop.
        """
        for number, other in self._branches.items():
            if number not in request.needed and number != request.branch:
                other.state = None
        branch = self._branches.setdefault(request.branch, _Branch(request.setting))
        failed = None
        try:
            if self._continue(branch, request.steps):
                branch.ended = self.tunables.get(self._trainer)
                failed = self._without_effect(branch) if branch.losses else "the training step returned no loss"
                branch.state = FitState(self._trainer, self._freezer, self._store)
                self._train_control_branch(branch.setting, branch.batches)
            else:
                failed = f"the epoch has too few samples left for batches of {branch.setting['batch_size']}"
        except EgeriaError:
            raise
        except Exception as error:  # of the user's training step
            memory, text = is_out_of_memory(error), (str(error).splitlines() or [""])[0]
            own = branch.setting != self.present and self._is_set
            if self._ranks.several or not (memory or _is_anomaly(error) or own):
                raise
            kind = "out of memory" if memory else "not finite" if _is_anomaly(error) else type(error).__name__
            failed = f"{kind}: {text:.200}"
        if failed is not None:
            branch.state = None
            self._free()
        cost = branch.seconds if self.tunables.changes_cost else float(request.steps)
        return self._relative(branch.losses, cost, failed)

    def _without_effect(self, branch: _Branch) -> str | None:
        """Say that a value made no difference: another one became the same after as many batches."""
        for other in self._branches.values():
            for name, value in branch.setting.items():
                apart = other.batches == branch.batches and other.setting[name] != value
                if apart and other.ended.get(name) == branch.ended[name]:
                    now, others = describe({name: branch.ended[name]}), describe({name: other.setting[name]})
                    return f"other code sets {name!r}: {now} after this trial, and after the trial of {others}"
        return None

    @property
    def control_steps(self) -> int:
        """Number of steps whose weights were put back."""
        return sum(one.batches for one in self._control.values()) // self._trainer.accumulate_grad_batches

    def leave(self) -> None:
        """Return to the beginning."""
        self._parent.restore()
        self.tunables.set(self._trainer, self.present)

    def converted(self, steps: int) -> int:
        """Return how many steps of the present batch size take the samples of ``steps`` steps at the beginning."""
        if self._present_size is None or self._size is None:
            return steps
        return max(1, steps * self._present_size // self._size)

    def close(self) -> None:
        """The search is over."""
        if self._batch_size is not None:
            self._batch_size.end()

    def adopt(self, request: TrialRequest) -> None:
        """Continue training from the end of a branch."""
        branch = self._branches.setdefault(request.branch, _Branch(request.setting))
        if branch.state is None:
            self._continue(branch, request.steps)
        else:
            branch.state.restore()
            self.tunables.set_outside_checkpoints(self._trainer, branch.setting)
        if self._size == self._present_size:
            self._feed.skip(branch.batches)
        elif self._batch_size is not None:
            done = self._first + branch.batches
            self._batch_size.go_on(self._trainer, branch.batches, lambda: self._feed.restart(done))
        freezer = self._freezer
        if freezer is not None and freezer.depth != self._parent.frozen_depth:
            kind = "freeze" if freezer.depth > self._parent.frozen_depth else "unfreeze"
            step = self._trainer.global_step
            freezer.events.append(FreezingEvent(step, kind, freezer.depth, "the fastest branch of a search"))

    @property
    def _size(self) -> int | None:
        """Batch size of the branch in training; None if it is not tuned."""
        return self._batch_size.get(self._trainer) if self._batch_size is not None else None

    def _batches(self, size: int | None) -> ReadAhead:
        if size not in self._ahead:
            assert self._batch_size is not None
            assert size is not None
            self._ahead[size] = ReadAhead(self._batch_size.batches(size))
        return self._ahead[size]

    def _continue(self, branch: _Branch, steps: int) -> bool:
        """Train a branch until it has the samples of ``steps`` steps; False if the epoch has no batch for it."""
        self._is_set = False
        self._begin(branch)
        self._is_set = True
        accumulated = self._trainer.accumulate_grad_batches
        if self._batch_size is not None and self._present_size is not None:
            steps = self._batch_size.steps(steps, self._present_size, accumulated)
        if steps > 0:
            self._train(branch, steps * accumulated)
        return steps > 0

    def _begin(self, branch: _Branch) -> None:
        """Return to the end of a branch, or to the beginning."""
        if branch.state is not None:
            branch.state.restore()
            self.tunables.set_outside_checkpoints(self._trainer, branch.setting)
        else:
            self._parent.restore()
            branch.batches, branch.losses, branch.seconds = 0, [], 0.0
            self.tunables.set(self._trainer, branch.setting)
        branch.state = None

    def _relative(self, losses: list[float], cost: float, failed: str | None) -> Result:
        """Take the part out of the losses that the batch has in them: with learning minus without, plus the mean."""
        base = self._control[self._size].losses[: len(losses)] if self._size in self._control else []
        if not losses or len(base) < len(losses) or not all(map(math.isfinite, base)):
            return Result(losses, cost, failed)
        mean = math.fsum(base) / len(base)
        relative = [loss - without + mean for loss, without in zip(losses, base, strict=True)]
        return Result(relative, cost, failed, mean)

    def _train_control_branch(self, setting: Setting, batches: int) -> None:
        """Note the losses of the first batches with the weights of the beginning. The state changes.

        The steps are whole ones, whose weights are put back: so a module finds all that it finds in training. With
        manual optimization, a step may use weights that it has just changed, so there is nothing to note.
        """
        trainer, size = self._trainer, self._size
        own = {name: value for name, value in setting.items() if name == "batch_size"}
        control = self._control.setdefault(size, _Branch(self.present | own))
        if batches <= control.batches or not trainer.lightning_module.automatic_optimization:
            return
        self._begin(control)
        feed = BranchFeed(self._batches(size).from_here(control.batches, alike=True), _nothing)
        losses = self._losses_of(feed, batches - control.batches, self._parent.restore_parameters)
        control.batches, control.losses = batches, control.losses + losses
        control.state = FitState(trainer, self._freezer, self._store)

    def _train(self, branch: _Branch, batches: int) -> None:
        """Train until the branch has had this many batches, or a loss is not finite."""
        device = self._trainer.strategy.root_device
        wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else _nothing
        feed = BranchFeed(
            self._batches(self._size).from_here(branch.batches), wait if self.tunables.changes_cost else _nothing
        )
        chunk = max(1, batches // WINDOWS)
        started = time.perf_counter()
        while branch.batches < batches and all(map(math.isfinite, branch.losses[-chunk:])):
            count = min(chunk, batches - branch.batches)
            branch.losses += self._losses_of(feed, count)
            branch.batches += count
            if self._ranks.largest(is_to_stop(self._trainer)):
                raise SIGTERMException
        wait()
        branch.seconds += time.perf_counter() - started - feed.seconds
        if not branch.losses and not self._trainer.lightning_module.automatic_optimization:
            raise UnsupportedError(
                "the training step returned no loss in a trial. With manual optimization, return it at the end of "
                "training_step"
            )

    def _losses_of(self, feed: BranchFeed, batches: int, after_batch: Callable[[], object] = _nothing) -> list[float]:
        """Train on some batches and return their losses, the means of all ranks."""
        try:
            losses = train_hidden(self._trainer, self._freezer, feed, batches, after_batch)
        except StopIteration:
            raise UnsupportedError(
                "on_train_batch_start returned -1 in a trial, which ends the epoch, and a trial ends before its epoch. "
                "Use limit_train_batches or a shorter loader, or no BranchTuner"
            ) from None
        return self._ranks.mean([loss for loss in losses if loss is not None])

    def _free(self) -> None:
        for optimizer in self._trainer.optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._trainer.strategy.root_device.type == "cuda":
            torch.cuda.empty_cache()


def _is_anomaly(error: Exception) -> bool:
    """Whether this is what ``Trainer(detect_anomaly=True)`` says of numbers that are not finite."""
    text = str(error)
    return text.startswith("Function '") and "returned nan values" in text
