"""Ray for live jobs; `test_live.py` has the jobs."""

import logging
import os
import subprocess

import pytest

pytest.importorskip("ray", reason="needs the extra 'ray': make test-slow installs it")

from lightning_egeria.cluster import ray_session
from lightning_egeria.cluster.ray_session import STARTS, quiet, started
from lightning_egeria.errors import JobError


def test_quiet_restores_what_it_changes():
    environment, level = dict(os.environ), logging.getLogger("ray.tune").level
    with quiet():
        assert os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] == "1"
        assert not logging.getLogger("ray.tune").isEnabledFor(logging.CRITICAL)
    assert dict(os.environ) == environment
    assert logging.getLogger("ray.tune").level == level


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "no.such.host.invalid:6379"])
def test_an_address_where_nobody_listens_is_refused_at_once(address):
    with pytest.raises(JobError, match=f"no Ray cluster answers at {address}"), started(address):
        pass


def test_a_ray_that_does_not_start_leaves_nothing(monkeypatch):
    left = []

    def init(**options):
        left.append(subprocess.Popen(["sleep", "60"]))
        raise Exception("timed out during startup")

    monkeypatch.setattr(ray_session.ray, "init", init)
    with pytest.raises(JobError, match="Ray does not start on this machine: timed out"), started(None):
        pass
    assert len(left) == STARTS
    assert all(process.wait() is not None for process in left)
