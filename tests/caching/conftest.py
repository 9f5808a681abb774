import functools

import pytest
from programs import harness

from lightning_egeria.caching.store.background import WriteBehind


@pytest.fixture
def compare(tmp_path):
    """`programs.harness.compare` with a folder for both runs."""
    return functools.partial(harness.compare, folder=tmp_path)


@pytest.fixture
def written_at_once(monkeypatch):
    """Training waits until an entry is written, so that how many samples come from the cache is always the same."""
    submit = WriteBehind.submit

    def waits(self, job, size):
        taken = submit(self, job, size)
        self.finish()
        return taken

    monkeypatch.setattr(WriteBehind, "submit", waits)
