"""A home without jobs, and its history."""

import pytest

from lightning_egeria.jobs.home import Home


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def history(home):
    with home.history() as history:
        yield history
