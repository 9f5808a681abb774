import functools

import pytest
from programs import harness
from streams import Drive


@pytest.fixture
def compare(tmp_path):
    """`programs.harness.compare` with a folder for both runs."""
    return functools.partial(harness.compare, folder=tmp_path)


@pytest.fixture
def drive(tmp_path):
    opened = []

    def make(**options):
        opened.append(Drive(tmp_path, **options))
        return opened[-1]

    yield make
    for one in opened:
        one.close()
