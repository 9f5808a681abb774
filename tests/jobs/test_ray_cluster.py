"""With a Ray cluster that the test starts, if Ray is installed."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.backends import Queued
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.queue import Queue
from lightning_egeria.jobs.submission import cancel, submit
from support.jobs import adaptive_job as adaptive
from support.jobs import counting_job as counting
from support.jobs.described import described

pytest.importorskip("ray", reason="ray is an extra: make test-slow installs it")

from lightning_egeria.jobs import ray_cluster
from lightning_egeria.jobs.ray_cluster import RayCluster, StartedRay, address_here

PORT = 8299
GCS_PORT = 6399
ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES = "{OMP_NUM_THREADS: 1, CUDA_VISIBLE_DEVICES: ''}"


def test_without_a_cluster(tmp_path):
    with pytest.raises(QueueError, match=r"no Ray cluster answers at http://127\.0\.0\.1:9"):
        RayCluster("http://127.0.0.1:9").nodes()


class Answers(BaseHTTPRequestHandler):
    """What listens at the port of Ray, and answers as the test says."""

    def do_GET(self):
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.text)

    def log_message(self, *text):
        pass


@pytest.mark.parametrize(
    ("status", "text", "runs"),
    [(200, b'{"ray_version": "2.60.0"}', True), (401, b"", True), (200, b"something else", False), (404, b"", False)],
)
def test_which_ray_is_joined(status, text, runs, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        server.status, server.text = status, text
        monkeypatch.setattr(ray_cluster, "_PORT", server.server_port)
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert address_here() == (f"http://127.0.0.1:{server.server_port}" if runs else "")
        thread.join()
    assert address_here() == ""  # no program listens any more
    monkeypatch.setenv("RAY_ADDRESS", "http://elsewhere:1")
    assert address_here() == "http://elsewhere:1"


def test_a_program_that_never_answers_is_no_ray(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray_cluster, "_ANSWERS_WITHIN_S", 0.1)
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        monkeypatch.setattr(ray_cluster, "_PORT", server.getsockname()[1])
        assert address_here() == ""


def test_a_job_that_no_ray_of_this_machine_has_room_for(home, history, monkeypatch):
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    (compiled,) = home.compiler(history).compile(described(home.path.parent, **{"resources.devices": 3}))
    with pytest.raises(QueueError, match=r"needs 3 devices, and the largest machine here has 2\. Use -b slurm, or set"):
        Queued(home, "ray").check(compiled)


def test_one_that_does_not_start_is_named_and_tried_again_later(tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "_FOLDER", str(tmp_path / ("x" * 100)))
    (tmp_path / ("x" * 100)).mkdir()
    started = StartedRay(tmp_path / "ray.log")
    with contextlib.closing(started):
        for _ in range(2):
            with pytest.raises(QueueError, match=r"Ray does not run on this machine: .*AF_UNIX path length .*ray\.log"):
                until(started.nodes)
    assert not [*(tmp_path / ("x" * 100)).iterdir()]
    (tmp_path / ("x" * 100)).rmdir()
    started = StartedRay(tmp_path / "ray.log")
    for _ in range(2):
        with pytest.raises(QueueError, match=r"Ray cannot be started on this machine: .* No such file or directory"):
            started.nodes()


class Quiet(Queued):
    """A back end without a queue, which the test runs itself."""

    def start(self, jobs):
        return {}

    def cancel(self, row):
        pass


class Nodes:
    """A Ray cluster whose nodes are processes of this machine, with two CPUs each."""

    def __init__(self, folder):
        self._folder, self._started = folder, []
        common = ["--dashboard-host=127.0.0.1", f"--dashboard-port={PORT}", f"--port={GCS_PORT}"]
        self._start("--head", *common, f"--temp-dir={folder}")
        until(lambda: len(nodes_of(ADDRESS)) == 1)
        self.add()

    def add(self):
        before = len(nodes_of(ADDRESS))
        self._start(f"--address=127.0.0.1:{GCS_PORT}")
        until(lambda: len(nodes_of(ADDRESS)) == before + 1)

    def kill(self, place):
        """Kill a node as its machine would, with all that runs there."""
        import psutil  # Ray brings it

        parent = self._started[place]
        for child in [*psutil.Process(parent.pid).children(recursive=True), psutil.Process(parent.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        parent.wait(30)

    def stop(self):
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            process.wait(60)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *options):
        ray = Path(sys.executable).parent / "ray"
        command = [ray, "start", "--num-cpus=2", "--disable-usage-stats", "--block", *options]
        self._started.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))


@pytest.fixture
def running(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    nodes = Nodes(f"/tmp/ray-{os.getpid()}")  # the names of sockets have little room
    try:
        yield nodes
    finally:
        nodes.stop()


def nodes_of(address):
    with contextlib.suppress(QueueError):
        return RayCluster(address).nodes()
    return {}


def until(true, seconds=120, step=lambda: None):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        step()
        time.sleep(0.1)


def add(home, history, command, most=None, devices=1, address=ADDRESS, **more):
    keys = {"entry.command": json.dumps(command), "environment.variables": VARIABLES, "resources.devices": devices}
    keys |= more
    description = described(home.path.parent, **keys, **({"resources.most_devices": most} if most else {}))
    compiled = home.compiler(history).compile(description)
    return submit(home, history, Quiet(home, "ray", address), compiled, description.folder)[0]


def states(history, *ids):
    return [history.get(id).state.value for id in ids]


def ranks(home, id):
    """Number of ranks of each epoch that a job began."""
    return [int(ranks) for _, ranks in re.findall(r"epoch (\d+) on (\d+)", home.folder(id).log.read_text())]


def assert_each_sample_once_an_epoch(home, id, epochs, samples):
    assert (home.folder(id).results / "seen").read_text().split() == [str(epochs)] * samples


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
class TestTwoNodes:
    def test_jobs_run_wait_fail_and_are_cancelled(self, running, home, history):
        good = add(home, history, "echo hello on $EGERIA_JOB_DEVICES", devices=2)
        bad, endless = add(home, history, "exit 3"), add(home, history, "exec sleep 1000")
        waits = add(home, history, "touch never", devices=2)
        queue = Queue(home, history)
        until(lambda: states(history, good, bad) == ["done", "failed"], step=queue.step)
        until(lambda: states(history, endless) == ["running"] and home.folder(endless).is_watched, step=queue.step)
        assert "\nhello on 2\n" in home.folder(good).log.read_text()
        cancel(home, history, Quiet(home, "ray", ADDRESS), endless)
        until(lambda: states(history, endless, waits) == ["cancelled", "done"], step=queue.step)

    @pytest.mark.parametrize("policy", ["fair", "tiresias", "pollux"])
    def test_three_jobs_end_with_each_sample_once_an_epoch(self, policy, running, home, history):
        home.follow(policy)
        epochs = (60, 20, 20)
        jobs = [
            add(home, history, [sys.executable, module.__file__, str(count)], most=2)
            for module, count in zip((counting, adaptive, counting), epochs, strict=True)
        ]
        queue = Queue(home, history, interval_s=5.0)
        until(lambda: not history.unfinished(), 500, queue.step)
        assert states(history, *jobs) == ["done"] * 3, [home.folder(id).log.read_text()[-2000:] for id in jobs]
        for id, module, count in zip(jobs, (counting, adaptive, counting), epochs, strict=True):
            assert_each_sample_once_an_epoch(home, id, count, module.SAMPLES)
        hosts = {history.get(id).status.devices for id in jobs}
        assert hosts <= {1, 2}
        if policy == "fair":
            assert 2 in ranks(home, jobs[0])

    def test_a_lost_node_a_lost_queue_and_a_lost_head(self, running, home, history):
        script = 'touch "$EGERIA_CHECKPOINTS/$EGERIA_ATTEMPT"; until test -e ../../go; do sleep 0.1; done'
        ids = [add(home, history, script, devices=2) for _ in range(2)]

        def attempts():
            return sum(history.get(id).status.attempt for id in ids)

        queue = Queue(home, history)
        until(lambda: attempts() == 2 and all(home.folder(id).is_watched for id in ids), step=queue.step)
        running.add()
        running.kill(1)
        until(lambda: attempts() == 3 and all(home.folder(id).is_watched for id in ids), 200, queue.step)
        queue = Queue(home, history)  # the last one was killed, say
        for _ in range(20):
            queue.step()
            time.sleep(0.1)
        assert attempts() == 3
        running.kill(0)  # with the job that ran there; the other one goes on
        (home.jobs / "go").touch()
        until(lambda: sorted(states(history, *ids)) == ["done", "queued"], step=queue.step)
        waits = next(id for id in ids if history.get(id).state.value == "queued")
        cancel(home, history, Quiet(home, "ray", ADDRESS), waits)
        until(lambda: not history.unfinished(), 60, queue.step)
        assert sorted(states(history, *ids)) == ["cancelled", "done"]


def processes_of_ray():
    """Processes and folders of a Ray that the queue started."""
    import psutil

    found = {str(path) for path in Path("/tmp").glob("egeria-ray-*")}
    for process in psutil.process_iter(["pid", "cmdline", "environ"]):
        environment = process.info["environ"] or {}
        if "/tmp/egeria-ray-" in environment.get("EGERIA_JOB_FOLDER", "") or "lightning_egeria.jobs.ray_keeper" in (
            process.info["cmdline"] or []
        ):
            found.add(f"{process.pid} {process.info['cmdline']}")
    return found


@contextlib.contextmanager
def queue_of(home):
    """A process that is the queue of a home."""
    command = [sys.executable, "-m", "lightning_egeria.jobs.queue", str(home.path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as queue:
        yield queue
        if queue.poll() is None:
            queue.terminate()


@pytest.fixture
def nothing_left(monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    before = processes_of_ray()
    yield
    until(lambda: not processes_of_ray() - before, 30)


SAVES = """
trap 'echo saved; touch "$EGERIA_CHECKPOINTS/saved"; exit 75' TERM
test $EGERIA_ATTEMPT = 1 || exit 0
touch up; while :; do sleep 0.1; done
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of Ray
@pytest.mark.usefixtures("nothing_left")
class TestStartedHere:
    def test_two_queues_at_once(self, home, history, tmp_path):
        other = Home(tmp_path / "other")
        with other.history() as others:
            mine = [
                add(home, history, "echo hello on $EGERIA_JOB_DEVICES in $TMPDIR", devices=2, address=""),
                add(home, history, "exit 3", address=""),
                add(home, history, "kill -9 $PPID; sleep 60", address=""),  # the process that watches it
                add(home, history, "true", address="", **{"resources.memory": "900TB"}),
            ]
            theirs = add(other, others, "echo hello", address="")
            with queue_of(home) as first, queue_of(other) as second:
                _, said = first.communicate(timeout=200)
                second.wait(200)
            assert states(history, *mine) == ["done", "failed", "failed", "failed"]
            assert states(others, theirs) == ["done"]
        assert said.count("schedule: Ray was started on this machine with 2 CPUs\n") == 1
        assert f"\nhello on 2 in {os.environ['TMPDIR']}\n" in home.folder(mine[0]).log.read_text()
        assert "without a new checkpoint" in history.get(mine[2]).status.message
        assert "no node has 1 CPUs and 900TB memory. Lower" in history.get(mine[3]).status.message

    @pytest.mark.parametrize("way", ["SIGINT", "SIGTERM", "SIGKILL"])
    def test_a_queue_that_is_ended_ends_its_ray_and_the_next_one_goes_on(self, way, home, history):
        id = add(home, history, SAVES, address="")
        with queue_of(home) as queue:
            until((home.folder(id).work / "up").exists)
            queue.send_signal(getattr(signal, way))
            queue.wait(60)
        until(lambda: not processes_of_ray(), 30)
        assert not home.folder(id).is_watched
        assert "\nsaved\n" in home.folder(id).log.read_text()
        with queue_of(home) as queue:
            assert queue.wait(200) == 0
        assert states(history, id) == ["done"]
        assert history.get(id).status.attempt == 2

    def test_a_ray_that_is_killed_is_started_again(self, home, history):
        import psutil

        id = add(home, history, SAVES, address="")
        with queue_of(home) as queue:
            until((home.folder(id).work / "up").exists)
            for process in psutil.Process(queue.pid).children(recursive=True):
                if process.name() == "gcs_server":
                    process.kill()
            _, said = queue.communicate(timeout=300)
        assert states(history, id) == ["done"]
        assert said.count("schedule: Ray was started") == 2
