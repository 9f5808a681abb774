"""Ray for live jobs; `test_live.py` has the jobs."""

import logging
import os
import socket
import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="needs the extra 'ray': make test-slow installs it")

from lightning_egeria.cluster import ray_session
from lightning_egeria.cluster.ray_session import LOCK, PREFIX, STARTS, quiet, refuses, started, temporary_folder
from lightning_egeria.errors import JobError
from lightning_egeria.programs.files import held


def test_quiet_restores_what_it_changes():
    environment, level = dict(os.environ), logging.getLogger("ray.tune").level
    with quiet():
        assert os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] == "1"
        assert not logging.getLogger("ray.tune").isEnabledFor(logging.CRITICAL)
    assert dict(os.environ) == environment
    assert logging.getLogger("ray.tune").level == level


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "no.such.host.invalid:6379"])
def test_an_address_where_nobody_listens_is_refused_at_once(address):
    with pytest.raises(JobError, match=f"no Ray cluster answers at {address}"), started(address, list):
        pass


def test_a_ray_that_does_not_start_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_session, "TEMPORARY", tmp_path)
    left = []

    def init(**options):
        left.append(subprocess.Popen(["sleep", "60"]))
        raise Exception("timed out during startup")

    monkeypatch.setattr(ray_session.ray, "init", init)
    with pytest.raises(JobError, match="Ray does not start on this machine: timed out"), started(None, list):
        pass
    assert len(left) == STARTS
    assert all(process.wait() is not None for process in left)
    assert list(tmp_path.iterdir()) == []
    assert ray_session.MARK not in os.environ


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux shows the environment of a process")
def test_what_a_killed_run_has_left_is_removed(monkeypatch, tmp_path):
    monkeypatch.setattr(ray_session, "TEMPORARY", tmp_path)
    killed, running, elsewhere = (tmp_path / f"{PREFIX}{name}" for name in ("killed", "running", "elsewhere"))
    killed.mkdir()
    running.mkdir()
    (tmp_path / "mine").mkdir()
    elsewhere.symlink_to(tmp_path / "mine")
    process = subprocess.Popen(["sleep", "60"], env={ray_session.MARK: str(killed)})
    with held(running / LOCK), temporary_folder() as folder:
        assert sorted(tmp_path.iterdir()) == sorted([folder, running, elsewhere, tmp_path / "mine"])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert list((tmp_path / "mine").iterdir()) == []
    assert process.wait() == -9
    assert not folder.exists()


def test_only_a_refused_connection_counts():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = "{}:{}".format(*server.getsockname())
        assert not refuses(address)
    assert refuses(address)
    assert not refuses("no.such.host.invalid:80")
