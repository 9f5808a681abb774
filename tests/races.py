"""A clock that moves when it is told, and races by it."""

import types

from lightning_egeria.core.profiling import race as racing
from lightning_egeria.core.profiling.race import TURN, TURNS


class Clock:
    """A clock that moves when it is told."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(racing, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def race(self, race, cached, plain, wait=0.0, serves=True, batches=range(2 * TURNS * TURN + 4)):
        """Have batches come one after the other, with and without the cache in turns; return how many had none."""
        count = 0
        for number in batches:
            is_plain = race.takes(number)
            count += is_plain
            self.now += wait
            race.arrived(number, wait)
            if not is_plain and serves:
                race.served()
            self.now += plain if is_plain else cached
        return count
