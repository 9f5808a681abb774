"""Jobs in a YAML file, and what is wrong with them."""

from pathlib import Path

import pytest

from lightning_egeria.cluster.job_files import JobDescription, read_jobs
from lightning_egeria.errors import JobError


def test_jobs_are_read(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "jobs:\n  vision:\n    command: [python, train.py, 'devices={devices}', '{folder}/x', '{other}']\n"
        "    arrives_s: 3\n    devices: 2\n    most_devices: 4\n    environment: {A: b}\n"
        "  text:\n    command: ['true']\n"
    )
    vision, text = read_jobs(path)
    command = ("python", "train.py", "devices={devices}", "{folder}/x", "{other}")
    assert vision == JobDescription("vision", command, 3.0, 2, 4, {"A": "b"})
    assert text == JobDescription("text", ("true",))
    expected = ["python", "train.py", "devices=3", "/jobs/a {devices}/x", "{other}"]
    assert vision.arguments(3, Path("/jobs/a {devices}")) == expected


BAD = {
    "no file": (None, "cannot be read as YAML"),
    "no yaml": ("{", "cannot be read as YAML"),
    "a tag": ("jobs: !!python/object/apply:os.system [ls]", "cannot be read as YAML"),
    "a list": ("[]", "needs one key, 'jobs'"),
    "another key": ("jobs: {a: {command: [b]}}\npolicy: x", "needs one key, 'jobs'"),
    "no jobs": ("jobs: {}", "needs one key, 'jobs'"),
    "a path": ("jobs: {../a: {command: [b]}}", "a job's name is letters"),
    "a number": ("jobs: {1: {command: [b]}}", "a job's name is letters"),
    "no command": ("jobs: {a: {devices: 1}}", "job 'a' needs a mapping with a command"),
    "a text": ("jobs: {a: {command: ls -l}}", "job 'a': command must be a list of strings"),
    "a typo": ("jobs: {a: {command: [b], device: 1}}", "job 'a' has no key 'device'; did you mean 'devices'"),
    "no devices": ("jobs: {a: {command: [b], devices: 0}}", "job 'a': devices must be an integer of at least 1"),
    "few": ("jobs: {a: {command: [b], devices: 2, most_devices: 1}}", "most_devices must be at least devices=2"),
    "early": ("jobs: {a: {command: [b], arrives_s: -1}}", "arrives_s must be a number of at least 0"),
    "numbers": ("jobs: {a: {command: [b], environment: {A: 1}}}", "environment must be a mapping of strings"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_mistake_is_named(text, message, tmp_path):
    if text is not None:
        (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(JobError, match=message):
        read_jobs(tmp_path / "jobs.yaml")
