import os

import pytest

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.home import Home


def test_it_is_this_users_alone(tmp_path):
    home = Home(tmp_path / "a" / "b")
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in home.path.iterdir()} == {"runs", "jobs"}
    home.path.chmod(0o770)
    with pytest.raises(QueueError, match="others could have written here"):
        Home(tmp_path / "a" / "b")


def test_one_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(QueueError, match="Name another folder with --home or EGERIA_JOBS"):
        Home(tmp_path / "file")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(QueueError, match="Permission denied"):
        Home(tmp_path / "home")


def test_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("EGERIA_JOBS", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert Home.default() == tmp_path / "egeria-jobs"
    monkeypatch.setenv("EGERIA_JOBS", "/x")
    assert str(Home.default()) == "/x"
