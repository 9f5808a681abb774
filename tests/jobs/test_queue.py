import json
import os
import re
import signal
import subprocess
import sys

import pytest

from lightning_egeria.cluster.queues import BackFill
from lightning_egeria.errors import QueueError
from lightning_egeria.jobs import machine, queue, scheduling
from lightning_egeria.jobs.home import Home
from lightning_egeria.jobs.jobfolders import State
from lightning_egeria.jobs.machine import ThisMachine, devices_here
from lightning_egeria.jobs.queue import Queue, ensure_queue, queue_runs
from lightning_egeria.jobs.submission import remove
from support.jobs.described import alive, described, submitted, until


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("EGERIA_DEVICES", "9")  # as if this machine had as many as any test wants
    return Home(tmp_path / "home")


def add(home, history, command, after=(), **keys):
    keys = {"entry.command": json.dumps(command), **keys}
    (id,) = submitted(home, described(home.path.parent, **keys), history, after)
    return id


def here(home, history, devices, gpus=False):
    return Queue(home, history, lambda backend, address, home: ThisMachine(devices, gpus))


def states(history, *ids):
    return [history.get(id).state.value for id in ids]


def test_three_jobs_on_two_devices_in_order(home, history):
    note = 'echo "$EGERIA_JOB_ID in" >> ../../order; sleep 0.3; echo "$EGERIA_JOB_ID out" >> ../../order'
    ids = [add(home, history, note) for _ in range(3)]
    here(home, history, 2).run()
    assert states(history, *ids) == ["done"] * 3
    lines = (home.jobs / "order").read_text().split("\n")[:-1]
    assert sorted(lines) == sorted(f"{id} {way}" for id in ids for way in ("in", "out"))
    running = most = 0
    for line in lines:
        running += 1 if line.endswith("in") else -1
        most = max(most, running)
    assert most == 2
    assert not queue_runs(home)


def test_jobs_wait_for_others(home, history):
    first = add(home, history, "sleep 0.2; echo x > ../../first")
    second = add(home, history, "cat ../../first", after=[first])
    third = add(home, history, "false", after=[second])
    fourth = add(home, history, "true", after=[third])
    large = add(home, history, "true", **{"resources.devices": 9})
    here(home, history, 2).run()
    assert states(history, first, second, third, fourth, large) == ["done", "done", "failed", "cancelled", "failed"]
    assert history.get(fourth).status.message == f"schedule: job {third}, which it comes after, is failed"
    assert "needs 9 devices, and the largest machine here has 2" in history.get(large).status.message


def test_nothing_is_lost_or_run_twice_when_the_queue_is_killed(home, history, monkeypatch):
    monkeypatch.setenv("EGERIA_DEVICES", "2")
    once = "echo $EGERIA_JOB_ID >> ../../ran; until test -e ../../go; do sleep 0.05; done"
    ids = [add(home, history, once) for _ in range(3)]
    command = [sys.executable, "-m", "lightning_egeria.jobs.queue", str(home.path)]
    with subprocess.Popen(command) as queue:
        until(lambda: (home.jobs / "ran").exists() and len((home.jobs / "ran").read_text().split()) == 2)
        queue.send_signal(signal.SIGKILL)
    assert states(history, *ids) == ["running", "running", "queued"]
    with subprocess.Popen(command) as queue:
        until(lambda: queue_runs(home))
        ensure_queue(home)  # one is enough
        (home.jobs / "go").touch()
        assert queue.wait() == 0
    assert states(history, *ids) == ["done"] * 3
    assert sorted((home.jobs / "ran").read_text().split()) == [str(id) for id in ids]


@pytest.fixture
def watchers(monkeypatch):
    """The processes that watch jobs of this test."""
    started, start = [], machine.start_execution
    monkeypatch.setattr(machine, "start_execution", lambda *of: started.append(start(*of)) or started[-1])
    return started


def test_a_killed_watcher_is_noticed_and_the_job_goes_on(home, history, watchers):
    script = "test $EGERIA_ATTEMPT = 2 && exit; echo $$ > pid; sleep 60"
    id = add(home, history, script)
    running = here(home, history, 1)
    running.step()
    pid = home.folder(id).work / "pid"
    until(lambda: pid.exists() and pid.read_text().strip())
    (watcher,) = watchers
    watcher.kill()
    watcher.wait()
    until(lambda: not alive(int(pid.read_text())))
    running.run()
    assert (history.get(id).state, history.get(id).status.attempt) == (State.DONE, 2)
    assert "the process that watched the job was killed" in home.folder(id).log.read_text()


def test_the_shorter_job_first_under_srtf(home, history):
    home.follow("srtf")
    long = add(
        home,
        history,
        "trap 'exit 75' TERM; test $EGERIA_ATTEMPT = 2 && exit; touch \"$EGERIA_CHECKPOINTS/x\"\n"
        'echo \'{"version": 1, "seconds_left": 500}\' > "$EGERIA_HINTS"; while :; do sleep 0.05; done',
    )
    running = here(home, history, 1)

    def long_has_told():
        running.step()
        return home.folder(long).hints.exists()

    until(long_has_told)
    unknown = add(home, history, "true")
    short = add(home, history, "true", **{"resources.time": "1m"})
    running.run()
    assert states(history, long, short, unknown) == ["done"] * 3
    ends = {id: history.get(id).status.ended for id in (short, long, unknown)}
    assert sorted(ends, key=ends.get) == [short, long, unknown]
    assert history.get(long).status.attempt == 2


def test_a_job_in_a_gap_makes_room(home, history, monkeypatch):
    saves = (
        "trap 'exit 75' TERM; test $EGERIA_ATTEMPT = 2 && exit; touch \"$EGERIA_CHECKPOINTS/x\"\n"
        "while :; do sleep 0.05; done"
    )
    first = add(home, history, "until test -e ../../go; do sleep 0.05; done")
    large = add(home, history, "true", **{"resources.devices": 2})
    small = add(home, history, saves)
    running = here(home, history, 2)
    monkeypatch.setattr(scheduling, "BackFill", lambda: BackFill(threshold_s=0.0))
    running.step()
    assert states(history, first, large, small) == ["running", "queued", "running"]
    until(lambda: (home.folder(small).checkpoints / "x").exists())
    (home.jobs / "go").touch()
    running.run()
    assert states(history, first, large, small) == ["done"] * 3
    assert history.get(small).status.attempt == 2
    assert history.get(large).status.started < history.get(small).status.started


def test_a_gpu_job_sees_its_own_devices(home, history):
    ids = [add(home, history, "echo gpus $CUDA_VISIBLE_DEVICES; sleep 0.2", **{"resources.devices": n}) for n in (1, 2)]
    here(home, history, 3, gpus=True).run()
    seen = [home.folder(id).log.read_text().partition("\ngpus ")[2].split()[0] for id in ids]
    assert seen == ["0", "1,2"]


def test_the_log_has_what_keeps_a_watcher_from_starting(home, history, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(queue.sys, "executable", "/no/python")  # of the process that submits
        id = add(home, history, "true")
    here(home, history, 1).step()
    assert history.get(id).status.message.startswith("schedule: cannot start a process")


def test_the_queue_of_a_job_is_not_part_of_it(home, monkeypatch):
    monkeypatch.setenv("EGERIA_JOB_FOLDER", "/x")
    seen = []
    monkeypatch.setattr(machine.subprocess, "Popen", lambda command, env, **more: seen.append(env) or _Ended())
    (home.path / "queue.log").write_text("x\nwhy\n")
    with pytest.raises(QueueError, match="the queue does not start: why"):
        ensure_queue(home)
    assert "EGERIA_JOB_FOLDER" not in seen[0]


class _Ended:
    returncode = 1

    def poll(self):
        return 1


def test_a_job_that_nobody_watches_can_be_cancelled(home, history, watchers):
    """Nobody watches the job any more, and its process has ended with who watched it."""
    id = add(home, history, "touch up; exec sleep 60")
    running = here(home, history, 1)
    running.step()
    until((home.folder(id).work / "up").exists)
    (watcher,) = watchers
    watcher.kill()
    watcher.wait()
    home.folder(id).ask(State.CANCELLED)
    here(home, history, 1).run()
    assert (history.get(id).state, home.folder(id).status().state) == (State.CANCELLED, State.CANCELLED)


def test_a_watcher_that_ends_at_once_is_given_up(home, history, monkeypatch):
    monkeypatch.setattr(machine, "start_execution", lambda *_: subprocess.Popen(["true"]))
    id = add(home, history, "true")
    here(home, history, 1).run()
    assert history.get(id).state is State.FAILED
    assert "stopped 3 times in a row" in history.get(id).status.message


def test_a_full_disk_is_waited_for(home, history, monkeypatch, capsys):
    ids, steps = [add(home, history, "true")], []
    step = Queue.step

    def full_at_first(running):
        steps.append(running)
        if len(steps) < 3:
            raise OSError(28, "No space left on device")
        step(running)

    monkeypatch.setattr(queue, "_WAITS_FOR_ROOM_S", 0.01)
    monkeypatch.setattr(Queue, "step", full_at_first)
    here(home, history, 1).run()
    assert states(history, *ids) == ["done"]
    assert capsys.readouterr().err.count("No space left on device. The queue waits") == 1


def test_devices_here(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: "/bin/x")
    listed = subprocess.CompletedProcess([], 0, "GPU 0: x\nGPU 1: y\n")
    monkeypatch.setattr(machine.subprocess, "run", lambda *a, **k: listed)
    assert devices_here() == (2, True)
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert devices_here() == (len(os.sched_getaffinity(0)), False)
    monkeypatch.setenv("EGERIA_DEVICES", "7")
    assert devices_here() == (7, False)
    for wrong in ("two", "0", "-1"):
        monkeypatch.setenv("EGERIA_DEVICES", wrong)
        with pytest.raises(QueueError, match=f"a number of devices, got '{wrong}'"):
            devices_here()


def test_a_job_goes_on_with_another_number_of_devices(home, history):
    home.follow("fair")
    saves = (
        "trap 'exit 75' TERM; touch \"$EGERIA_CHECKPOINTS/$EGERIA_ATTEMPT\"; echo on $EGERIA_JOB_DEVICES; touch up\n"
        "until test -e ../../end; do sleep 0.05; done"
    )
    first = add(home, history, saves, **{"resources.most_devices": 3})
    running = here(home, history, 3)
    running.step()
    up = home.folder(first).work / "up"
    until(up.exists)
    up.unlink()
    second = add(home, history, "until test -e ../../go; do sleep 0.05; done")

    def both_run():
        running.step()
        return up.exists() and states(history, first, second) == ["running", "running"]

    until(both_run)
    up.unlink()
    assert (history.get(first).given, history.get(second).given) == (2, 1)
    (home.jobs / "go").touch()

    def first_grows():
        running.step()
        return up.exists() and history.get(first).given == 3

    until(first_grows)
    (home.jobs / "end").touch()
    running.run()
    assert states(history, first, second) == ["done", "done"]
    log = home.folder(first).log.read_text()
    assert re.findall(r"^on (\d)$", log, re.MULTILINE) == ["3", "2", "3"]
    status = history.get(first).status
    assert (status.attempt, status.failures, status.stalls) == (3, 0, 0)
    assert status.service > 0


def test_a_policy_that_changes_refuses_what_it_cannot_serve(home, history):
    fits, fixed = add(home, history, "true"), add(home, history, "true", **{"resources.devices": 2})
    home.follow("pollux")
    here(home, history, 3).run()
    assert states(history, fits, fixed) == ["done", "failed"]
    assert "under pollux the number of devices of a job changes" in history.get(fixed).status.message


class Silent(ThisMachine):
    """A cluster that does not answer at first, nor when the test says so."""

    silent = True

    def nodes(self):
        if self.silent:
            raise QueueError("no cluster answers at x")
        return super().nodes()

    def start(self, *of):
        if self.silent:
            raise QueueError("no cluster answers at x")
        super().start(*of)


def test_jobs_wait_for_a_cluster_that_does_not_answer(home, history, monkeypatch, capsys):
    monkeypatch.setattr(queue, "_NODES_S", 0.0)
    id, machines = add(home, history, "true"), Silent(1)
    running = Queue(home, history, lambda backend, address, home: machines)
    for _ in range(3):
        running.step()
    assert states(history, id) == ["queued"]
    assert capsys.readouterr().err == "schedule: waits: no cluster answers at x\n"
    assert history.get(id).status.message == "schedule: waits: no cluster answers at x"
    machines.silent = False
    start = machines.start
    monkeypatch.setattr(machines, "start", lambda *of: Silent.start(Silent(1), *of))  # it goes as the job starts
    running.step()
    assert (states(history, id), history.get(id).node, history.get(id).status.message) == (["queued"], "", "")
    monkeypatch.setattr(machines, "start", start)
    running.run()
    assert states(history, id) == ["done"]


def test_a_back_end_that_the_queue_cannot_use_holds_up_no_other(home, history, capsys):
    far, near = add(home, history, "true"), add(home, history, "true")
    history.update(far, backend="ray", address="http://x")

    def machines_of(backend, address, home):
        if backend == "ray":
            raise QueueError("ray needs ray")
        return ThisMachine(1)

    running = Queue(home, history, machines_of)

    def near_has_ended():
        running.step()
        return history.get(near).closed is not None

    until(near_has_ended)
    assert states(history, far, near) == ["queued", "done"]
    assert capsys.readouterr().err == "schedule: waits: ray needs ray\n"


@pytest.mark.slow
def test_jobs_that_arrive_faster_than_another_saves_do_not_fail_it(home, history):
    home.follow("fair")
    waits = "touch up; until test -e ../../go; do sleep 0.05; done"  # it keeps no checkpoint
    first = add(home, history, waits, **{"resources.most_devices": 5})
    running = here(home, history, 5)

    def runs_on(devices):
        running.step()
        return (history.get(first).given, (home.folder(first).work / "up").exists()) == (devices, True)

    for devices in (5, 4, 3, 2, 1):
        until(lambda devices=devices: runs_on(devices))
        (home.folder(first).work / "up").unlink()
        if devices > 1:
            add(home, history, "until test -e ../../go; do sleep 0.05; done")
    assert history.get(first).status.stalls == 0
    (home.jobs / "go").touch()
    running.run()
    assert {row.state for row in history.finished(9)} == {State.DONE}


@pytest.mark.parametrize(
    "made",
    [
        pytest.param("rm -rf checkpoints", id="no checkpoints"),
        pytest.param("rm -rf checkpoints; touch checkpoints", id="a file for checkpoints"),
        pytest.param("rm log; mkfifo log", id="a pipe for the log"),
        pytest.param("rm status.json; mkdir -p status.json/x", id="a folder for the status"),
        pytest.param("rm status.json; mkfifo status.json", id="a pipe for the status"),
        pytest.param("mkdir asked", id="a folder for requests"),
        pytest.param("rm lock; mkdir lock", id="a folder for the lock"),
        pytest.param("rm lock; ln -s /etc/passwd lock", id="a link for the lock"),
        pytest.param('cd ..; rm -rf "$folder"', id="no folder"),
        pytest.param('cd ..; rm -rf "$folder"; touch "$folder"', id="a file for the folder"),
        pytest.param('cd ..; mv "$folder" away; ln -s away "$folder"', id="a link for the folder"),
    ],
)
def test_what_a_job_makes_of_its_folder_stops_no_other(made, home, history):
    """Its watcher is killed too, so that the queue has to clean up."""
    bad = add(home, history, f'cd ..; folder=$PWD; {made}; kill -9 "$PPID"')
    good = add(home, history, "true")
    here(home, history, 1).run()
    assert states(history, bad, good) == ["failed", "done"]
    assert history.get(bad).status.message
    remove(home, history, bad)  # it is a job like others
    with pytest.raises(QueueError, match="there is no job"):
        history.get(bad)


def test_a_job_whose_folder_cannot_be_used_leaves_no_process(home, history):
    """The queue finds that before the process that watches the job does: nothing can be asked of that one."""
    bad = add(home, history, 'cd ..; folder=$PWD; cd ..; rm -rf "$folder"; touch "$folder"; sleep 60')
    here(home, history, 1).run()  # a fixture fails if a process is left
    assert states(history, bad) == ["failed"]


@pytest.mark.parametrize("end", ["exit 75", "exit 1"])
def test_a_job_may_remove_its_checkpoints(end, home, history):
    bad = add(home, history, f"rm -rf ../checkpoints; {end}", retries="1")
    good = add(home, history, "true")
    here(home, history, 1).run()
    assert states(history, bad, good) == ["failed", "done"]
