"""What a job knows of its goodput, and the batch size that follows from it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from lightning_egeria.cluster.goodput import BatchLimits, Goodput
from lightning_egeria.cluster.hints import Hints
from lightning_egeria.methods.goodput.decision import (
    BatchSizeRule,
    Division,
    Estimate,
    estimate,
    limits_of,
)
from lightning_egeria.methods.goodput.history import History
from lightning_egeria.methods.goodput.noise import GradientNoise
from lightning_egeria.methods.goodput.profile import Profile
from lightning_egeria.methods.goodput.progress import Progress

FIRST_STEPS, FIRST_EVERY, LATER_EVERY = 32, 2, 64  # after a change, and which of these and later are repeated


@dataclasses.dataclass(frozen=True)
class BatchSizeChange:
    """One change of the batch size.

    Attributes:
        step: number of optimizer steps before the change.
        batch_size: samples of a step in all processes, from then on.
        local: samples of a batch in one process.
        batches: batches of one process in a step.
        reason: why, in words and numbers.
    """

    step: int
    batch_size: int
    local: int
    batches: int
    reason: str


class BatchSizeControl:
    """Decides on the batch size. It is plain: no Trainer, no processes.

    Args:
        initial: the batch size at the start of the first run: samples of a step in all processes.
        largest: the largest.
        local_batch_sizes: smallest and largest batch of one process; None for the largest has no limit.
        rule: the rule.
        every: steps between two decisions.
        groups: number of parameter groups.

    Attributes:
        noise: of the gradients.
        profile: times of batches.
        progress: scale-invariant iterations.
        changes: every change so far.
        history: batch size and noise over the run.
        depth: frozen layer modules.
        nodes: number of nodes.
        halves: whether a step of one gradient is repeated in halves now and then, which shows the noise.
        out_of_memory: smallest batch of one process that did not fit in memory; None if all did.
    """

    def __init__(
        self,
        initial: int,
        largest: int,
        local_batch_sizes: tuple[int, int | None],
        rule: BatchSizeRule,
        every: int,
        groups: int,
    ) -> None:
        self.noise = GradientNoise(groups)
        self.profile = Profile()
        self.progress = Progress(initial)
        self.changes: list[BatchSizeChange] = []
        self.history = History(max(1, every // 10))
        self.depth, self.nodes = 0, 1
        self.halves = True
        self.out_of_memory: int | None = None
        self._initial, self._largest, self._local = initial, largest, local_batch_sizes
        self._rule, self._every = rule, every
        self._waits_until, self._since = every, 0

    @property
    def initial(self) -> int:
        """The batch size at the start of the first run."""
        return self._initial

    @property
    def adapts(self) -> bool:
        """Whether there is any other batch size than the initial one."""
        return self._largest > self._initial

    def limits(self, replicas: int) -> BatchLimits:
        """Return the limits on the batch size for a number of processes."""
        smallest, largest = self._local
        if self.out_of_memory is not None:
            largest = min(largest or self.out_of_memory, max(smallest, self.out_of_memory - 1))
        return limits_of(self._initial, self._largest, smallest, largest, replicas, 1 if self.halves else 2)

    def goodput(self, replicas: int) -> Goodput | None:
        """Return throughput and efficiency as measured so far; None before both are known."""
        throughput = self.profile.fit(self.depth) if self.noise.known else None
        if throughput is None:
            return None
        return Goodput(throughput, self.noise.squared_norm, self.noise.variance, self.limits(replicas))

    def estimate(self, now: Division) -> Estimate | None:
        """Return the expected goodput of a division; None before it can be estimated."""
        goodput = self.goodput(now.replicas)
        return estimate(goodput, now, self.nodes) if goodput is not None else None

    def scale(self, samples: int) -> float:
        """Return a batch size in initial ones; at least 1, as for the rest of an epoch."""
        return max(1.0, samples / self._initial)

    def halved(self, now: Division) -> bool:
        """Whether steps of this size show their noise in halves: those of one gradient, where sizes change."""
        return self.halves and self.adapts and now.batches * now.replicas == 1 and now.local > 1

    def repeats(self, step: int, now: Division) -> int:
        """Return how many steps the noise of this one stands for, if it is repeated in halves; 0 if it is not.

        It is every second one for a while after a change, and now and then later; not the first of all, which sets up
        much that is slow.
        """
        every = FIRST_EVERY if step - self._since < FIRST_STEPS else LATER_EVERY
        return every if step and self.halved(now) and step % every == 0 else 0

    def forget(self, step: int) -> None:
        """What was measured counts no more."""
        self._since = step
        self.wait(step)

    def decides(self, step: int) -> bool:
        """Whether to ask `next` after this step."""
        return self.adapts and (self.decides_alike or step >= self._waits_until)

    @property
    def decides_alike(self) -> bool:
        """Whether all processes decide the same by themselves."""
        return not self._rule.measures

    def next(self, step: int, now: Division) -> Division | None:
        """Return the batch size that should come next; None to stay."""
        goodput = functools.partial(self.goodput, now.replicas)
        return self._rule.next(step, now, self.nodes, self.limits(now.replicas), goodput)

    def wait(self, step: int) -> None:
        """Decide again after ``every`` more steps."""
        self._waits_until = step + self._every

    def changed(self, step: int, division: Division, reason: str) -> BatchSizeChange:
        """Note a change."""
        self._since = step
        change = BatchSizeChange(step, division.total, division.local, division.batches, reason)
        self.changes.append(change)
        return change

    def note(self, step: int, now: Division) -> None:
        """Keep the batch size and the noise after a step for the history."""
        self.history.note(step, now, self.noise, self.depth)

    def divided(self, samples: int, replicas: int) -> Division:
        """Return how a batch size is divided between a new number of processes."""
        local, accumulation = self.limits(replicas).split(samples, replicas)
        return Division(local, accumulation + 1, replicas)

    def hints(self, replicas: int) -> Hints:
        """Return what a scheduler wants to know."""
        known = self.noise.known
        return Hints(
            limits=self.limits(replicas),
            profiled=self.profile.replicas,
            progress=self.progress.iterations,
            squared_norm=self.noise.squared_norm if known else None,
            variance=self.noise.variance if known else None,
            throughput=self.profile.fit(self.depth),
            unfrozen=self.profile.fit(0) if self.depth else None,
        )

    def state(self) -> dict[str, Any]:
        """Return all of it for a checkpoint, in plain types."""
        return {
            "initial": self._initial,
            "noise": self.noise.state(),
            "profile": self.profile.state(),
            "progress": self.progress.state(),
            "changes": [dataclasses.asdict(change) for change in self.changes],
            "history": self.history.state(),
            "depth": self.depth,
            "halves": self.halves,
            "out_of_memory": self.out_of_memory,
            "waits_until": self._waits_until,
            "since": self._since,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over a `state`. The initial batch size is that of the first run.

        Raises:
            ValueError: if the model had another number of parameter groups.
        """
        noise = GradientNoise.from_state(state["noise"])
        if len(noise.gains(1.0)) != len(self.noise.gains(1.0)):
            raise ValueError(f"{len(noise.gains(1.0))} parameter groups, expected {len(self.noise.gains(1.0))}")
        self.noise, self.profile = noise, Profile.from_state(state["profile"])
        self.progress = Progress.from_state(state["progress"])
        self.changes = [BatchSizeChange(**change) for change in state["changes"]]
        self.history = History.from_state(state["history"])
        self._initial, self.depth = int(state["initial"]), int(state["depth"])
        self.halves = bool(state["halves"])
        self.out_of_memory = None if state["out_of_memory"] is None else int(state["out_of_memory"])
        self._waits_until, self._since = int(state["waits_until"]), int(state["since"])
