"""With a Ray cluster that the test starts, if Ray is installed."""

import contextlib
import json
import re
import sys
import time

import adaptive_job as adaptive
import counting_job as counting
import pytest
from described import described

from lightning_egeria.errors import QueueError
from lightning_egeria.jobs.backends import Queued
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.queue import Queue
from lightning_egeria.jobs.submission import cancel, submit

pytest.importorskip("ray", reason="ray is an extra: make test-slow installs it")

from lightning_egeria.jobs.ray_cluster import RayCluster

PORT = 8299
ADDRESS = f"http://127.0.0.1:{PORT}"
VARIABLES = "{OMP_NUM_THREADS: 1, CUDA_VISIBLE_DEVICES: ''}"


def test_without_a_cluster(tmp_path):
    with pytest.raises(QueueError, match=r"no Ray cluster answers at http://127\.0\.0\.1:9"):
        RayCluster("http://127.0.0.1:9").nodes()


class Quiet(Queued):
    """A back end without a queue, which the test runs itself."""

    def start(self, jobs):
        return {}


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """Two nodes with two CPUs each, on this machine."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    head = {"num_cpus": 2, "dashboard_host": "127.0.0.1", "dashboard_port": PORT, "include_dashboard": True}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2)
        until(lambda: len(nodes_of(ADDRESS)) == 2, 60)
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def home(tmp_path):
    return Home(tmp_path / "home")


@pytest.fixture
def history(home):
    with home.history() as history:
        yield history


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


def add(home, history, command, most=None, devices=1):
    keys = {"entry.command": json.dumps(command), "environment.variables": VARIABLES, "resources.devices": devices}
    description = described(home.path.parent, **keys, **({"resources.most_devices": most} if most else {}))
    compiled = home.compiler(history).compile(description)
    return submit(home, history, Quiet(home, "ray", ADDRESS), compiled, description.folder)[0]


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
    def test_jobs_run_wait_fail_and_are_cancelled(self, cluster, home, history):
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
    def test_three_jobs_end_with_each_sample_once_an_epoch(self, policy, cluster, home, history):
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

    def test_a_lost_node_a_lost_queue_and_a_lost_head(self, cluster, home, history):
        script = (
            'echo start $EGERIA_ATTEMPT; touch "$EGERIA_CHECKPOINTS/$EGERIA_ATTEMPT"; until test -e ../../go; do '
            "sleep 0.1; done"
        )
        ids = [add(home, history, script, devices=2) for _ in range(2)]
        queue = Queue(home, history)
        until(lambda: all(home.folder(id).is_watched for id in ids), step=queue.step)
        other = cluster.add_node(num_cpus=2)
        until(lambda: len(nodes_of(ADDRESS)) == 3, 60)
        lost = cluster.list_all_nodes()[1]
        cluster.remove_node(lost, allow_graceful=False)
        until(lambda: sum(history.get(id).status.attempt for id in ids) == 3, 200, queue.step)
        assert other in cluster.list_all_nodes()
        queue = Queue(home, history)  # the last one was killed, say
        queue.step()
        until(lambda: all(home.folder(id).is_watched for id in ids), step=queue.step)
        assert sum(history.get(id).status.attempt for id in ids) == 3
        cluster.shutdown()
        until(lambda: not any(home.folder(id).is_watched for id in ids), 60)
        (home.jobs / "go").touch()
        for id in ids:
            cancel(home, history, Quiet(home, "ray", ADDRESS), id)
        until(lambda: states(history, *ids) == ["cancelled"] * 2, 60, queue.step)
