"""A simulated job: what it does in a second on the devices it has, by the traces of its application."""

from __future__ import annotations

import dataclasses

import numpy as np

from lightning_egeria.cluster.freezing_runs import FreezingRun
from lightning_egeria.cluster.goodput import BatchLimits, Goodput, gain
from lightning_egeria.cluster.jobs import Allocation, JobView, devices_of
from lightning_egeria.cluster.throughput import ThroughputModel, fit
from lightning_egeria.cluster.traces import Application
from lightning_egeria.cluster.workloads import Submission

RESTART_S = 30  # from a checkpoint, on other devices
MOST_REPLICAS = 64  # the traces reach no further


class SimulatedJob:
    """One job of a simulation.

    A job runs epoch by epoch. A step at batch size ``s`` times the initial one advances its progress by the gain
    ``(var + sqr) / (var / s + sqr)``, and takes the time of the traces. The job ends with its last epoch.

    Args:
        submission: the job.
        application: its traces.
        adapts_batch_size: choose the batch size for the devices. Otherwise it is the submission's.
        freezing: how the time of its gradients falls while layers freeze; None if none do. The exchange of gradients is
            taken to last as long as before.
        tells: whether policies see that it is faster with frozen layers. The job itself always knows.
    """

    def __init__(
        self,
        submission: Submission,
        application: Application,
        adapts_batch_size: bool,
        freezing: FreezingRun | None = None,
        tells: bool = True,
    ) -> None:
        self.submission, self.application = submission, application
        self._freezing, self._tells, self._share = freezing, tells, 1.0
        self.limits = BatchLimits(
            application.initial_batch_size,
            application.largest_batch_size,
            application.smallest_local,
            application.largest_local,
        )
        self._adapts = adapts_batch_size
        self._batch_size = application.limits.batch_size if adapts_batch_size else submission.batch_size
        if adapts_batch_size:
            self.most_replicas = min(self.limits.most_replicas, MOST_REPLICAS)
        else:
            self.most_replicas = max(1, submission.batch_size // self.limits.smallest_local)
        if application.limits.most_replicas is not None:
            self.most_replicas = min(self.most_replicas, application.limits.most_replicas)
        self.allocation: Allocation = ()
        self.local_batch_size, self.accumulation = 0, 0
        self.epoch, self.progress = 0, 0.0
        self.service, self.restarts = 0.0, 0
        self.completed: float | None = None
        self._started, self._delay = False, 0.0
        # (nodes, replicas, local batch size) -> seconds of a step, and of exchange in it
        self._profile: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._gradient: tuple[float, float] | None = None
        self._throughput: ThroughputModel | None = None
        self._model: Goodput | None = None

    @property
    def batch_size(self) -> int:
        """Total batch size; 0 without devices."""
        return self.local_batch_size * (self.accumulation + 1) * devices_of(self.allocation)

    @property
    def model(self) -> Goodput | None:
        """What the job has learnt of its own speed; None before its first step."""
        if self._gradient is None:
            return None
        if self._throughput is None:
            nodes, replicas, local = np.array(list(self._profile)).T
            step, sync = np.array(list(self._profile.values())).T
            self._throughput = fit(nodes, replicas, local, step - sync, step)
        if self._model is None:
            self._model = Goodput(self._throughput.scaled(self._share), *self._gradient, self.limits)
        return self._model

    @property
    def steps_left(self) -> float:
        """Steps at the submission's batch size until the job ends; at least one."""
        last = self.application.epochs - 1
        if self.epoch >= last:
            return 1
        size = self.submission.batch_size
        return self.application.iterations(size, last) - self.application.iterations(size, self.epoch)

    def step_seconds(self, replicas: int) -> float:
        """Return the duration of a step at the submission's batch size, on full nodes of four devices and one rest."""
        placement = (4,) * (replicas // 4) + ((replicas % 4,) if replicas % 4 else ())
        local, accumulation = self.limits.split(self.submission.batch_size, replicas)
        step, sync = self.application.step_times(placement, local)
        return step + (step - sync) * accumulation

    def view(self, now: float) -> JobView:
        """Return what a policy sees of it."""
        model, unfrozen = self.model if self._adapts else None, None
        if model is not None and self._throughput is not None and self._share != 1:
            unfrozen = dataclasses.replace(model, throughput=self._throughput)
            if not self._tells:
                model, unfrozen = unfrozen, None
        return JobView(
            name=self.submission.name,
            submitted=self.submission.time,
            age=now - self.submission.time,
            gang=self.submission.gang,
            most_replicas=self.most_replicas,
            profiled=max((replicas for _, replicas, _ in self._profile), default=0),
            service=self.service,
            restarts=self.restarts,
            model=model,
            unfrozen=unfrozen,
            oracle=self,
            seconds_left=None if self._adapts else self._seconds_left,
        )

    def _seconds_left(self) -> float:
        return self.steps_left * self.step_seconds(self.submission.gang)

    def reallocate(self, allocation: Allocation) -> None:
        """Stop, and restart on other devices or wait for some."""
        self.allocation = allocation
        if not allocation:
            self.local_batch_size = 0
            return
        self._choose_batch_size()
        self._delay = RESTART_S
        self.restarts += self._started
        self._started = True

    def advance(self, now: float, seconds: float) -> None:
        """Run for some seconds.

        Args:
            now: when they begin; needed for the time of completion.
            seconds: how many.
        """
        replicas = devices_of(self.allocation)
        if not replicas or self.completed is not None:
            return
        delay = min(self._delay, seconds)
        self._delay -= delay
        now, seconds = now + delay, seconds - delay
        self.service += delay * replicas
        placement = tuple(count for _, count in self.allocation)
        while seconds > 0 and self.completed is None:
            rate = self._progress_rate(placement, replicas)
            end = self.application.progress_at(self.epoch + 1)
            if self.progress + rate * seconds < end:
                self.progress += rate * seconds
                spent = seconds
            else:
                spent = round((end - self.progress) / rate)
                self.epoch, self.progress = self.epoch + 1, end
                if self.epoch == self.application.epochs:
                    self.completed = now + spent
            now, seconds = now + spent, seconds - spent
            self.service += spent * replicas
            self._choose_batch_size()

    def _progress_rate(self, placement: tuple[int, ...], replicas: int) -> float:
        """Return the progress a second, and remember what the job has measured of itself."""
        if self._freezing is not None:
            share = self._freezing.share_at(self.progress / self.application.progress_at(self.application.epochs))
            if share != self._share:
                self._share, self._model = share, None
        step, sync = self.application.step_times(placement, self.local_batch_size)
        gradient = squared_norm, variance = self.application.gradient(self.batch_size, self.epoch)
        if gradient != self._gradient:
            self._gradient, self._model = gradient, None
        configuration = (len(placement), replicas, self.local_batch_size)
        if configuration not in self._profile:
            self._profile[configuration] = step, sync
            self._throughput = self._model = None
        scale = self.batch_size / self.application.initial_batch_size
        saved = (step - sync) * (1 - self._share)
        seconds = step - saved + (step - sync) * self._share * self.accumulation
        return float(gain(squared_norm, variance, scale)) / seconds

    def _choose_batch_size(self) -> None:
        nodes, replicas = len(self.allocation), devices_of(self.allocation)
        if self._batch_size is not None:
            size = self._batch_size
        elif (model := self.model) is not None:
            _, local, self.accumulation = model.best(nodes, replicas)
            self.local_batch_size = self.limits.bounded(local, self.accumulation, replicas)
            return
        else:
            size = max(self.limits.initial, self.limits.smallest_local * replicas)
        self.local_batch_size, self.accumulation = self.limits.split(size, replicas)
