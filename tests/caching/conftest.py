import functools

import pytest
from programs import harness
from streams import Drive

from lightning_egeria.stores.background import WriteBehind


@pytest.fixture
def compare(tmp_path):
    """`programs.harness.compare` with a folder for both runs."""
    return functools.partial(harness.compare, folder=tmp_path)


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Makes a `Drive`, that need not see first whether samples are random."""
    monkeypatch.setattr("lightning_egeria.caching.planner.LEAST_RETURNED", 0)
    opened = []

    def make(**options):
        opened.append(Drive(tmp_path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


@pytest.fixture
def written_at_once(monkeypatch):
    """Training waits until an entry is written, so that how many samples come from the cache is always the same."""
    submit = WriteBehind.submit

    def waits(self, job, size):
        taken = submit(self, job, size)
        self.finish()
        return taken

    monkeypatch.setattr(WriteBehind, "submit", waits)
