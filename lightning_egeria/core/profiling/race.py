"""Whether whole steps become faster by something that can be left out of some of them."""

import statistics
import time

import torch

from lightning_egeria.core.profiling.clock import mark, wait_for

TURNS, TURN = 2, 8  # most turns; steps of a turn without the cache, followed by as many with it
LEAST_STEPS = 6  # of each kind, to compare whole steps
CLEAR = 6 / 7  # U is at most 6 for six of one kind and seven of the other


class Race:
    """Compares whole steps with something, such as a cache, to whole steps without it, in turns.

    One turn is enough if in `CLEAR` of all pairs of a step with it and one without, the same kind is the faster one
    (the test of Mann and Whitney, 1947: of kinds that do not differ, one turn in 20 ends so, and then nothing is lost).

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
        self._turns = self._left = 0  # that began, and steps without it that are still to be planned in this one
        self._plain: set[int] = set()
        self._steps: dict[bool, list[float]] = {True: [], False: []}
        self._waits: dict[bool, list[float]] = {True: [], False: []}
        self.new_pass()

    def begin(self, device: torch.device) -> None:
        """Take turns from the next plan on, and wait for the device at each step meanwhile."""
        self.is_on, self._device = True, device
        self._begin_turn()

    def new_pass(self) -> None:
        """The loader begins again: other work came between."""
        self._since: float | None = None
        self._cached: bool | None = None  # whether the step that runs is one with it; None if it is neither
        self._before: bool | None = None
        self._waited = 0.0

    def takes(self, number: int) -> bool:
        """Whether the batch of a plan runs without it."""
        if not self._left:
            return False
        self._left -= 1
        self._plain.add(number)
        return True

    def arrived(self, number: int, waited: float) -> None:
        """A batch has arrived, after this many seconds: the step before it is over."""
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
        if not self._left and number > max(self._plain) + TURN:
            if self._turns == TURNS or self._is_clear():
                self.is_on = False
            else:
                self._begin_turn()

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

    def _begin_turn(self) -> None:
        self._turns, self._left = self._turns + 1, TURN

    def _is_clear(self) -> bool:
        cached, plain = self._steps[True], self._steps[False]
        if min(len(cached), len(plain)) < LEAST_STEPS:
            return False
        pairs = len(cached) * len(plain)
        won = sum(one < other for one in cached for other in plain)
        lost = sum(one > other for one in cached for other in plain)
        return max(won, lost) >= CLEAR * pairs
