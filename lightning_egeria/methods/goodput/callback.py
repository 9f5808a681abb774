"""The callback behind `AdaptiveBatchSize`. It only translates the hooks of training."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor

from lightning_egeria.core.distributed.ranks import Ranks
from lightning_egeria.core.profiling.clock import reached, seconds_between
from lightning_egeria.core.profiling.phases import PhaseTimer, exposed_communication
from lightning_egeria.core.training.adapted_loader import AdaptedLoader
from lightning_egeria.core.training.callback import freezing_of
from lightning_egeria.core.training.checkpoints import checkpoint_read
from lightning_egeria.core.training.loops import count_epoch_behind_an_end
from lightning_egeria.core.training.notices import Notices
from lightning_egeria.core.training.progress import BarEntry
from lightning_egeria.errors import UnsupportedError
from lightning_egeria.methods.goodput.changing import BatchSizeChanges, PlannedChange
from lightning_egeria.methods.goodput.control import BatchSizeChange, BatchSizeControl
from lightning_egeria.methods.goodput.decision import Division
from lightning_egeria.methods.goodput.gradients import GradientMeter, measure_exchange
from lightning_egeria.methods.goodput.learning_rate import LearningRateRule
from lightning_egeria.methods.goodput.memory import Mark, run_in_halves
from lightning_egeria.methods.goodput.optimizer_steps import ScaledSteps, step_schedulers
from lightning_egeria.methods.goodput.profile import Configuration

FIRST_HINTS_S, HINTS_EVERY_S = 1.0, 30.0  # a young job knows more every second


class _Timed(NamedTuple):
    """What a time of a batch is for: its samples, and whether the optimizer stepped with it."""

    samples: int
    stepped: bool


@dataclasses.dataclass(frozen=True)
class Settings:
    """How steps are measured and counted.

    Attributes:
        rule: of the learning rate.
        schedule_by: what schedulers count.
        measure_every: steps between two measurements of the noise.
        hints: file for a scheduler; None writes none.
    """

    rule: LearningRateRule
    schedule_by: str
    measure_every: int
    hints: Path | None


@dataclasses.dataclass(frozen=True)
class Start:
    """What `BatchSizeSteps` starts from.

    Attributes:
        control: decides.
        adapted: the training data.
        now: batch size.
        settings: how steps are measured and counted.
        planned: the change on its way; None without one.
        done: number of batches that were trained in an epoch that is resumed.
        state: that of a resumed run; None without one.
    """

    control: BatchSizeControl
    adapted: AdaptedLoader
    now: Division
    settings: Settings
    planned: PlannedChange | None
    done: int
    state: Mapping[str, Any] | None


class BatchSizeSteps(pl.Callback):
    """Measures each step, scales its learning rate, and changes the batch size between steps.

    Args:
        start: called when training starts, with optimizers, strategy and checkpoint in place.
        notices: takes log lines and warnings.

    Attributes:
        started: whether training has started. Before that, there is none of what follows.
        control: decides.
        changes: makes the changes.
        adapted: the training data.
    """

    control: BatchSizeControl
    changes: BatchSizeChanges
    adapted: AdaptedLoader
    _settings: Settings
    _steps: ScaledSteps
    _meter: GradientMeter
    _timer: PhaseTimer
    _bar: BarEntry

    def __init__(self, start: Callable[[pl.Trainer], Start], notices: Notices) -> None:
        self.started = False
        self._start, self._notices = start, notices
        self._done = 0  # batches of this epoch
        self._window: list[int] = []  # samples of the batches of this step, in this process
        self._backwards, self._steps_before = 0, 0
        self._repeated = False  # whether this batch was repeated in halves
        self._halved: tuple[Configuration, Mark, Mark] | None = None  # times of the last halves
        self._beside: deque[float] = deque(maxlen=16)  # seconds of batches beside forward and backward
        self._hinted, self._hint_pause = -math.inf, FIRST_HINTS_S

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start to measure."""
        start = self._start(trainer)
        self.control, self.adapted, self._settings = start.control, start.adapted, start.settings
        optimizer, scaler = trainer.optimizers[0], getattr(trainer.precision_plugin, "scaler", None)
        self._meter = GradientMeter(
            optimizer,
            start.control.noise,
            start.settings.measure_every,
            trainer.world_size,
            scaler.get_scale if scaler is not None else lambda: 1.0,
        )
        measure_exchange(trainer.strategy.model, self._meter)
        ranks = Ranks(trainer.strategy.root_device)
        self.changes = BatchSizeChanges(trainer, start.control, ranks, start.now, self._notices)
        self._steps, self._timer = ScaledSteps(optimizer), PhaseTimer(trainer.strategy.root_device)
        self._bar = BarEntry(trainer, "batch", lambda: str(self.changes.now.total))
        self.started = True
        self._done = start.done
        if start.state is not None:
            with checkpoint_read("goodput"):
                self._meter.load(start.state["meter"])
        if start.planned is not None:
            self.changes.plan(start.planned, start.adapted)
            if not self._done:
                self._report(self.changes.epoch_ended(trainer.global_step))
        if start.adapted.begin_training():
            count_epoch_behind_an_end(trainer)
            self._done = 0
            self.control.progress.begin_epoch()
            self._report(self.changes.epoch_ended(trainer.global_step))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A new epoch begins; not one that is resumed."""
        self._done = 0
        self._window.clear()
        self.control.progress.begin_epoch()
        self.adapted.begin_epoch()
        self._timer.ready()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """A batch begins, and maybe a step."""
        self.adapted.tell_length()
        self._steps_before, self._backwards = trainer.global_step, 0
        freezing = freezing_of(trainer)
        depth = freezing.frozen_depth if freezing is not None else 0
        if depth != self.control.depth:
            self.control.depth = depth
            self._meter.forget()
            self.control.forget(trainer.global_step)
        if batch_idx % self.changes.now.batches == 0:
            self._window.clear()
            self._begin_step(trainer, batch, batch_idx)
        self._scale_rate()
        self._timer.batch_start(depth)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is over."""
        self._timer.forward_end()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward is over.

        Raises:
            UnsupportedError: if it is not the first of its batch.
        """
        self._backwards += 1
        if self._backwards > 1:
            raise UnsupportedError(
                f"the optimizer ran the training step more than once in step {trainer.global_step}, as LBFGS and SAM "
                "do. AdaptiveBatchSize needs one backward for each batch. Use SGD, Adam or AdamW"
            )
        self._timer.backward_end()
        self._meter.batch_end()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is over, maybe with an optimizer step."""
        stepped = trainer.global_step > self._steps_before
        samples = self.adapted.batches.size_of(self._done)
        self._done += 1
        self._window.append(samples)
        waited = exposed_communication(trainer.strategy.model) if self.changes.now.replicas > 1 else 0.0
        timed = samples == self.changes.now.local and not self._repeated
        self._timer.batch_end(trainer.global_step, waited, _Timed(samples, stepped) if timed else None)
        self._note_times()
        if stepped:
            self._steps.end()
            self._step_over(trainer)
            if batch is not None:
                self.changes.decide(trainer.global_step, self.adapted, batch, samples, batch_idx)
        self._report(self.changes.reach(self._done, trainer.global_step))
        self.control.note(trainer.global_step, self.changes.now)
        self._write_hints(trainer)
        self._timer.ready()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training continues."""
        if self.started:
            self._timer.ready()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The epoch is over."""
        self._done = 0
        self._report(self.changes.epoch_ended(trainer.global_step))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Let a run without `AdaptiveBatchSize` resume from the checkpoint."""
        # Lightning saves the state of our loader, which is empty, and would ask for that loader again.
        checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {}).pop("combined_loader", None)

    def state(self) -> dict[str, Any]:
        """Return all that a checkpoint needs, in plain types and tensors."""
        meter = self._meter.state()  # first: it adds to the noise
        loading = self.adapted.state(self._done)
        return {
            **self.control.state(),
            **self.changes.state(),
            "meter": meter,
            "done": self._done if loading["place"] else 0,
            **loading,
        }

    def close(self, trainer: Any) -> None:
        """Let go of the Trainer and the optimizer. Safe to call twice."""
        if not self.started:
            return
        self.started = False
        self._write_hints(trainer, last=True)
        self._steps.remove()
        self.changes.close()
        self._bar.remove()

    def _begin_step(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step
        now, batches = self.changes.now, self.adapted.batches
        # The last batch of an epoch may be smaller, which is known once it is drawn.
        within = batch_idx + now.batches < len(batches)
        whole = within or (now.batches == 1 and batches.size_of(batch_idx) == now.local)
        scale = now.total / self.control.initial
        self._meter.begin(step, now.batches if whole and not self.control.halved(now) else 0, scale)
        stands_for = self.control.repeats(step, now) if whole and step % self._settings.measure_every == 0 else 0
        self._repeated = stands_for > 0
        if self._repeated:
            try:
                halves = run_in_halves(trainer, batch, now.local, batch_idx)
            except Exception as error:
                self.control.halves = False
                self._notices.warn(
                    f"step {step}: half of a batch could not be run to measure the gradient noise: "
                    f"{type(error).__name__}: {error}. From now on, larger batches are accumulated from two batches"
                )
                return
            self._meter.add_halves(halves.first, halves.second, scale, stands_for)
            where = Configuration(self.control.nodes, 1, now.local // 2, self.control.depth)
            self._halved = where, halves.began, halves.ended

    def _scale_rate(self) -> None:
        """Scale the learning rate for a step that ends with this batch: the last of an epoch may be short."""
        samples = sum(self._window) + self.adapted.batches.size_of(self._done)
        scale = self.control.scale(samples * self.changes.now.replicas)
        epochs = self.control.progress.iterations / max(1, self.adapted.samples // self.control.initial)
        self._steps.factors = self._settings.rule.factors(scale, self.control.noise, epochs) if scale > 1 else 1.0

    def _step_over(self, trainer: pl.Trainer) -> None:
        samples = sum(self._window) * self.changes.now.replicas
        self._window.clear()
        gain = self.control.noise.gain(self.control.scale(samples))
        counted = self.control.progress.step(samples, gain, self._settings.schedule_by)
        step_schedulers(trainer, counted - 1)

    def _note_times(self) -> None:
        """Add to the profile the batches that the device has completed; a GPU may be some behind."""
        if self._halved is not None and self._beside and reached(self._halved[2]):
            where, began, ended = self._halved
            seconds = seconds_between(began, ended) / 2 + statistics.median(self._beside)
            self.control.profile.add(where, seconds, stepped=True)
            self._halved = None
        for batch in self._timer.timed():
            if batch.label is not None:
                self._beside.append(batch.seconds - batch.phases.forward - batch.phases.backward)
                samples, stepped = batch.label
                where = Configuration(self.control.nodes, self.changes.now.replicas, samples, batch.phases.depth)
                self.control.profile.add(where, batch.seconds, stepped, batch.phases.communication)

    def _report(self, change: BatchSizeChange | None) -> None:
        if change is not None:
            division = f"{change.batches} x {change.local}" if change.batches > 1 else str(change.local)
            self._notices.inform(
                f"step {change.step}: batch size {change.batch_size} ({division} on each of "
                f"{self.changes.now.replicas} devices): {change.reason}"
            )

    def _write_hints(self, trainer: Any, last: bool = False) -> None:
        path, now = self._settings.hints, time.monotonic()
        if path is None or not trainer.is_global_zero or (now - self._hinted < self._hint_pause and not last):
            return
        self._hinted, self._hint_pause = now, min(2 * self._hint_pause, HINTS_EVERY_S)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.control.hints(self.changes.now.replicas).write(path)
        except OSError as error:
            self._notices.warn(f"cannot write hints to {path}: {error}. Training continues", once="hints")
