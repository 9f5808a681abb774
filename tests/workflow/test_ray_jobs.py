"""With a Ray cluster that the test starts, if Ray is installed."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from described import described

from lightning_egeria.errors import QueueError
from lightning_egeria.workflow.home import Home
from lightning_egeria.workflow.submission import cancel, refresh, submit

pytest.importorskip("ray", reason="ray is an extra")

from lightning_egeria.workflow import ray_jobs


def test_without_a_cluster(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    with pytest.raises(QueueError, match=r"no Ray cluster answers at http://127\.0\.0\.1:9"):
        ray_jobs.RayJobs()


@pytest.mark.slow
def test_jobs_run_and_are_cancelled_on_ray(tmp_path, monkeypatch):
    ray = Path(sys.executable).parent / "ray"
    port = "8299"
    starting = [
        ray,
        "start",
        "--head",
        "--num-cpus=2",
        f"--dashboard-port={port}",
        "--port=6399",
        f"--temp-dir=/tmp/ray-{tmp_path.name[-8:]}",
        "--disable-usage-stats",
        "--block",
    ]
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    cluster = subprocess.Popen(starting, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{port}")
    try:
        home = Home(tmp_path / "home")
        with home.history() as history:
            backend = _answering(ray_jobs.RayJobs)

            def add(command):
                description = described(tmp_path, **{"entry.command": json.dumps(command)})
                return submit(home, history, backend, home.compiler(history).compile(description), tmp_path)[0]

            good, bad, endless = add("echo hello; sleep 1"), add("exit 3"), add("exec sleep 100")
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and len(history.unfinished()) > 1:
                time.sleep(0.5)
                refresh(home, history, {"ray": backend})
            while time.monotonic() < deadline and history.get(endless).state.value == "queued":
                time.sleep(0.5)
                refresh(home, history, {"ray": backend})
            cancel(home, history, backend, endless)
            while time.monotonic() < deadline and history.unfinished():
                time.sleep(0.5)
                refresh(home, history, {"ray": backend})
            assert [history.get(id).state.value for id in (good, bad, endless)] == ["done", "failed", "cancelled"]
            assert "\nhello\n" in home.folder(good).log.read_text()
    finally:
        cluster.terminate()  # with all that it has started, and nothing of another cluster
        cluster.wait(60)


def _answering(make):
    deadline = time.monotonic() + 60
    while True:
        try:
            return make()
        except QueueError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1)
