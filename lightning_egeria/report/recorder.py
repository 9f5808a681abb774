"""The callback that records a run for its figures."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.core.profiling.phases import PhaseTimer, exposed_communication
from lightning_egeria.core.training.callback import PrefixFreezing, freezing_of
from lightning_egeria.core.training.methods import parts_of
from lightning_egeria.core.training.panels import panels_of
from lightning_egeria.freezing.callback import KnowledgeGuidedFreezing
from lightning_egeria.report.record import (
    FILE_NAME,
    CachePoint,
    EvaluationPoint,
    Event,
    MetricPoint,
    RunRecord,
    StepTimes,
    finite,
)


class RunRecorder(pl.Callback):
    """Records step times, freezes, plasticity and logged metrics for ``egeria report`` and `figures`.

    It does not change training. It also works without freezing: add it to the plain run that you compare with.

    Args:
        path: file to write; None is ``egeria.json`` in the log directory, or in the Trainer's ``default_root_dir``.
        name: name of the run in the report; None is the name of the directory.
        overrides: settings of this run, as ``key=value``. A report of several runs names them by the settings in which
            they differ.

    Attributes:
        record: record of the last fit, so far.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, name: str | None = None, overrides: Sequence[str] = ()
    ) -> None:
        self.path = Path(path) if path is not None else None
        self.name = name
        self.overrides = list(overrides)
        self.record = RunRecord(name or "run")
        self._began = 0.0
        self._timer = PhaseTimer(torch.device("cpu"))
        self._evaluated = -1
        self._freezing: PrefixFreezing | None = None
        self._warned = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin a new record."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if self.path is None:
            self.path = folder / FILE_NAME
        self.record = RunRecord(self.name or self.path.resolve().parent.name, _about(trainer), overrides=self.overrides)
        self._freezing = freezing_of(trainer)
        self._began = time.perf_counter()
        self._evaluated = -1
        self._timer = PhaseTimer(pl_module.device)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start timing the batch."""
        self._note_evaluation()
        self._timer.batch_start(self._freezing.frozen_depth if self._freezing is not None else 0)

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is over."""
        self._timer.forward_end()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward is over."""
        self._timer.backward_end()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is over."""
        waited = exposed_communication(trainer.strategy.model) if trainer.world_size > 1 else 0.0
        self._timer.batch_end(trainer.global_step, waited)
        self._note_times(wait=False)
        self._timer.ready()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the metrics."""
        if not trainer.sanity_checking:
            self._note_metrics(trainer)
        self._timer.ready()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Record the statistics of the cache, and write."""
        if not trainer.val_dataloaders:
            self._note_metrics(trainer)
        self._write(trainer)
        self._timer.ready()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the savings, and write."""
        if isinstance(self._freezing, KnowledgeGuidedFreezing) and self._freezing.layer_modules:
            self.record.savings = self._freezing.savings()
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the record so far."""
        self._note_times(wait=True)
        if self.record.steps:
            self._write(trainer)

    def _note_times(self, wait: bool) -> None:
        for batch in self._timer.finished(wait):
            self.record.add_step(StepTimes(batches=1, **vars(batch)))

    def _note_evaluation(self) -> None:
        last = self._freezing.last_evaluation if isinstance(self._freezing, KnowledgeGuidedFreezing) else None
        if last is not None and last.step != self._evaluated:
            self._evaluated = last.step
            self.record.add_evaluation(EvaluationPoint(last.step, finite(last.plasticity), finite(last.slopes)))

    def _note_metrics(self, trainer: pl.Trainer) -> None:
        values = {name: float(value) for name, value in trainer.callback_metrics.items()}
        point = MetricPoint(
            trainer.global_step,
            time.perf_counter() - self._began,
            {name: value for name, value in zip(values, finite(values.values()), strict=True) if value is not None},
        )
        self.record.metrics.append(point)

    def _write(self, trainer: pl.Trainer) -> None:
        self._note_times(wait=True)
        self._note_evaluation()
        if self._freezing is not None:
            self.record.layer_modules = self._freezing.layer_modules
            self.record.events = [
                Event(step=event.step, kind=event.kind, depth=event.depth, reason=event.reason)
                for event in self._freezing.events
            ]
        for stats in (
            stats for part in parts_of(trainer) if isinstance(stats := getattr(part, "stats", None), CacheStats)
        ):
            point = CachePoint(trainer.global_step, stats.hits, stats.advanced, stats.misses, stats.bytes_on_disk)
            self.record.cache.append(point)
        self.record.panels = panels_of(trainer)
        if trainer.is_global_zero and self.path is not None:
            try:
                self.record.write(self.path)
            except OSError as error:  # the next epoch tries again
                if not self._warned:
                    rank_zero_warn(f"cannot write the record of the run to {self.path}: {error}. Training continues")
                self._warned = True


def _about(trainer: pl.Trainer) -> dict[str, str]:
    device = trainer.strategy.root_device
    hardware = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({hardware})",
        "cores": str(os.cpu_count()),
        "processes": str(trainer.world_size),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "lightning": pl.__version__ if hasattr(pl, "__version__") else "",
        "methods": os.environ.get("EGERIA_METHODS", ""),  # of a job: what was chosen, and why
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
