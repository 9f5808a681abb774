import os
import time
from pathlib import Path

import pytest

from lightning_egeria.errors import ExecutionError
from lightning_egeria.jobs.environments import environment_name
from lightning_egeria.jobs.eviction import evict
from lightning_egeria.jobs.home import ARRAYS
from lightning_egeria.jobs.rundirs import LOCK, read_run_directory
from support.jobs.described import described, ended, submitted

HOUR, DAY = 3600, 86400


def old(path):
    os.utime(path, (time.time() - 2 * DAY,) * 2)


def test_what_a_job_may_need_stays(home, history, tmp_path):
    ids = {}
    for name in ("waits", "ended now", "ended long ago"):
        description = described(tmp_path / name, **{"entry.command": f"echo {name}"})
        (ids[name],) = submitted(home, description, history)
    (unused,) = home.compiler(history).compile(described(tmp_path / "never", **{"entry.command": "echo never"}))
    ended(home, history, ids["ended now"], "failed", time.time() - HOUR)
    ended(home, history, ids["ended long ago"], "done", time.time() - 2 * DAY)
    for place in home.runs.iterdir():
        old(place)
    runs = {name: Path(history.get(id).run) for name, id in ids.items()}
    evicted = evict(home, history, DAY)
    assert sorted(evicted.runs) == sorted([runs["ended long ago"].name, unused.path.name])
    assert sorted(home.runs.iterdir()) == sorted([runs["waits"], runs["ended now"]])
    assert home.folder(ids["ended long ago"]).log.exists()  # what it has written stays
    with pytest.raises(ExecutionError, match="cannot read the run directory"):
        read_run_directory(runs["ended long ago"])
    # Compiled again, it is there again.
    (again,) = home.compiler(history).compile(described(tmp_path / "never", **{"entry.command": "echo never"}))
    assert read_run_directory(again.path)["name"] == "hello"


def test_what_the_jobs_of_an_array_share_goes_when_slurm_has_none(home, history, tmp_path):
    shared, young = home.path / ARRAYS / "1", home.path / ARRAYS / "2"
    for place in (shared, young):
        place.mkdir(parents=True)
    old(shared)
    (compiled,) = home.compiler(history).compile(described(tmp_path))
    with history.transaction():
        id = history.add(compiled.job, compiled.path, "slurm")
    evict(home, history, DAY)
    assert shared.exists()
    history.update(id, closed=1.0)
    evict(home, history, DAY)
    assert (shared.exists(), young.exists()) == (False, True)


def test_what_is_compiled_again_is_young(home, history, tmp_path):
    description = described(tmp_path)
    for _ in range(2):
        (one,) = home.compiler(history).compile(description)
        kept = evict(home, history, HOUR)
        old(one.path)
    assert kept.runs == []


def test_the_environment_of_a_job_that_runs_stays(home, history, tmp_path):
    (id,) = submitted(home, described(tmp_path), history)
    needed = environment_name((Path(history.get(id).run) / LOCK).read_text())
    for name in (needed, "other"):
        (home.environments / name).mkdir(parents=True)
        (home.environments / name / "ready").touch()
        old(home.environments / name / "ready")
    assert evict(home, history, DAY).environments == ["other"]
    assert (home.environments / needed).is_dir()
