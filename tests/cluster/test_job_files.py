"""Jobs in a YAML file, and what is wrong with them."""

from pathlib import Path

import pytest

from lightning_egeria.cluster.job_files import JobDescription, read_jobs
from lightning_egeria.errors import DescriptionError


def test_jobs_are_read(tmp_path):
    path = tmp_path / "jobs.yaml"
    path.write_text(
        "jobs:\n  vision:\n    command: [python, train.py, 'devices={devices}', '{folder}/x', '{other}', 0.10]\n"
        "    arrives_s: 3\n    devices: 2\n    most_devices: 4\n    environment: {A: b, C: no}\n"
        "  text:\n    command: ['true']\n    devices: 2\n"
    )
    vision, text = read_jobs(path)
    command = ["python", "train.py", "devices={devices}", "{folder}/x", "{other}", "0.10"]
    environment = {"A": "b", "C": "no"}
    assert vision == JobDescription(command, 2, 4, arrives_s=3.0, environment=environment, name="vision")
    assert text == JobDescription(["true"], 2, name="text")
    assert (vision.most, text.most) == (4, 2)
    expected = ["python", "train.py", "devices=3", "/jobs/a {devices}/x", "{other}", "0.10"]
    assert vision.arguments(3, Path("/jobs/a {devices}")) == expected


BAD = {
    "no file": (None, "cannot read it"),
    "no yaml": ("{", "not YAML"),
    "a tag": ("jobs: !!python/object/apply:os.system [ls]", "is not allowed"),
    "a list": ("[]", "expected keys such as jobs, got a list"),
    "another key": ("jobs: {a: {command: [b]}}\npolicy: x", "jobs.yaml:2: policy: no such key"),
    "no jobs": ("jobs: {}", "jobs: expected at least one job"),
    "a path": ("jobs: {../a: {command: [b]}}", "'../a' is no name that can stand here"),
    "twice": ("jobs:\n  a: {command: [b]}\n  a: {command: [c]}", "jobs.yaml:3: jobs.a: stands here twice"),
    "no command": ("jobs: {a: {devices: 1}}", "jobs.a.command: is missing"),
    "no program": ("jobs: {a: {command: []}}", "jobs.a.command: expected a program"),
    "a text": ("jobs: {a: {command: ls -l}}", "jobs.a.command: expected a list, got 'ls -l'"),
    "a typo": ("jobs: {a: {command: [b], device: 1}}", "Did you mean 'jobs.a.devices'?"),
    "no devices": ("jobs: {a: {command: [b], devices: 0}}", "jobs.a.devices: must be at least 1, got 0"),
    "few": ("jobs: {a: {command: [b], devices: 2, most_devices: 1}}", "most_devices: must be at least devices=2"),
    "early": ("jobs: {a: {command: [b], arrives_s: -1}}", "jobs.a.arrives_s: must be at least 0, got -1"),
    "never": ("jobs: {a: {command: [b], arrives_s: .inf}}", "jobs.a.arrives_s: expected a number, got '.inf'"),
    "a name": ("jobs: {a: {command: [b], environment: {A B: 1}}}", "'A B' is no name"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD)
def test_a_mistake_is_named(text, message, tmp_path):
    if text is not None:
        (tmp_path / "jobs.yaml").write_text(text)
    with pytest.raises(DescriptionError) as caught:
        read_jobs(tmp_path / "jobs.yaml")
    assert message in str(caught.value)
