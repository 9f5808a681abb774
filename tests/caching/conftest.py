import functools

import pytest

from lightning_egeria.caching.store.background import WriteBehind
from support.caching import harness


@pytest.fixture
def compare(tmp_path):
    """`harness.compare` with a folder for both runs."""
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
