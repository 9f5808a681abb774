import os
import signal
import subprocess

from described import PYTHON, alive, until

from lightning_egeria.workflow.processes import MARK, kill_group, kill_marked, start


def test_a_process_and_what_it_starts_are_killed(tmp_path):
    process = start(["/bin/sh", "-c", "sleep 60 & echo $!; wait"], tmp_path, dict(os.environ))
    until(lambda: (tmp_path / "out").exists() or _read(process, tmp_path / "out"))
    child = int((tmp_path / "out").read_text())
    kill_group(process)
    assert process.wait() == -signal.SIGKILL
    until(lambda: not alive(child))
    process.stdout.close()
    kill_group(process)  # once more does nothing


def test_what_an_earlier_attempt_left_is_found_by_its_folder(tmp_path):
    sleep = [PYTHON, "-c", "import time; time.sleep(60)"]
    own = subprocess.Popen(sleep, env={**os.environ, MARK: str(tmp_path)})
    other = subprocess.Popen(sleep, env={**os.environ, MARK: str(tmp_path) + "x"})
    try:
        until(lambda: kill_marked(tmp_path) or own.poll() is not None)
        assert own.wait() == -signal.SIGKILL
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    assert kill_marked(tmp_path) == 0


def test_a_signal_of_slurm_to_all_processes_is_for_the_watcher(tmp_path):
    process = start(["/bin/sh", "-c", "kill -USR2 $$; kill -USR2 0; exit 7"], tmp_path, dict(os.environ))
    assert process.wait() == 7
    process.stdout.close()


def _read(process, path):
    try:
        text = os.read(process.stdout.fileno(), 100)
    except BlockingIOError:
        return False
    path.write_bytes(text)
    return True
