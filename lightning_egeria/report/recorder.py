"""A callback that keeps what the pictures of a run are made of."""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_egeria.caching.stats import CacheStats
from lightning_egeria.clock import mark, seconds_between
from lightning_egeria.freezing.callback import KnowledgeGuidedFreezing
from lightning_egeria.report.record import (
    FILE_NAME,
    CachePoint,
    EvaluationPoint,
    MetricPoint,
    RunRecord,
    StepTimes,
    finite,
)

_Mark = float | torch.cuda.Event


@dataclasses.dataclass
class _Batch:
    """Marks of one training batch, which a GPU reaches some time later."""

    step: int
    depth: int
    waited: float
    marks: list[_Mark]

    def times(self, communication: float) -> StepTimes | None:
        if len(self.marks) < 4:
            return None  # it had no backward
        began, forward, backward, ended = self.marks[0], self.marks[1], self.marks[-2], self.marks[-1]
        behind = seconds_between(forward, backward)
        communication = min(communication, behind)
        return StepTimes(
            self.step,
            1,
            self.depth,
            self.waited,
            seconds_between(began, forward),
            behind - communication,
            communication,
            seconds_between(backward, ended),
        )


class RunRecorder(pl.Callback):
    """Keeps the times of all steps, what froze, plasticity and logged metrics, for ``egeria-report`` and `figures`.

    It changes nothing, and works without freezing too: give it to the plain run that you compare with.

    Args:
        path: of the file to write; None: ``egeria.json`` where the Trainer's logger writes, or in its
            ``default_root_dir``.
        name: of the run in pictures; None: that of the directory.

    Attributes:
        record: of the last fit, so far.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, name: str | None = None) -> None:
        self.path = Path(path) if path is not None else None
        self.name = name
        self.record = RunRecord(name or "run")
        self._began = 0.0
        self._batch_ended = 0.0
        self._batch: _Batch | None = None
        self._unread: list[_Batch] = []
        self._communication = 0.0
        self._batches = 0
        self._evaluated = -1
        self._freezing: KnowledgeGuidedFreezing | None = None
        self._told = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin anew."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)
        if self.path is None:
            self.path = folder / FILE_NAME
        self.record = RunRecord(self.name or self.path.resolve().parent.name, _about(trainer))
        callbacks: list[pl.Callback] = getattr(trainer, "callbacks", [])
        self._freezing = next((c for c in callbacks if isinstance(c, KnowledgeGuidedFreezing)), None)
        self._began = self._batch_ended = time.perf_counter()
        self._unread, self._batches, self._evaluated, self._communication = [], 0, -1, 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """The batch has come."""
        self._note_evaluation()
        waited = time.perf_counter() - self._batch_ended
        depth = self._freezing.frozen_depth if self._freezing is not None else 0
        self._batch = _Batch(trainer.global_step, depth, waited, [mark(pl_module.device)])

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """The forward is over."""
        self._mark(pl_module)

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The backward is over."""
        self._mark(pl_module)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """The batch is done."""
        self._mark(pl_module)
        self._batches += 1
        self._communication = _exposed_communication(trainer)
        if self._batch is not None:
            self._batch.step = trainer.global_step
            self._unread.append(self._batch)
            self._batch = None
        self._read_marks(wait=False)
        self._batch_ended = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep the metrics."""
        if not trainer.sanity_checking:
            self._note_metrics(trainer)
        self._batch_ended = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep what the cache has done, and write."""
        if not trainer.val_dataloaders:
            self._note_metrics(trainer)
        self._write(trainer)
        self._batch_ended = time.perf_counter()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write all of it."""
        if self._freezing is not None and self._freezing.layer_modules:
            self.record.savings = self._freezing.savings().to_dict()
        self._write(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what there is."""
        if self._batches:
            self._write(trainer)

    def _mark(self, pl_module: pl.LightningModule) -> None:
        if self._batch is not None:
            self._batch.marks.append(mark(pl_module.device))

    def _read_marks(self, wait: bool) -> None:
        """Turn marks into seconds once a GPU has passed them."""
        while self._unread:
            last = self._unread[0].marks[-1]
            if isinstance(last, torch.cuda.Event):
                if wait:
                    last.synchronize()
                elif not last.query():
                    return
            times = self._unread.pop(0).times(self._communication)
            if times is not None:
                self.record.add_step(times)

    def _note_evaluation(self) -> None:
        last = self._freezing.last_evaluation if self._freezing is not None else None
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
        self._read_marks(wait=True)
        self._note_evaluation()
        if self._freezing is not None:
            self.record.layer_modules = self._freezing.layer_modules
            self.record.events = [dict(vars(event)) for event in self._freezing.events]
        stats = getattr(getattr(trainer, "datamodule", None), "stats", None)
        if isinstance(stats, CacheStats):
            point = CachePoint(trainer.global_step, stats.hits, stats.advanced, stats.misses, stats.bytes_on_disk)
            self.record.cache.append(point)
        if trainer.is_global_zero and self.path is not None:
            try:
                self.record.write(self.path)
            except OSError as error:  # tried again with the next
                if not self._told:
                    rank_zero_warn(f"the record of the run cannot be written to {self.path}: {error}. Training goes on")
                self._told = True


def _exposed_communication(trainer: pl.Trainer) -> float:
    """Seconds of a backward in which DDP only waited for other processes, as it measures now and then itself."""
    wrapped = trainer.strategy.model
    if trainer.world_size == 1 or not isinstance(wrapped, DistributedDataParallel):
        return 0.0
    measured = wrapped._get_ddp_logging_data()
    hidden = measured.get("avg_backward_compute_comm_overlap_time", 0)
    return float(max(0, measured.get("avg_backward_comm_time", 0) - hidden)) / 1e9


def _about(trainer: pl.Trainer) -> dict[str, str]:
    device = trainer.strategy.root_device
    hardware = platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({hardware})",
        "cores": str(os.cpu_count()),
        "processes": str(trainer.world_size),
        "precision": str(trainer.precision),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": pl.__version__ if hasattr(pl, "__version__") else "",
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }
