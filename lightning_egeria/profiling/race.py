"""Whether whole steps become faster by something that can be left out of some of them."""

import statistics
import time

import torch

from lightning_egeria.profiling.clock import mark, wait_for

TURNS, TURN = 2, 8  # of so many steps without it, between others with it
LEAST_STEPS = 6  # of each kind, to compare whole steps


class Race:
    """Compares whole steps with something, such as a cache, to whole steps without it, in turns.

    A step lasts from the arrival of its batch until the next one arrives, so whatever it costs, or saves, is in it.
    At the end of a turn, the batches of the next one are read already: a turn has more steps than are read ahead. And
    workers have had time to load ahead of steps without it: if such batches are known to take longer to arrive, that
    wait counts.

    Attributes:
        is_on: whether batches without it are still to come.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._device = torch.device("cpu")
        self._planned = 0
        self._plain: set[int] = set()
        self._steps: dict[bool, list[float]] = {True: [], False: []}
        self._waits: dict[bool, list[float]] = {True: [], False: []}
        self.new_pass()

    def begin(self, device: torch.device) -> None:
        """Take turns from the next plan on, and wait for the device at each step meanwhile."""
        self.is_on, self._device = True, device

    def new_pass(self) -> None:
        """The loader begins anew: there was something else between."""
        self._since: float | None = None
        self._cached: bool | None = None  # whether the step that runs is one with it; None if it is neither
        self._before: bool | None = None
        self._waited = 0.0

    def takes(self, number: int) -> bool:
        """Whether the batch of a plan runs without it."""
        if not self.is_on or len(self._plain) == TURNS * TURN:
            return False
        self._planned += 1
        if (self._planned - 1) // TURN % 2:
            return False
        self._plain.add(number)
        return True

    def arrived(self, number: int, waited: float) -> None:
        """A batch is there, after so many seconds: the step before is over."""
        if not self.is_on:
            return
        wait_for(mark(self._device))
        now, plain = time.perf_counter(), number in self._plain
        if self._since is not None and self._cached is not None and self._cached is self._before:
            self._steps[self._cached].append(now - self._since - waited)
        self._since, self._before, self._cached = now, self._cached, False if plain else None
        self._waited = waited
        if plain:
            self._waits[False].append(waited)
        self.is_on = len(self._plain) < TURNS * TURN or number <= max(self._plain) + TURN

    def served(self) -> None:
        """The step that runs is one with it."""
        if self.is_on:
            self._cached = True
            self._waits[True].append(self._waited)

    def seconds(self, least_wait: float) -> tuple[float, float] | None:
        """Return the times of a step with it and without it; None if there were too few.

        Args:
            least_wait: for a batch without it.
        """
        if min(map(len, self._steps.values())) < LEAST_STEPS:
            return None
        step, wait = (
            {kind: statistics.median(own) for kind, own in found.items()} for found in (self._steps, self._waits)
        )
        return step[True] + wait[True], step[False] + max(wait[False], least_wait)
