"""Real jobs on a real Ray: they arrive, move, are killed, and end as if nothing had happened."""

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import adaptive_job as adaptive
import pytest
import yaml
from live_job import SAMPLES
from rich.console import Console

pytest.importorskip("ray", reason="needs the extra 'ray': make test-slow installs it")

from lightning_egeria.cluster.job_files import JobDescription
from lightning_egeria.cluster.live import DONE, LOCK, LOG, run_jobs
from lightning_egeria.cluster.policies import POLICIES
from lightning_egeria.cluster.pollux import Pollux
from lightning_egeria.cluster.ray_session import PREFIX, TEMPORARY
from lightning_egeria.errors import ArgumentError, JobError
from lightning_egeria.programs.files import held

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # those of Ray
JOB = Path(__file__).with_name("live_job.py")


def job(name, epochs, arrives_s=0.0, devices=1, most=2):
    command = [sys.executable, str(JOB), "{folder}", "{devices}", str(epochs)]
    return JobDescription(command, devices, most, arrives_s, {"CUDA_VISIBLE_DEVICES": ""}, name=name)


def adaptive_job(name, epochs, arrives_s=0.0):
    command = [sys.executable, adaptive.__file__, "{folder}", "{devices}", str(epochs)]
    return JobDescription(command, 1, 2, arrives_s, {"CUDA_VISIBLE_DEVICES": ""}, name=name)


def run(jobs, folder, policy="fair", **options):
    """Run jobs; return the fleet, and the changes that were shown."""
    shown = io.StringIO()
    policy = POLICIES[policy]() if isinstance(policy, str) else policy
    fleet = run_jobs(jobs, policy, folder, interval_s=2, console=Console(file=shown, width=200), **options)
    return fleet, re.findall(r"^(\w+): (.*)$", shown.getvalue(), re.MULTILINE)


def epochs_of(folder, name):
    """Epoch and number of ranks of each epoch that a job began, as its log has them."""
    text = (folder / name / LOG).read_text()
    return [(int(epoch), int(ranks)) for epoch, ranks in re.findall(r"epoch (\d+) on (\d+)", text)]


def assert_each_sample_once_an_epoch(folder, name, epochs):
    assert (folder / name / "seen").read_text().split() == [str(epochs)] * SAMPLES


def alive(word):
    """Processes of this machine whose command holds a word."""
    found = subprocess.run(["pgrep", "-f", word], capture_output=True, text=True).stdout.split()
    return [pid for pid in map(int, found) if pid != os.getpid()]


def wait_for(condition, seconds=90):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds} s: {condition}")


def test_jobs_arrive_share_and_end(tmp_path):
    fleet, changes = run([job("first", 240), job("second", 8, 3.0), job("third", 8, 6.0)], tmp_path)
    assert {name: one.state for name, one in fleet.jobs.items()} == dict.fromkeys(("first", "second", "third"), "done")
    for name, epochs in (("first", 240), ("second", 8), ("third", 8)):
        assert_each_sample_once_an_epoch(tmp_path, name, epochs)
        epochs_begun = [epoch for epoch, _ in epochs_of(tmp_path, name)]
        assert sorted(set(epochs_begun)) == list(range(epochs))
    ranks = [ranks for _, ranks in epochs_of(tmp_path, "first")]
    assert ranks[-1] == 2  # alone at the end, beside others before
    assert 1 in ranks
    beside = changes.index(("second", "running on 1 device"))
    assert ("first", "running on 1 device") in changes[: beside + 3]
    assert changes[-2:] == [("first", "running on 2 devices"), ("first", "done")]
    assert not alive(str(tmp_path))
    # Again, everything is done.
    again, changes = run([job("first", 240)], tmp_path)
    assert again.jobs["first"].state == "done"
    assert again.jobs["first"].starts == 0


class Listening(Pollux):
    """Keeps what each job said of itself when devices were given away.

    The second job is not shown to it before the first one knows two ranks, and has a checkpoint that says so.
    """

    def __init__(self, folder):
        super().__init__()
        self.known = {}
        self._folder, self._shown_at = folder, None

    def allocate(self, jobs, cluster, current, now):
        for job in jobs:
            self.known.setdefault(job.name, []).append(job.model)
        first = next((job for job in jobs if job.name == "first"), None)
        if first is not None:
            begun = len(epochs_of(self._folder, "first")) if first.profiled else 0
            if self._shown_at is None and first.profiled == 2:
                self._shown_at = begun + 2
            if self._shown_at is None or begun < self._shown_at:
                jobs = [first]
        return super().allocate(jobs, cluster, current, now)


def test_pollux_follows_the_hints_of_jobs_that_adapt(tmp_path):
    """Jobs with `AdaptiveBatchSize`: they tell their goodput, get devices by it, and see each sample once an epoch."""
    epochs, policy = {"first": 400, "second": 20}, Listening(tmp_path)
    jobs = [adaptive_job("first", epochs["first"]), adaptive_job("second", epochs["second"])]
    fleet, changes = run(jobs, tmp_path, policy)
    assert {one.state for one in fleet.jobs.values()} == {"done"}
    for name, count in epochs.items():
        seen = (tmp_path / name / "seen").read_text().split()
        assert seen == [str(count)] * adaptive.SAMPLES
        assert sorted({epoch for epoch, _ in epochs_of(tmp_path, name)}) == list(range(count))
        # Nothing is known before a job has run, then its goodput.
        assert policy.known[name][0] is None
        assert policy.known[name][-1].goodput(1, 1) > 0
    assert fleet.hints("first").profiled == 2
    assert fleet.hints("first").progress > 0
    # Two devices are worth it to a job that is alone, and each has one while there are two.
    assert ("first", "running on 2 devices") in changes
    assert ("second", "running on 1 device") in changes
    assert not alive(str(tmp_path))


def test_tiresias_keeps_gangs_whole(tmp_path):
    fleet, changes = run([job("pair", 6, devices=2), job("single", 6)], tmp_path, "tiresias")
    assert [one.state for one in fleet.jobs.values()] == ["done", "done"]
    assert {ranks for _, ranks in epochs_of(tmp_path, "pair")} == {2}
    assert changes.index(("pair", "done")) < changes.index(("single", "running on 1 device"))


class KillsOnce(Console):
    """Kills processes when a job has reached its second epoch."""

    def __init__(self, folder, name, word):
        super().__init__(file=io.StringIO(), width=200)
        self.folder, self.name, self.word, self.killed = folder, name, word, []

    def watch(self):
        wait_for(lambda: (self.folder / self.name / "last.ckpt").exists())
        self.killed = alive(self.word)
        for pid in self.killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("word", ["live_job.py", "ray::.*Train"], ids=["job", "worker"])
def test_a_killed_process_goes_on_from_its_checkpoint(word, tmp_path):
    import threading

    console = KillsOnce(tmp_path, "job", word)
    thread = threading.Thread(target=console.watch)
    thread.start()
    fleet = run_jobs([job("job", 30, most=1)], POLICIES["fair"](), tmp_path, interval_s=2, console=console)
    thread.join()
    assert console.killed
    assert fleet.jobs["job"].state == "done"
    assert_each_sample_once_an_epoch(tmp_path, "job", 30)
    log = (tmp_path / "job" / LOG).read_text()
    assert log.count("epoch 29 on 1") == 1
    assert not alive(str(tmp_path))


def folder_of_ray(command):
    """The one that the Ray of a running command has."""
    children = [
        pid for task in Path(f"/proc/{command.pid}/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    started = " ".join(Path(f"/proc/{pid}/cmdline").read_text() for pid in children)
    return Path(re.search(rf"{TEMPORARY}/{PREFIX}\w+", started).group())


def start_command(folder, epochs):
    described = {"command": list(job("job", epochs).command), "environment": {"CUDA_VISIBLE_DEVICES": ""}}
    (folder / "jobs.yaml").write_text(yaml.safe_dump({"jobs": {"job": described}}))
    program = [sys.executable, "-m", "lightning_egeria.cluster.command", "run", str(folder / "jobs.yaml")]
    options = ["--policy", "fair", "--interval", "2", "--out", str(folder / "out")]
    return subprocess.Popen([*program, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def assert_the_same_command_goes_on(folder, epochs):
    """The job is not done, ends when it is started again, and did not begin anew."""
    out = folder / "out"
    assert not (out / "job" / "done").exists()
    begun = epochs_of(out, "job")
    again = start_command(folder, epochs)
    printed, _ = again.communicate(timeout=180)
    assert again.returncode == 0, printed
    assert_each_sample_once_an_epoch(out, "job", epochs)
    assert len(epochs_of(out, "job")) < len(begun) + epochs


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_command_leaves_nothing_and_goes_on(number, tmp_path):
    command = start_command(tmp_path, 60)
    wait_for((tmp_path / "out" / "job" / "last.ckpt").exists)
    temporary = folder_of_ray(command)
    command.send_signal(number)
    printed, _ = command.communicate(timeout=90)
    if number is signal.SIGINT:
        assert command.returncode == 130, printed
        assert "stopped. The same command goes on" in printed
    wait_for(lambda: not alive(f"live_job.py {tmp_path}"))
    assert number is signal.SIGKILL or not temporary.exists()
    assert_the_same_command_goes_on(tmp_path, 60)
    assert not temporary.exists()
    assert not alive(str(temporary))


@pytest.mark.parametrize("part", ["gcs/gcs_server", "raylet/raylet"])
def test_a_killed_ray_ends_the_command_with_a_message(part, tmp_path):
    """And the same command goes on. Ray notes after 15 s at most that it has ended on a machine."""
    command = start_command(tmp_path, 240)
    wait_for((tmp_path / "out" / "job" / "last.ckpt").exists)
    temporary = folder_of_ray(command)
    (killed,) = alive(f"{part} .*{temporary}")
    os.kill(killed, signal.SIGKILL)
    printed, _ = command.communicate(timeout=60)
    assert command.returncode == 2, printed
    assert printed.splitlines()[-1].startswith("egeria-cluster: Ray has ended: ")
    wait_for(lambda: not alive(str(tmp_path)) and not alive(str(temporary)))
    assert not temporary.exists()
    assert_the_same_command_goes_on(tmp_path, 240)


def test_a_job_that_fails_too_often_is_given_up(tmp_path):
    wrong = JobDescription([sys.executable, "-c", "raise SystemExit(3)"], name="wrong")
    fleet, changes = run([wrong, job("right", 2)], tmp_path, retries=1)
    assert fleet.jobs["wrong"].state == "failed"
    assert fleet.jobs["right"].state == "done"
    assert ("wrong", "failed") in changes


def test_a_folder_has_one_run_at_a_time(tmp_path):
    with held(tmp_path / LOCK), pytest.raises(JobError, match="another run has the jobs"):
        run([job("one", 1)], tmp_path)


def test_bad_numbers_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="interval_s must be positive"):
        run_jobs([job("one", 1)], POLICIES["fair"](), tmp_path, interval_s=0)
    with pytest.raises(ArgumentError, match="retries at least 0"):
        run_jobs([job("one", 1)], POLICIES["fair"](), tmp_path, retries=-1)


def prepared(tmp_path):
    """A folder of this user, and one for jobs."""
    mine, folder = tmp_path / "mine", tmp_path / "shared" / "jobs"
    mine.mkdir()
    (mine / "file").write_text("mine")
    (folder / "a").mkdir(parents=True)
    for part in (folder, folder / "a"):
        part.chmod(0o700)
    return mine, folder


@pytest.mark.parametrize("attack", ["link for a job", "done", "lock", "writable", "writable job", "open above"])
def test_a_folder_that_another_user_has_prepared_is_refused(attack, tmp_path):
    """The default is ./jobs, below a folder that others may share. Ray is not even started."""
    mine, folder = prepared(tmp_path)
    if attack == "link for a job":
        (folder / "a").rmdir()
        (folder / "a").symlink_to(mine)
    elif attack in ("lock", "done"):
        (folder / LOCK if attack == "lock" else folder / "a" / DONE).symlink_to(mine / "file")
    else:
        {"writable": folder, "writable job": folder / "a", "open above": folder.parent}[attack].chmod(0o777)
    with pytest.raises((JobError, OSError), match=r"cannot use|cannot be read|symbolic links"):
        run([JobDescription(["echo", "owned"], 1, 1, 0.0, {}, name="a")], folder)
    assert {path.name: path.read_text() for path in mine.iterdir()} == {"file": "mine"}


def test_no_log_goes_through_a_link(tmp_path):
    mine, folder = prepared(tmp_path)
    (folder / "a" / LOG).symlink_to(mine / "file")
    fleet, _ = run([JobDescription(["echo", "owned"], 1, 1, 0.0, {}, name="a")], folder, retries=0)
    assert fleet.jobs["a"].state == "failed"
    assert (mine / "file").read_text() == "mine"


def test_a_ray_of_the_command_asks_for_a_token(tmp_path):
    """As a user runs it, in a process of its own: others of this machine must not run what they like in that Ray."""
    script = "from ray._raylet import AuthenticationMode, get_authentication_mode\n"
    script += "print('TOKEN' if get_authentication_mode() == AuthenticationMode.TOKEN else 'NONE', flush=True)"
    (tmp_path / "jobs.yaml").write_text("jobs: {a: {command: ['true']}}\n")
    code = (
        "import sys; from lightning_egeria.cluster import command\n"
        f"status = command.main(['run', {str(tmp_path / 'jobs.yaml')!r}, '--out', {str(tmp_path / 'out')!r}])\n"
        f"{script}\nsys.exit(status)"
    )
    variables = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    variables["HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert "TOKEN" in done.stdout
