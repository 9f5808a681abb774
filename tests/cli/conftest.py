"""Commands run in the process of the tests."""

from collections.abc import Iterator

import pytest
from leftovers import logging_state, restore_logging


@pytest.fixture(autouse=True)
def _logging_of_hydra_undone() -> Iterator[None]:
    """Hydra configures logging for the whole process, as it may in a command."""
    before = logging_state()
    yield
    restore_logging(before)
