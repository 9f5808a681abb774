import functools

import pytest
from programs import harness


@pytest.fixture
def compare(tmp_path):
    """`programs.harness.compare` with a folder for both runs."""
    return functools.partial(harness.compare, folder=tmp_path)
