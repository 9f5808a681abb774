import functools

import pytest

from support.caching import harness


@pytest.fixture
def compare(tmp_path):
    """`harness.compare` with a folder for both runs."""
    return functools.partial(harness.compare, folder=tmp_path)
